"""Emits the nodes of adapters: the products with A and B, and the Add that adds them to a layer's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.lora._targets import INTEGER_PRODUCTS, Target
from onnxtrain.passes.parameters.dropout_traces import mark_adapter_dropout


@dataclass(frozen=True)
class Adapter:
    """The matrices of the adapter of one layer.

    Attributes:
        target: the layer.
        a: A transposed, [in, r]; for a convolution, A itself, e.g. [r, in, 1, 1].
        b: B transposed, [r, out]; for a convolution, B itself, e.g. [out, r, 1, 1].
        scaling: factor by which the product of A and B is multiplied.
    """

    target: Target
    a: ir.Value
    b: ir.Value
    scaling: float


def write_adapters(
    model: ir.Model, targets: Sequence[Target], adapters: dict[str, Adapter], *, dropout: float
) -> None:
    """Adds the product of each adapter to the output of its layer, in place.

    Args:
        model: the model.
        targets: the layers. The parts of a merged layer, e.g. the q_proj, k_proj and v_proj of a qkv_proj, must be
            adjacent.
        adapters: the adapters by module path.
        dropout: Dropout ratio of the adapters' inputs; 0 for no Dropout.
    """
    op = Emitter(model.graph, functions=model.functions)
    # Parts of a merged layer are adjacent, and share one Add.
    for node, parts in groupby(targets, key=lambda target: target.node):
        # A layer that runs twice has one adapter and two nodes.
        chosen = [replace(adapters[target.module], target=target) for target in parts]
        output, form = _output_of(chosen[0].target)
        producer = output.producer()
        assert producer is not None
        # Before the Add, which reads the output itself, is emitted.
        uses, is_output, name = list(output.uses()), output.is_graph_output(), output.name
        with op.placing(after=producer):
            op.scope = f"{chosen[0].target.module.rpartition('.')[0] or 'lora'}/lora/"
            delta = _delta(op, chosen, node, dropout)
            total = form.rounded(op, op.Add(form.real(op, output), delta))
            # Later passes rely on declared shapes.
            total.shape = output.shape
            if total.dtype is None:
                total.type = output.type
        for use in uses:
            use.node.replace_input_with(use.idx, total)
        # Callers request an output by its name, which is transferred to the sum.
        if is_output:
            model.graph.outputs[list(model.graph.outputs).index(output)] = total
            output.name, total.name = f"{name}.base", name
    op.scope = ""


@dataclass(frozen=True)
class _Form:
    """The representation (float or quantized) of a layer's output; adapters are added in floating point.

    Attributes:
        scale: scale and zero point with which the layer's output is quantized, e.g. values `y_scale` and
            `y_zero_point`; [] if it is not quantized.
        is_integer: True if the output is a quantized (integer) tensor, False if it is floating-point, possibly after
            a DequantizeLinear.
    """

    scale: Sequence[ir.Value]
    is_integer: bool = False

    def real(self, op: Emitter, output: ir.Value) -> ir.Value:
        """Returns the output in floating point; emits a DequantizeLinear if it is quantized."""
        return op.DequantizeLinear(output, *self.scale) if self.is_integer else output

    def rounded(self, op: Emitter, total: ir.Value) -> ir.Value:
        """Converts the sum of output and adapter to the output's representation.

        If the output is quantized, the sum is quantized with the same scale and zero point. If the output has been
        quantized and dequantized, so is the sum.
        """
        # The next layer multiplies integers. Without an active adapter, the sum equals the output, and rounding has no
        # effect.
        if self.scale:
            total = op.QuantizeLinear(total, *self.scale)
        return op.DequantizeLinear(total, *self.scale) if self.scale and not self.is_integer else total


def _output_of(target: Target) -> tuple[ir.Value, _Form]:
    """Returns the value to which a layer's adapter is added, and the value's representation."""
    node, output = target.node, target.node.outputs[0]
    if target.is_integer:
        indices = INTEGER_PRODUCTS[node.domain, node.op_type][:2]
        scale = [value for i in indices if i < len(node.inputs) and (value := node.inputs[i]) is not None]
        # QGemm without an output scale returns floating point.
        return output, _Form(scale, is_integer=bool(scale))
    output = _with_bias(output)
    quantize = _sole_reader(output, "QuantizeLinear")
    dequantize = None if quantize is None else _sole_reader(quantize.outputs[0], "DequantizeLinear")
    # ONNX Runtime computes a product between DequantizeLinear and QuantizeLinear in integers. An Add in between would
    # make it a floating-point product, which is sometimes rounded differently.
    if quantize is None or dequantize is None or quantize.inputs[1:] != dequantize.inputs[1:]:
        return output, _Form([])
    return dequantize.outputs[0], _Form([value for value in quantize.inputs[1:] if value is not None])


def _with_bias(output: ir.Value) -> ir.Value:
    """Returns the output of the bias Add after a layer; returns `output` if there is no such Add, or a Gelu follows."""
    add = _sole_reader(output, "Add", any_input=True)
    bias = None if add is None else next((value for value in add.inputs if value is not output), None)
    # ONNX Runtime (1.32) fuses a product such as MatMulNBits with this Add, which rounds differently than two nodes. An
    # adapter in between would change the results of a model without active adapters.
    if add is None or bias is None or bias.const_value is None or len(bias.const_value.shape) != 1:
        return output
    # If a Gelu follows, the Add is fused with it instead of with the product.
    return output if _feeds_gelu(add.outputs[0]) else add.outputs[0]


def _feeds_gelu(value: ir.Value) -> bool:
    """True if ONNX Runtime fuses a Gelu with the bias Add that computes the value."""
    readers = [use.node for use in value.uses()]
    if len(readers) == 1 and readers[0].op_type in ("Gelu", "FastGelu"):
        return True
    # ONNX Runtime (1.32) fuses the Erf formula, which divides the value by the square root of 2, before it fuses biases
    # with products. Other formulas are not fused, or only after the biases have been fused with their products.
    node = next((reader for reader in readers if reader.op_type == "Div"), None)
    for op_type in ("Erf", "Add", "Mul"):
        node = None if node is None else _sole_reader(node.outputs[0], op_type, any_input=True)
    # The factor is the value, or half of it.
    return node is not None and any(
        factor is value or (factor is not None and factor.producer() in readers) for factor in node.inputs
    )


def _sole_reader(value: ir.Value, op_type: str, *, any_input: bool = False) -> ir.Node | None:
    """Returns the only reader of a value if it has this op type; None otherwise.

    Args:
        value: the value.
        op_type: e.g. "QuantizeLinear".
        any_input: False if the value must be the node's first input.
    """
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = uses[0].node
    reads = any_input or uses[0].idx == 0
    return node if node.domain == "" and node.op_type == op_type and reads else None


def _delta(op: Emitter, adapters: Sequence[Adapter], node: ir.Node, dropout: float) -> ir.Value:
    """Emits the sum of the products of a node's adapters, to be added to the node's output."""
    x = node.inputs[0]
    assert x is not None
    weights = adapters[0].a.dtype
    differs = adapters[0].target.dtype != weights
    # Adapters of a float16 model are trained in float32, as in PEFT (autocast_adapter_dtype). ONNX Runtime removes
    # casts without effect.
    if adapters[0].target.is_integer:
        x = op.DequantizeLinear(x, *(value for value in node.inputs[1:3] if value is not None))
    read = x
    x = op.Cast(x, to=weights) if differs else x
    if adapters[0].target.is_convolution:
        result = _convolved(op, adapters[0], x, node, dropout)
    else:
        result = _multiplied(op, adapters, x, dropout)
    if not differs:
        return result
    dtype = read.dtype or adapters[0].target.dtype
    return op.CastLike(result, read) if dtype is None else op.Cast(result, to=dtype)


def _dropped(op: Emitter, x: ir.Value, dropout: float) -> ir.Value:
    if not dropout:
        return x
    # Before opset 12, Dropout has no mode. The mark makes training enable this Dropout, and excludes it from
    # `batch_norm` and `dropout`, which set the modes of the model's own layers.
    if op.opset < 12:
        dropped: ir.Value = op.Dropout(x, ratio=dropout)
    else:
        dropped = op.Dropout(x, op.const(dropout, ir.DataType.FLOAT), op.const(True))
    node = dropped.producer()
    assert node is not None
    mark_adapter_dropout(node)
    return dropped


def _scaled(op: Emitter, value: ir.Value, scaling: float) -> ir.Value:
    # Adapters of a deployed model have a factor of 1, which needs no node.
    return value if scaling == 1 else op.Mul(value, scaling)


def _convolved(op: Emitter, adapter: Adapter, x: ir.Value, node: ir.Node, dropout: float) -> ir.Value:
    # As in PEFT, the first of both convolutions has the layer's stride, and the second has none.
    strides = list(node.attributes.get_ints("strides", ())) or None
    hidden = op.Conv(_dropped(op, x, dropout), adapter.a, **({"strides": strides} if strides else {}))
    return op.Conv(_scaled(op, hidden, adapter.scaling), adapter.b)


def _multiplied(op: Emitter, adapters: Sequence[Adapter], x: ir.Value, dropout: float) -> ir.Value:
    """Emits the scaled product x A B for a layer, or for the parts of a merged layer, e.g. a qkv_proj."""
    total = adapters[0].target.total
    if len(adapters) == 1 and adapters[0].target.output_size == total:
        # The scaling multiplies the smallest of the three tensors.
        hidden = op.MatMul(_dropped(op, x, dropout), adapters[0].a)
        return op.MatMul(_scaled(op, hidden, adapters[0].scaling), adapters[0].b)
    # Parts share one product with x, and one with B: each B is zero-padded to the outputs of the whole layer, so that
    # parts without an adapter get zeros.
    parts = []
    for adapter in adapters:
        behind = total - adapter.target.start - adapter.target.output_size
        b = _scaled(op, adapter.b, adapter.scaling)
        pads = [0, adapter.target.start, 0, behind]
        parts.append(op.Pad(b, pads=pads) if op.opset < 11 else op.Pad(b, op.const(np.array(pads, np.int64))))
    b = op.Concat(*parts, axis=0)
    if dropout:
        # Each adapter drops different elements, as PEFT's layers do.
        hidden = op.Concat(*(op.MatMul(_dropped(op, x, dropout), adapter.a) for adapter in adapters), axis=-1)
    else:
        hidden = op.MatMul(x, op.Concat(*(adapter.a for adapter in adapters), axis=1))
    return op.MatMul(hidden, b)
