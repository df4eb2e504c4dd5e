"""Merges adapters into the weights of a model, so that it computes the same results without adapters."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain._printable import get_logger
from onnxtrain._words import argument
from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError
from onnxtrain.lora._block_weights import BlockWeights
from onnxtrain.lora._description import Array, base_fingerprint
from onnxtrain.lora._files import read_adapter
from onnxtrain.lora._insert import insert_adapters, loaded_for_adapters
from onnxtrain.lora._linear_weights import codes_of, constant_value, quantized_linear
from onnxtrain.lora._targets import INTEGER_PRODUCTS, Target, choose_targets, dtype_of, find_targets
from onnxtrain.passes import (
    ModelSource,
    as_given,
    remove_unread_chains,
    remove_unread_initializers,
    same_kind,
)
from onnxtrain.passes.parameters.integer_weights import bias_codes, constant
from onnxtrain.passes.tidy.constants import add_initializer

REPORT_KEY = "onnxtrain.merge"
"""Metadata key of a merged model: the losses before and after merging, as JSON."""

_MERGED = ".merged"
"""Suffix of the names of merged weights, until the weights that they replace are removed."""

_log = get_logger()
Evaluate = Callable[[onnx.ModelProto], float]


@same_kind
def merge(
    model: ModelSource,
    adapter: str | os.PathLike[str],
    requantize: bool = False,
    *,
    evaluate: Evaluate | None = None,
) -> onnx.ModelProto | ir.Model:
    """Merges an adapter into the weights of a model: W becomes W + scaling · B A.

    Args:
        model: the model without adapters: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; not modified.
        adapter: an `.onnx_adapter` file or a PEFT folder, as for :func:`load_adapter`.
        requantize: False stores merged weights that were quantized (MatMulNBits, DequantizeLinear) as floats, in the
            dtype of the activations. The merged model is larger, and computes the same results as the model with the
            adapter. True quantizes them again, with the same number of bits, the same block size and new scales;
            rounding may cancel the effect of the adapter. Weights of QLinearConv, QLinearMatMul and QGemm require True.
            If a layer's output is quantized, e.g. to int8, the merged layer clips the sum of layer and adapter; the
            unmerged model also clips the layer's output before it adds the adapter.
        evaluate: function that computes the loss of a `ModelProto` on your data, e.g. with
            `InferenceSession(proto.SerializeToString())`. It is called twice: with the unmerged model plus adapter, and
            with the merged model. Both losses are logged, and stored as JSON in the metadata of the result, under the
            key "onnxtrain.merge": {"before": 1.25, "after": 1.5}.

    Returns:
        The merged model, with the inputs and outputs of `model`: an `onnx_ir.Model` if `model` is one, else a
        `ModelProto`.

    Raises:
        AdapterMismatchError: the adapter does not match the model; see :func:`load_adapter`.
        GraphBuildError: the model already has adapters, or a weight cannot be quantized again.
    """
    loaded = loaded_for_adapters(model)
    base = base_fingerprint(loaded)
    config, weights = read_adapter(adapter, loaded, base)
    before = None
    # A second copy, because the weights of the first one are modified below.
    if evaluate is not None:
        unmerged = insert_adapters(loaded_for_adapters(model), config, weights, base)
        before = float(evaluate(ir.to_proto(unmerged)))
    deltas: dict[ir.Node, Array] = {}
    for target in choose_targets(loaded, config):
        delta = deltas.setdefault(target.node, np.zeros((target.input_size, target.total), np.float32))
        a, b = (np.asarray(array, np.float32) for array in weights[target.module])
        if target.is_convolution:
            a, b = a.reshape(a.shape[:2]).T, b.reshape(b.shape[:2]).T
        # Parts of a merged layer fill their columns of one matrix.
        part = slice(target.start, target.start + target.output_size)
        delta[:, part] += np.float32(config.scaling(target.module)) * (a @ b)
    # The parts of a merged layer have one weight, named after the whole.
    wholes = {target.node: target for target in find_targets(loaded) if target.output_size == target.total}
    made: dict[str, list[ir.Value]] = {}
    for node, delta in deltas.items():
        before_node = set(loaded.graph.initializers)
        _merge_into(loaded, wholes[node], delta, requantize)
        new = [value for name, value in loaded.graph.initializers.items() if name not in before_node]
        _deduplicate(loaded.graph, new, made.setdefault(wholes[node].module, []))
    remove_unread_initializers(loaded.graph, list(loaded.graph.initializers.values()))
    _restore_weight_names(loaded.graph)
    result = as_given(loaded, model)
    if before is not None and evaluate is not None:
        after = float(evaluate(ir.to_proto(loaded) if isinstance(result, ir.Model) else result))
        _log.info("merging the adapter '%s': loss %.6g before, %.6g after", os.fspath(adapter), before, after)
        report = json.dumps({"before": before, "after": after})
        if isinstance(result, ir.Model):
            result.metadata_props[REPORT_KEY] = report
        else:
            onnx.helper.set_model_props(
                result, {**{p.key: p.value for p in result.metadata_props}, REPORT_KEY: report}
            )
    return result


def _deduplicate(graph: ir.Graph, new: Sequence[ir.Value], made: list[ir.Value]) -> None:
    """Removes new weights that are equal to an earlier weight of the same layer, e.g. because the layer runs twice.

    Nodes that read a removed weight read the earlier weight instead.

    Args:
        graph: the graph, changed in place.
        new: initializers that were just added for one node.
        made: merged weights of the same layer that were added earlier. New weights that are kept are appended.
    """
    for value in new:
        same = next((other for other in made if _are_equal(other, value)), None)
        if same is None:
            made.append(value)
        else:
            value.replace_all_uses_with(same)
            del graph.initializers[str(value.name)]


def _are_equal(one: ir.Value, other: ir.Value) -> bool:
    """True if two initializers have the same dtype, shape and bytes."""
    assert one.const_value is not None
    assert other.const_value is not None
    a, b = one.const_value.numpy(), other.const_value.numpy()
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _merge_into(model: ir.Model, target: Target, delta: Array, requantize: bool) -> None:
    """Adds `delta` [in, out] to the weight of a layer.

    A quantized weight is quantized again if `requantize` is True, and stored as floating point if it is False.

    Raises:
        GraphBuildError: the weight cannot be quantized again, or an integer op requires a quantized weight.
    """
    node = target.node
    # Inputs that become unread are removed at the end.
    old = list(node.inputs)
    if node.op_type == "MatMulNBits":
        blocks = BlockWeights.of(node)
        merged = blocks.matrix() + delta
        if requantize:
            for index, array in blocks.quantized_again(merged).items():
                _replace_input(model, node, index, array)
        else:
            # Scales have the dtype of the activations, e.g. float16, which a plain product requires of its weight.
            weight = merged.astype(blocks.scales.dtype)
            _replace_by_product(model, node, _initializer(model, f"{target.module}.weight", weight))
    elif target.is_integer:
        if not requantize:
            raise GraphBuildError(
                f"merging adapters: {node.op_type} '{node.name}' is an integer op, so its weight cannot "
                f"become float32; pass {argument('requantize', True)}"
            )
        _requantize_integers(model, target, delta)
    else:
        read = old[1]
        assert read is not None
        array = constant_value(read)
        # The delta in the orientation of the node's weight.
        if target.is_convolution or node.attributes.get_int("transB", 0) == 1:
            delta = delta.T.reshape(array.shape)
        # alpha multiplies the product with the weight, but not the product with the adapter.
        merged = array + delta / np.float32(node.attributes.get_float("alpha", 1.0))
        producer = read.producer()
        if requantize and producer is not None and producer.op_type != "Cast":
            _requantize(model, node, producer, merged)
        else:
            dtype = dtype_of(read) or ir.DataType.FLOAT
            new = _initializer(model, f"{target.module}.weight", merged.astype(dtype.numpy()))
            node.replace_input_with(1, new)
    remove_unread_chains(model.graph, [value.producer() for value in old if value is not None])


def _requantize(model: ir.Model, node: ir.Node, producer: ir.Node, merged: Array) -> None:
    """Requantizes a merged weight, and makes its layer read it through a new DequantizeLinear.

    Args:
        model: the model, changed in place.
        node: the MatMul, Gemm or Conv that reads the weight.
        producer: the node that computes the old weight, e.g. its DequantizeLinear; not modified, because other nodes
            may read its output.
        merged: the merged weight, float32.

    Raises:
        GraphBuildError: the weight is transposed after it is dequantized, or is not supported by :func:`codes_of`.
    """
    if producer.op_type == "Transpose":
        raise GraphBuildError(
            f"merging adapters: the weight of {node.op_type} '{node.name}' is dequantized and then "
            "transposed, and such a weight cannot be quantized again; pass requantize=False"
        )
    # A copy, because other products may read the same dequantized weight, e.g. a tied head.
    copy = ir.Node(
        producer.domain, "DequantizeLinear", list(producer.inputs), list(producer.attributes.values()), num_outputs=1,
        name=f"{producer.name}.merged",
    )  # fmt: skip
    copy.outputs[0].name = f"{producer.outputs[0].name}.merged"
    copy.outputs[0].type, copy.outputs[0].shape = producer.outputs[0].type, producer.outputs[0].shape
    new = quantized_linear(codes_of(producer), merged)
    for index, array in new.items():
        _replace_input(model, copy, index, array)
    model.graph.insert_before(node, copy)
    node.replace_input_with(1, copy.outputs[0])
    _rescale_bias(model, node, new[1])


def _requantize_integers(model: ir.Model, target: Target, delta: Array) -> None:
    """Adds `delta` [in, out] to the quantized weight of an integer product, and requantizes the weight and the bias."""
    node = target.node
    codes = codes_of(node)
    old = codes.real()
    # As for Gemm, alpha multiplies the product with the weight, but not the product with the adapter.
    delta = delta / np.float32(node.attributes.get_float("alpha", 1.0))
    new = quantized_linear(codes, old + (delta.T.reshape(old.shape) if codes.axis == 0 else delta))
    bias_index = INTEGER_PRODUCTS[node.domain, node.op_type][2]
    bias = node.inputs[bias_index] if bias_index < len(node.inputs) else None
    if bias is not None and bias.const_value is not None:
        real = bias.const_value.numpy().astype(np.float64) * constant(codes.scale).ravel()
        # The scale of the activations is a factor of both the old and the new bias.
        _replace_input(model, node, bias_index, bias_codes(real, new[codes.index + 1]))
    for index, array in new.items():
        _replace_input(model, node, index, array)


def _rescale_bias(model: ir.Model, node: ir.Node, weight_scales: Array) -> None:
    """Requantizes the int32 bias of a layer whose weight has new scales.

    The scale of such a bias must be the scale of the activations times the scale of the weight. Floating-point biases,
    and biases of layers whose activations are not dequantized, are not changed.
    """
    x, bias = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    activations, dequantize = (None if value is None else value.producer() for value in (x, bias))
    if bias is None or dequantize is None or dequantize.op_type != "DequantizeLinear":
        return
    # Neither a floating-point bias nor activations that are not dequantized have a scale.
    if activations is None or activations.op_type != "DequantizeLinear" or activations.inputs[1] is None:
        return
    if dequantize.inputs[0] is None or dequantize.inputs[0].dtype != ir.DataType.INT32:
        return
    scale = constant_value(activations.inputs[1]) * weight_scales.ravel()
    codes = bias_codes(constant_value(bias), scale)
    copy = ir.Node(
        dequantize.domain, "DequantizeLinear", list(dequantize.inputs[:2]), [ir.AttrInt64("axis", 0)], num_outputs=1,
        name=f"{dequantize.name}.merged",
    )  # fmt: skip
    copy.outputs[0].name = f"{bias.name}.merged"
    copy.outputs[0].type, copy.outputs[0].shape = bias.type, bias.shape
    _replace_input(model, copy, 0, codes)
    _replace_input(model, copy, 1, scale.astype(np.float32).reshape(weight_scales.shape))
    model.graph.insert_before(node, copy)
    node.replace_input_with(2, copy.outputs[0])


def _replace_by_product(model: ir.Model, node: ir.Node, weight: ir.Value) -> None:
    """Replaces a MatMulNBits with a MatMul that reads `weight`, followed by an Add if the node has a bias."""
    op = Emitter(model.graph)
    # The old name is kept, because the value may be a graph output.
    output, bias = node.outputs[0], node.inputs[5] if len(node.inputs) > 5 else None
    with op.placing(before=node):
        product = op.MatMul(node.inputs[0], weight)
        product = product if bias is None else op.Add(product, bias)
    product.type, product.shape = output.type, output.shape
    name = output.name
    output.replace_all_uses_with(product, replace_graph_outputs=True)
    output.name, product.name = f"{name}.quantized", name
    model.graph.remove(node, safe=True)


def _replace_input(model: ir.Model, node: ir.Node, index: int, array: Array) -> None:
    """Replaces an input of a node with a new initializer; keeps the old initializer, which other nodes may read."""
    old = node.inputs[index]
    assert old is not None
    node.replace_input_with(index, _initializer(model, f"{old.name}{_MERGED}", array))


def _restore_weight_names(graph: ir.Graph) -> None:
    """Gives merged weights the names of the weights that they replaced, because the names identify the layers."""
    for name, value in list(graph.initializers.items()):
        old = name.removesuffix(_MERGED)
        if old != name and old not in graph.initializers:
            value.name = old


def _initializer(model: ir.Model, name: str, array: Array) -> ir.Value:
    """Adds an initializer and returns it; chooses a different name if `name` is in use."""
    return add_initializer(model.graph, ir.tensor(array, name=Emitter(model.graph).unique_name(name)))
