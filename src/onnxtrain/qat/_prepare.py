"""Replaces the integer weights of a quantized model with float32 master weights that the graph quantizes."""

from __future__ import annotations

import re

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
    remove_unread_initializers,
    same_kind,
)
from onnxtrain.passes.parameters.integer_weights import (
    IntegerBias,
    IntegerWeight,
    constant,
    integer_bias,
    integer_weights,
    scales,
)
from onnxtrain.passes.tidy.constants import add_initializer

LOGARITHM = ".log_of_scale"
"""Suffix of the name of the logarithm that is trained instead of a scale."""
# Suffixes that quantizers append to the names of integers.
_END = re.compile(r"_quantized$|_(u?int8|QuantizeLinear|q)$")


@same_kind
def prepare(model: ModelSource, train_scales: bool = False) -> onnx.ModelProto | ir.Model:
    """Makes the integer weights of a quantized model trainable.

    Each int8 or uint8 weight becomes `QuantizeLinear(master)`, where the master is a float32 initializer with the
    dequantized values, e.g. `fc.weight` for `fc.weight_quantized`. The results of the model don't change. An int32 bias
    becomes float32; for QLinearConv and QGemm, which take integer biases, the graph rounds it. Train the result with
    `straight_through=True`: gradients then pass through the rounding, and are zero for values outside the integer
    range.

    Args:
        model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`, quantized to int8 by onnxruntime: with
            QuantizeLinear and DequantizeLinear (QDQ), or with QLinearConv, QLinearMatMul and QGemm (QOperator). Not
            modified.
        train_scales: True to make the scales trainable as well (Learned Step Size Quantization, Esser et al. 2020). The
            logarithm of each scale, `<scale>.log_of_scale`, is trained, so that scales remain positive.

    Returns:
        The model in canonical form (opset 21 or newer): an `onnx_ir.Model` if `model` is one, else a `ModelProto`.

    Raises:
        GraphBuildError: the model has no integer weights.
        ModelError: the model cannot be loaded.

    Example:
        >>> import numpy as np, onnx
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]> g (float[n, 2] x) => (float[n, 2] y)
        ...   <int8[2, 2] fc_quantized = {1, 2, 3, 4}, float s = {0.5}>
        ...   { w = DequantizeLinear(fc_quantized, s)  y = MatMul(x, w) }''')
        >>> trainable = {i.name: onnx.numpy_helper.to_array(i) for i in prepare(model).graph.initializer}
        >>> trainable["fc"].tolist()
        [[0.5, 1.0], [1.5, 2.0]]
    """
    prepared = canonicalize(load_model(model))
    weights = integer_weights(prepared)
    if not any(not weight.is_bias for weight in weights):
        raise GraphBuildError(
            "preparing quantization-aware training: the model has no int8 or uint8 weights in "
            "DequantizeLinear, QLinearConv, QLinearMatMul or QGemm; quantize it first, e.g. with "
            "onnxruntime.quantization.quantize_static. For MatMulNBits weights, train adapters instead: "
            "lora=LoraConfig()"
        )
    op = Emitter(prepared.graph, functions=prepared.functions)
    # Masters first, because the logarithms below also replace the scales that masters read.
    for weight in weights:
        _replace_with_master(op, weight)
    biases = [bias for node in prepared.graph if (bias := integer_bias(node)) is not None]
    for bias in biases:
        if bias.value.is_initializer():
            _round_master_of_bias(op, bias)
    if train_scales:
        _replace_scales(op, scales(prepared))
    return as_given(prepared, model)


def _replace_with_master(op: Emitter, weight: IntegerWeight) -> None:
    """Replaces an integer weight with QuantizeLinear of a float32 master, or an int32 bias with the master itself."""
    # Listed first, because uses change while inputs are replaced. A weight that two layers read has one master.
    readers = [(use.node, use.idx) for use in weight.value.uses()]
    array = weight.real()
    if weight.is_bias:
        # Rounding biases to 32 bits has smaller errors than float32 itself. `convert` rounds them.
        name = str(readers[0][0].outputs[0].name)
        for node, _ in readers:
            # The master takes the name of the bias before quantization.
            node.outputs[0].name = f"{node.outputs[0].name}.dequantized"
        master = add_initializer(op.graph, ir.tensor(array, name=name))
        for node, _ in readers:
            node.outputs[0].replace_all_uses_with(master, replace_graph_outputs=True)
        op.graph.remove([node for node, _ in readers], safe=True)
    else:
        # Parameters are frozen and grouped by their name before quantization.
        name = _END.sub("", str(weight.value.name))
        name = name if name != weight.value.name else f"{name}.master"
        master = add_initializer(op.graph, ir.tensor(array, name=op.unique_name(name)))
        # ONNX requires sorted nodes, so the rounding is inserted before the first node that reads the integers.
        first = min((node for node, _ in readers), key=list(op.graph).index)
        zero_point = weight.zero_point or _zero(op, weight)
        with op.placing(before=first):
            codes = op.QuantizeLinear(
                master, weight.scale, zero_point, axis=weight.axis, block_size=weight.block_size
            )
        codes.type, codes.shape = weight.value.type, weight.value.shape
        for node, index in readers:
            node.replace_input_with(index, codes)
    remove_unread_initializers(op.graph, [weight.value, weight.scale, weight.zero_point])


def _round_master_of_bias(op: Emitter, bias: IntegerBias) -> None:
    """Replaces the int32 bias of QLinearConv or QGemm with a float32 master and nodes that round it."""
    integers = bias.value
    name = _END.sub("", str(integers.name))
    name = name if name != integers.name else f"{name}.master"
    real = (constant(integers) * bias.step().astype(np.float64)).astype(np.float32)
    master = add_initializer(op.graph, ir.tensor(real, name=op.unique_name(name)))
    with op.placing(before=bias.node):
        # DequantizeLinear of ones returns the scale. A scale that is read by an arithmetic op would count as a
        # parameter.
        steps = [
            op.DequantizeLinear(op.const(np.ones(constant(scale).shape, np.int32)), scale, axis=0)
            for scale in bias.scales
        ]
        step = op.Mul(*steps) if bias.factor == 1 else op.Mul(op.Mul(*steps), bias.factor)
        # ONNX's QuantizeLinear does not support int32. The largest float32 below 2^31 is 2^31 - 128.
        bounded = op.Clip(op.Div(master, step), -(2.0**31), 2.0**31 - 128)
        codes = op.Cast(op.Round(bounded), to=ir.DataType.INT32)
    codes.type, codes.shape = integers.type, integers.shape
    bias.node.replace_input_with(bias.index, codes)
    remove_unread_initializers(op.graph, [integers])


def _zero(op: Emitter, weight: IntegerWeight) -> ir.Value:
    """Returns a zero point of 0 in the weight's integer dtype, so that QuantizeLinear does not default to uint8."""
    assert weight.value.dtype is not None
    zeros = np.zeros(constant(weight.scale).shape, weight.value.dtype.numpy())
    return op.const(zeros, weight.value.dtype)


def _replace_scales(op: Emitter, values: list[ir.Value]) -> None:
    """Replaces each positive scale with Exp of a trainable logarithm."""
    for scale in values:
        array = constant(scale).astype(np.float32)
        # A scale of zero, for a weight of zeros, has no logarithm.
        if (array <= 0).any():
            continue
        exponent = np.log(array.astype(np.float64)).astype(np.float32)
        logarithm = add_initializer(
            op.graph, ir.tensor(exponent, name=op.unique_name(f"{scale.name}{LOGARITHM}"))
        )
        readers = [(use.node, use.idx) for use in scale.uses()]
        first = min((node for node, _ in readers), key=list(op.graph).index)
        with op.placing(before=first):
            positive = op.Exp(logarithm)
        positive.shape = scale.shape
        for node, index in readers:
            node.replace_input_with(index, positive)
        del op.graph.initializers[str(scale.name)]
