"""Rounds the float32 master weights of a trained model to integers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError
from onnxtrain.passes import (
    ModelSource,
    as_given,
    canonicalize,
    load_model,
    remove_unread_chains,
    remove_unread_initializers,
    same_kind,
)
from onnxtrain.passes.parameters.integer_weights import Array, bias_codes, constant, integer_bias
from onnxtrain.passes.tidy.constants import add_initializer
from onnxtrain.qat._prepare import LOGARITHM

_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm"})


@same_kind
def convert(model: ModelSource) -> onnx.ModelProto | ir.Model:
    """Rounds the trained weights of an exported model back to integers, after quantization-aware training.

    The model must have been prepared with :func:`prepare`, trained and exported. Its float32 master weights are rounded
    as in the training graph, so the integers are the same as in training. Biases are rounded to int32, with the scale
    of the integer products to which they are added. ONNX Runtime then runs the layers in integer arithmetic, as in the
    original model. A layer's output differs from its output in training by at most one quantization step, and only for
    values close to a rounding boundary. Trained scales become constants.

    Args:
        model: the exported model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; not modified.

    Returns:
        The model with integer weights: an `onnx_ir.Model` if `model` is one, else a `ModelProto`.

    Raises:
        GraphBuildError: the model has no master weights, or the scale of a master weight is not constant.
        ModelError: the model cannot be loaded.
    """
    converted = canonicalize(load_model(model))
    graph = converted.graph
    # Scales first, because masters are rounded with them.
    _compute_scales(graph)
    masters = _quantized_masters(converted)
    if not masters:
        raise GraphBuildError(
            "converting a model after quantization-aware training: it has no QuantizeLinear of a float "
            "weight; pass the model that Trainer.export or export_model_for_inferencing wrote after "
            "qat.prepare"
        )
    for node in masters:
        _round(graph, node)
    # With a float bias, onnxruntime would not compute the layer in integers.
    for node in list(graph):
        if node.domain == "" and node.op_type in _LAYERS:
            _round_bias(converted, node)
        _round_integer_bias(converted, node)
    remove_unread_initializers(graph, list(graph.initializers.values()))
    return as_given(converted, model)


def has_masters(model: ir.Model) -> bool:
    """True if a model has master weights that :func:`convert` rounds to integers."""
    return bool(_quantized_masters(model))


def _quantized_masters(model: ir.Model) -> list[ir.Node]:
    """Returns the nodes that quantize float weights."""
    return [node for node in model.graph if node.op_type == "QuantizeLinear" and _is_constant(node.inputs[0])]


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and value.const_value is not None


def _compute_scales(graph: ir.Graph) -> None:
    """Constant-folds trained scales: replaces each Exp of a trained logarithm with an initializer."""
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Exp" else None
        if source is None or not _is_constant(source) or LOGARITHM not in str(source.name):
            continue
        name = str(source.name).partition(LOGARITHM)[0]
        _replace(graph, node, name, np.exp(constant(source).astype(np.float32)))


def _round(graph: ir.Graph, node: ir.Node) -> None:
    """Replaces the QuantizeLinear node of a master weight with an initializer that holds its integer output.

    Raises:
        GraphBuildError: the scale is not constant.
    """
    master, scale = node.inputs[0], node.inputs[1]
    assert master is not None
    if not _is_constant(scale):
        raise GraphBuildError(
            f"converting a model after quantization-aware training: the scale of '{master.name}' is "
            "computed by the graph; train the model that qat.prepare returns, unchanged"
        )
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    # Rounded by onnx's reference evaluator: half to even, saturating, per axis or block, as in the standard. Imported
    # late: it reads the schemas of all ops.
    from onnx.reference import ReferenceEvaluator

    name = f"{master.name}_quantized"
    inputs = {"x": master, "s": scale, **({} if zero_point is None else {"z": zero_point})}
    proto = onnx.helper.make_node("QuantizeLinear", list(inputs), ["y"])
    proto.attribute.extend(ir.to_proto(attribute) for attribute in node.attributes.values())
    arrays = {key: constant(value) for key, value in inputs.items() if value is not None}
    types = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.UNDEFINED, None)]
    tensors = [onnx.numpy_helper.from_array(array, key) for key, array in arrays.items()]
    body = onnx.helper.make_graph([proto], "codes", [], types, tensors)
    model = onnx.helper.make_model(
        body, opset_imports=[onnx.helper.make_opsetid("", graph.opset_imports[""])]
    )
    (codes,) = ReferenceEvaluator(model).run(None, {})
    _replace(graph, node, name, np.asarray(codes))


def _round_bias(model: ir.Model, layer: ir.Node) -> None:
    """Rounds the float bias of a layer to int32 if DequantizeLinear nodes compute the layer's other inputs."""
    bias = layer.inputs[2] if len(layer.inputs) > 2 else None
    steps = [_scale_of(value) for value in layer.inputs[:2]]
    if bias is None or not _is_constant(bias) or bias.dtype != ir.DataType.FLOAT:
        return
    activations, weights = steps
    if activations is None or weights is None:
        return
    # The layer sums integer products. onnxruntime requires the bias to have their scale, one per output channel.
    scale = np.asarray(activations * weights, np.float32)
    # Activations have a single scale in all ops that onnxruntime computes in integers.
    if activations.size != 1 or scale.size not in (1, constant(bias).size):
        return
    rounded = bias_codes(constant(bias), scale)
    op = Emitter(model.graph)
    with op.placing(before=layer):
        codes = _add(op, f"{bias.name}_quantized", rounded)
        # A vector with one scale would refer to an axis.
        step = _add(op, f"{bias.name}_scale", scale.reshape(() if scale.size == 1 else -1))
        real = op.DequantizeLinear(codes, step, axis=0)
    layer.replace_input_with(2, real)


def _round_integer_bias(model: ir.Model, layer: ir.Node) -> None:
    """Replaces a float32 bias, and the nodes that :func:`prepare` added to round it, with an int32 initializer."""
    bias = integer_bias(layer)
    chain = [] if bias is None else _rounding(bias.value)
    if bias is None or not chain:
        return
    master = chain[-1].inputs[0]
    assert master is not None
    codes = bias_codes(constant(master), bias.step())
    layer.replace_input_with(bias.index, _add(Emitter(model.graph), f"{master.name}_quantized", codes))
    remove_unread_chains(model.graph, [chain[0]])


def _rounding(value: ir.Value | None) -> list[ir.Node]:
    """Returns the nodes that round a float32 bias to int32, in the order Cast, Round, Clip, Div; [] if none do."""
    chain: list[ir.Node] = []
    for op_type in ("Cast", "Round", "Clip", "Div"):
        node = value.producer() if value is not None else None
        if node is None or node.op_type != op_type:
            return []
        chain.append(node)
        value = node.inputs[0]
    return chain if _is_constant(value) else []


def _scale_of(value: ir.Value | None) -> Array | None:
    """Returns the constant scale of the DequantizeLinear node that computes a value, or None if there is none."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "DequantizeLinear" or node.attributes.get_int("block_size", 0) != 0:
        return None
    scale = node.inputs[1]
    return constant(scale).astype(np.float32) if scale is not None and _is_constant(scale) else None


def _replace(graph: ir.Graph, node: ir.Node, name: str, array: Array) -> None:
    """Replaces a node with an initializer."""
    value = _add(Emitter(graph), name, array)
    node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _add(op: Emitter, name: str, array: Array) -> ir.Value:
    """Adds an initializer, with a number appended to its name if the name is in use."""
    return add_initializer(op.graph, ir.tensor(array, name=op.unique_name(name)))
