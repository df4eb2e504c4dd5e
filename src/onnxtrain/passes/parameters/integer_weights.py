"""Finds the integer weights and biases of quantized layers, with their scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

Array = np.ndarray[Any, Any]

_MS = "com.microsoft"
# Input indices of weight, scale and zero point, and the axis of per-channel scales, in onnxruntime 1.32's ops. None
# means the node's attribute `axis`.
_WEIGHTS: Mapping[tuple[str, str], tuple[int, int, int, int | None]] = {
    ("", "DequantizeLinear"): (0, 1, 2, None),
    (_MS, "DequantizeLinear"): (0, 1, 2, None),
    ("", "QLinearConv"): (3, 4, 5, 0),
    (_MS, "QLinearConv"): (3, 4, 5, 0),
    ("", "QLinearMatMul"): (3, 4, 5, 1),
    (_MS, "QGemm"): (3, 4, 5, 1),
}
_CODES = frozenset({ir.DataType.INT8, ir.DataType.UINT8})


@dataclass(frozen=True)
class IntegerWeight:
    """A quantized weight or bias: an initializer of integers, with its scale and zero point.

    Attributes:
        value: the integers, e.g. `fc.weight_quantized`, int8.
        node: the node that reads them: DequantizeLinear, QLinearConv, QLinearMatMul or QGemm.
        index: index of `value` among the node's inputs.
        scale: the scale, an initializer.
        zero_point: the zero point, an initializer; None for 0.
        axis: axis of per-channel scales, e.g. 0.
        block_size: number of integers along `axis` that share a scale; 0 for per-channel scales.
    """

    value: ir.Value
    node: ir.Node
    index: int
    scale: ir.Value
    zero_point: ir.Value | None
    axis: int
    block_size: int = 0

    @property
    def is_bias(self) -> bool:
        """True if the initializer is a bias, i.e. has the dtype int32."""
        return self.value.dtype == ir.DataType.INT32

    def real(self) -> Array:
        """Returns the dequantized weight or bias: (integer - zero point) * scale."""
        # In int64, because a uint8 code minus its zero point may be negative.
        codes = constant(self.value).astype(np.int64)
        zero = (
            np.zeros((), np.int64) if self.zero_point is None else constant(self.zero_point).astype(np.int64)
        )
        real: Array = (codes - self._spread(zero)) * self._spread(constant(self.scale))
        return real.astype(np.float32)

    def _spread(self, array: Array) -> Array:
        """Returns scales or zero points in a shape that broadcasts with the weight."""
        dims = [int(size) for size in constant(self.value).shape]
        if self.block_size:
            repeated = np.repeat(array, self.block_size, self.axis)
            return repeated[tuple(slice(size) for size in dims)]
        # ONNX allows shapes [] and [1] for a single scale.
        if array.size == 1:
            return array.reshape(())
        shape = [1] * len(dims)
        shape[self.axis] = array.size
        return array.reshape(shape)


@dataclass(frozen=True)
class IntegerBias:
    """The int32 bias of a QLinearConv or QGemm; its scale is the activations' scale times the weight's scale.

    Attributes:
        node: the QLinearConv or QGemm.
        index: index of the bias among the node's inputs.
        scales: the initializers with the scales of the activations and of the weight.
        factor: additional factor of the bias's scale: `alpha` of a QGemm, 1 for a QLinearConv.
    """

    node: ir.Node
    index: int
    scales: tuple[ir.Value, ir.Value]
    factor: float

    @property
    def value(self) -> ir.Value:
        """The quantized bias, e.g. `fc.bias_quantized`: int32 [out]."""
        value = self.node.inputs[self.index]
        assert value is not None
        return value

    def step(self) -> Array:
        """Returns the scale of the bias, float32: [1], or [out] if the weight has one scale per output."""
        activations, weights = (constant(scale).astype(np.float32).ravel() for scale in self.scales)
        step: Array = activations * weights * np.float32(self.factor)
        return step


# Input index of the bias in onnxruntime 1.32's integer products.
_BIASES: Mapping[tuple[str, str], int] = {("", "QLinearConv"): 8, (_MS, "QLinearConv"): 8, (_MS, "QGemm"): 6}


def integer_bias(node: ir.Node) -> IntegerBias | None:
    """Returns the bias of a QLinearConv or QGemm; None if it has none or the scales are not initializers."""
    index = _BIASES.get((node.domain, node.op_type))
    if index is None or index >= len(node.inputs) or node.inputs[index] is None:
        return None
    activations, weights = _initializer(node, 1), _initializer(node, 4)
    if activations is None or weights is None:
        return None
    return IntegerBias(node, index, (activations, weights), node.attributes.get_float("alpha", 1.0))


def integer_weights(model: ir.Model) -> list[IntegerWeight]:
    """Returns the integer weights and biases of a canonical model, each once, in graph order."""
    found: dict[ir.Value, IntegerWeight] = {}
    for node in model.graph:
        weight = integer_weight(node)
        if weight is not None:
            found.setdefault(weight.value, weight)
    return list(found.values())


def integer_weight(node: ir.Node) -> IntegerWeight | None:
    """Returns the integer weight that a node reads, or the integer bias that a DequantizeLinear reads.

    For the bias of a QLinearConv or QGemm, see :func:`integer_bias`.

    Returns:
        The weight or bias. None if the node reads neither, or if the integers or their scale are not initializers.
    """
    place = _WEIGHTS.get((node.domain, node.op_type))
    # Ops that only read activations (QLinearAdd, ...) have no weights.
    if place is None:
        return None
    index, scale, zero_point, axis = place
    value, step = _initializer(node, index), _initializer(node, scale)
    # Computed weights or scales cannot be replaced.
    if value is None or step is None:
        return None
    wanted = {*_CODES, ir.DataType.INT32} if node.op_type == "DequantizeLinear" else _CODES
    if value.dtype not in wanted:
        return None
    axis = _axis(node, value) if axis is None else axis
    # The rows of a transposed weight are output channels.
    if node.op_type == "QGemm" and node.attributes.get_int("transB", 0) == 1:
        axis = 0
    return IntegerWeight(value, node, index, step, _initializer(node, zero_point), axis, _block_size(node))


def scales(model: ir.Model) -> list[ir.Value]:
    """Returns the initializers that quantizing and dequantizing nodes read as scales, without duplicates."""
    return list(dict.fromkeys(_scales(model)))


def _scales(model: ir.Model) -> Iterator[ir.Value]:
    for node in model.graph:
        for index in _SCALES.get((node.domain, node.op_type), ()):
            value = _initializer(node, index)
            if value is not None and value.dtype is not None and value.dtype.is_floating_point():
                yield value


# Input indices of scales.
_SCALES: Mapping[tuple[str, str], tuple[int, ...]] = {
    **{(domain, op): (1,) for domain in ("", _MS) for op in ("QuantizeLinear", "DequantizeLinear")},
    ("", "QLinearConv"): (1, 4, 6),
    (_MS, "QLinearConv"): (1, 4, 6),
    ("", "QLinearMatMul"): (1, 4, 6),
    (_MS, "QGemm"): (1, 4, 7),
    (_MS, "QLinearAdd"): (1, 4, 6),
    (_MS, "QLinearMul"): (1, 4, 6),
    (_MS, "QLinearSigmoid"): (1, 3),
    (_MS, "QLinearLeakyRelu"): (1, 3),
    (_MS, "QLinearSoftmax"): (1, 3),
    (_MS, "QLinearAveragePool"): (1, 3),
    (_MS, "QLinearGlobalAveragePool"): (1, 3),
}


def constant(value: ir.Value) -> Array:
    """Returns the array of an initializer."""
    assert value.const_value is not None
    return value.const_value.numpy()


def bias_codes(real: Array, scale: Array) -> Array:
    """Quantizes a bias to int32, with the scale of the integer products that it is added to.

    ONNX Runtime (1.32) adds the integers to sums of integer products, and ignores any separate scale of the bias.

    Args:
        real: the bias, e.g. float32 [out].
        scale: scale of the activations times scale of the weight: a single number, or one per output [out].
    """
    # In float64, because integers above 2^24 are not exact in float32.
    codes = np.rint(real.astype(np.float64) / scale.astype(np.float64).ravel())
    limits = np.iinfo(np.int32)
    rounded: Array = np.clip(codes, limits.min, limits.max).astype(np.int32)
    return rounded


def _initializer(node: ir.Node, index: int) -> ir.Value | None:
    """Returns input `index` of a node if it is an initializer, or None for other and omitted inputs."""
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None or value.const_value is None or not value.is_initializer() else value


def _axis(node: ir.Node, value: ir.Value) -> int:
    rank = len(constant(value).shape)
    axis = node.attributes.get_int("axis", 1)
    # ONNX ignores the axis of a single scale, e.g. 1 for a bias with one axis.
    return axis % rank if rank and -rank <= axis < rank else 0


def _block_size(node: ir.Node) -> int:
    return node.attributes.get_int("block_size", 0) if node.op_type == "DequantizeLinear" else 0
