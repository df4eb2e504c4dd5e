"""Keeps activations in floating point in products with quantized weights."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.tidy.constants import add_constant
from onnxtrain.passes.tidy.replace_value import successor
from onnxtrain.passes.tidy.unique_names import fresh_name

# Dtypes of weights that ONNX Runtime (1.32) packs for MatMulNBits.
_CODES = frozenset(ir.DataType[name] for name in ("INT2", "UINT2", "INT4", "UINT4", "INT8", "UINT8"))


class FloatProductsPass(ir.passes.InPlacePass):
    """Removes `accuracy_level` from onnxruntime's matrix products with quantized weights, such as MatMulNBits.

    With `accuracy_level=4`, which onnxruntime-genai's model builder sets, kernels round activations to int8. Gradient
    rules assume products in floating point, so the forward pass must compute products in floating point as well.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Removes the attribute from nodes of the graph and its subgraphs, in place."""
        modified = False
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            if node.domain == "com.microsoft" and "accuracy_level" in node.attributes:
                # By default (0), the products are computed in the dtype of the inputs.
                del node.attributes["accuracy_level"]
                modified = True
        return ir.passes.PassResult(model, modified)


class FloatDequantizedPass(ir.passes.InPlacePass):
    """Keeps ONNX Runtime from rounding activations to int8 in matrix products with a dequantized weight.

    ONNX Runtime (1.32) fuses a DequantizeLinear and the following MatMul or Gemm into a MatMulNBits with
    `accuracy_level=4` if nothing else reads the dequantized weight. The level is a session option, which a file cannot
    set. The pass turns these products into FusedMatMul, which computes the same result and is not fused.

    Products with an output named in `kept` must round as in the original file, and are not rewritten. ONNX Runtime only
    fuses such a product if nothing else reads its weight. Other readers of the weight, e.g. in the gradient, therefore
    get a second DequantizeLinear with copies of the integers, scales and zero points.
    """

    def __init__(self, kept: Collection[str] = ()) -> None:
        """Creates the pass.

        Args:
            kept: output names of the products that must be computed as in the original file.
        """
        super().__init__()
        self._kept = kept

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites each MatMul and Gemm with a dequantized weight in the graph and its subgraphs, in place."""
        modified = False
        for node in tuple(ir.traversal.RecursiveGraphIterator(model.graph)):
            if _is_weight(node):
                modified |= self._separate(model, node)
        for node in tuple(ir.traversal.RecursiveGraphIterator(model.graph)):
            if _reads_weight(node) and node.outputs[0].name not in self._kept:
                _write_unfused(model, node)
                modified = True
        return ir.passes.PassResult(model, modified)

    def _separate(self, model: ir.Model, node: ir.Node) -> bool:
        """Adds a second DequantizeLinear of a weight, so that products in `kept` are the only readers of the first.

        All consumers whose output is not named in `kept` read the second one. Does nothing if all consumers, or none,
        are named in `kept`.

        Args:
            model: the model, modified in place.
            node: the DequantizeLinear of the weight.

        Returns:
            True if the node was added.
        """
        uses = list(node.outputs[0].uses())
        others = [use for use in uses if use.node.outputs[0].name not in self._kept]
        if not others or len(others) == len(uses):
            return False
        output = node.outputs[0]
        copy = ir.node(
            "DequantizeLinear", [_copied(model, v) for v in node.inputs], name=f"{node.name}.float"
        )
        copy.attributes.update(node.attributes)
        copy.outputs[0].name = fresh_name(model, f"{output.name}.float")
        copy.outputs[0].type, copy.outputs[0].shape = output.type, output.shape
        node.append(copy)
        for use in others:
            use.node.replace_input_with(use.idx, copy.outputs[0])
        return True


def _copied(model: ir.Model, value: ir.Value | None) -> ir.Value | None:
    """Returns a copy of an initializer. Other values are returned unchanged."""
    if value is None or value.const_value is None or value.is_graph_input():
        return value
    tensor = value.const_value
    name = fresh_name(model, f"{value.name}.float")
    return add_constant(model.graph, ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name))


def _is_weight(node: ir.Node) -> bool:
    """True if a node is a DequantizeLinear of a stored weight with at most 8 bits."""
    if node.op_type != "DequantizeLinear" or node.domain != "" or node.inputs[0] is None:
        return False
    return node.inputs[0].dtype in _CODES and node.inputs[0].is_initializer()


def _reads_weight(node: ir.Node) -> bool:
    """True if ONNX Runtime may fuse a product and the DequantizeLinear of its weight into a MatMulNBits."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return False
    # Transposed weights are not fused. Products of two dequantized factors become integer products, as in the original
    # file.
    if node.attributes.get_int("transA", 0) or node.attributes.get_int("transB", 0):
        return False
    left, right = (None if value is None else value.producer() for value in node.inputs[:2])
    return right is not None and _is_weight(right) and (left is None or left.op_type != "DequantizeLinear")


def _write_unfused(model: ir.Model, node: ir.Node) -> None:
    """Rewrites a MatMul or Gemm as a FusedMatMul, in place. The bias of a Gemm is added by a separate Add.

    The inputs of the Gemm must not be transposed. If `beta` is not 1, a Mul scales the bias. If `beta` is 0, the bias
    is dropped.
    """
    model.graph.opset_imports.setdefault("com.microsoft", 1)
    alpha, beta = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
    addend = node.inputs[2] if len(node.inputs) > 2 else None
    node.domain, node.op_type = "com.microsoft", "FusedMatMul"
    node.attributes.clear()
    node.attributes.add(ir.AttrFloat32("alpha", alpha))
    node.resize_inputs(2)
    if addend is None or not beta:
        return
    product, last = node.outputs[0], node
    total = successor(product)
    product.name = fresh_name(model, f"{total.name}.product")
    if beta != 1:
        last = ir.node("Mul", [addend, _number(model, beta, product.dtype)])
        last.outputs[0].name = fresh_name(model, f"{total.name}.addend")
        last.outputs[0].type, last.outputs[0].shape = addend.type, addend.shape
        addend = last.outputs[0]
        node.append(last)
    last.append(ir.node("Add", [product, addend], outputs=[total]))


def _number(model: ir.Model, number: float, dtype: ir.DataType | None) -> ir.Value:
    array = np.array(number, (dtype or ir.DataType.FLOAT).numpy())
    return add_constant(model.graph, ir.tensor(array, name=fresh_name(model, "onnxtrain.beta")))
