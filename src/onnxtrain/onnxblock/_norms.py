"""Defines the normalization layers of `onnxtrain.nn` as blocks, with the same formulas and initial parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.errors import GraphBuildError
from onnxtrain.onnxblock import _graft
from onnxtrain.onnxblock._block import Block

# The first opset with LayerNormalization.
_LAYER_NORMALIZATION_OPSET = 17
# The first opset in which the axes of reductions are an input instead of an attribute.
_AXES_AS_INPUT_OPSET = 18
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class _Norm(Block):
    """Base class for the normalization layers: checks their input and creates their parameters."""

    def _checked(self, name: str, sizes: Sequence[int], params: int = 0) -> ir.Value:
        """Returns a layer's input after checking its dtype and shape.

        Args:
            name: name of the input.
            sizes: required sizes of the last axes, e.g. [input_dim]; a symbolic size is accepted.
            params: number of axes after those in `sizes`: 1 for [batch, length, input_dim, params], else 0.

        Raises:
            GraphBuildError: the input is not floating-point, its rank is unknown, or a size differs.
        """
        value = self._describe(name)
        if value.dtype is None or not value.dtype.is_floating_point():
            raise GraphBuildError(f"{self._doing}: its input is {value.dtype}; pass a floating-point value")
        dims = static_dims(value)
        if dims is None:
            raise GraphBuildError(f"{self._doing}: the rank of {name!r} is unknown; declare its shape")
        end = len(dims) - params
        # A symbolic size may match at run time.
        actual = dims[max(end - len(sizes), 0) : end]
        if len(actual) < len(sizes) or any(d not in (None, s) for d, s in zip(actual, sizes, strict=True)):
            place = "last axes" if not params else f"axes before the last {params}"
            raise GraphBuildError(
                f"{self._doing}: the {place} of {name!r} must have the sizes {list(sizes)}; its shape is "
                f"{value.shape}"
            )
        return value

    def _parameter(self, name: str, sizes: Sequence[int], number: float, dtype: ir.DataType | None) -> str:
        """Adds a parameter of shape `sizes` whose elements are all `number`; returns its name."""
        assert dtype is not None
        return _graft.add_parameter(self.base, name, np.full(sizes, number), dtype)


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last axes, with new parameters weight and bias.

    Args:
        input_size: size of the last axis, e.g. 16, or the sizes of the last axes, e.g. [8, 16].
        eps: added to the variance.
        elementwise_affine: False to leave out weight and bias.
        bias: False to leave out the bias.
    """

    def __init__(
        self,
        input_size: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self._sizes = [input_size] if isinstance(input_size, int) else list(input_size)
        self._eps = float(eps)
        self._affine = elementwise_affine
        self._bias = bias and elementwise_affine

    def build(self, input_name: str) -> str:
        """Applies the layer to a value [..., *input_size]; returns the name of its output."""
        opset = _graft.opset_of(self.base, "")
        if opset < _LAYER_NORMALIZATION_OPSET:
            raise GraphBuildError(
                f"{self._doing}: LayerNormalization needs opset {_LAYER_NORMALIZATION_OPSET} or newer, but "
                f"the base model imports {opset}; convert it with onnx.version_converter"
            )
        dtype = self._checked(input_name, self._sizes).dtype
        names = []
        if self._affine:
            names.append(self._parameter("layer_norm.weight", self._sizes, 1, dtype))
        if self._bias:
            names.append(self._parameter("layer_norm.bias", self._sizes, 0, dtype))

        def write(op: Emitter, x: ir.Value, *parameters: ir.Value) -> ir.Value:
            # The op requires a scale.
            inputs = parameters or (op.const(np.ones(self._sizes), dtype),)
            result: ir.Value = op.LayerNormalization(x, *inputs, axis=-len(self._sizes), epsilon=self._eps)
            return result

        return self._append(write, input_name, *names)


class LayerNormNoBias(LayerNorm):
    """(x - mean) / sqrt(variance + eps) over the last axes, without parameters.

    Args:
        input_size: size of the last axis, or the sizes of the last axes.
        eps: added to the variance.
    """

    def __init__(self, input_size: int | Sequence[int], eps: float = 1e-5) -> None:
        super().__init__(input_size, eps, elementwise_affine=False)


class RMSNorm(_Norm):
    """x / max(rms, eps) · g with rms = ||x|| / sqrt(dim) over the last axis, with a new parameter g.

    In the training model, the layer and its gradient are one op each.

    Args:
        dim: size of the last axis, e.g. 16.
        eps: lower bound of the root mean square.
    """

    def __init__(self, dim: int, eps: float = 1e-8) -> None:
        super().__init__()
        self._dim = dim
        self._eps = float(eps)

    def build(self, input_name: str) -> str:
        """Applies the layer to a value [..., dim]; returns the name of its output."""
        x = self._checked(input_name, [self._dim])

        def write(op: Emitter, x: ir.Value, g: ir.Value) -> ir.Value:
            # `onnxtrain.fusion` recognizes this chain of ops, and RINorm's; it would not recognize other ops for the
            # same formula.
            norm = _reduce(op, "ReduceL2", x, [_rank(x) - 1])
            floored = op.Clip(op.Mul(norm, self._dim**-0.5), op.const(self._eps, like=x))
            result: ir.Value = op.Mul(op.Div(x, floored), g)
            return result

        return self._append(write, input_name, self._parameter("rms_norm.g", [self._dim], 1, x.dtype))


class RINorm(_Norm):
    """(x - mean) / stdev · affine_weight + affine_bias, with new parameters affine_weight and affine_bias.

    Mean and stdev = sqrt(variance + eps) are computed per series: over all axes but the first and the last, or over
    both axes of a matrix. Gradients do not flow through them. Two blocks use the statistics of the last call:
    `norm.transform(name)` normalizes another value with them. `norm.inverse(name)` undoes the normalization for the
    model's prediction, [batch, length, input_dim, params], where params is the number of values predicted per step and
    target: 1, or the number of parameters of a distribution.

    In the training model, the layer and its gradient are one op each.

    Args:
        input_dim: size of the last axis, e.g. 16.
        eps: added to the variance.
        affine: False to omit the parameters.
    """

    def __init__(self, input_dim: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self._dim = input_dim
        self._eps = float(eps)
        self._affine = affine
        # Names of values in the base model that `transform` and `inverse` read: mean, stdev and the parameters.
        self._names: list[str] = []
        self.transform = _Transform(self)
        self.inverse = _Inverse(self)

    def build(self, input_name: str) -> str:
        """Applies the layer to a value [batch, ..., input_dim]; returns the name of its output."""
        x = self._checked(input_name, [self._dim])
        parameters = []
        if self._affine:
            parameters = [
                self._parameter("ri_norm.affine_weight", [self._dim], 1, x.dtype),
                self._parameter("ri_norm.affine_bias", [self._dim], 0, x.dtype),
            ]

        def write(op: Emitter, x: ir.Value, *parameters: ir.Value) -> tuple[ir.Value, ...]:
            rank = _rank(x)
            # Like torch.mean, which reduces over all axes if there are none.
            axes = list(range(1, rank - 1)) or list(range(rank))
            # Squares of deviations above 256 overflow in float16, so the statistics are computed in float32.
            narrow = x.dtype in _NARROW
            wide = op.Cast(x, to=ir.DataType.FLOAT) if narrow else x
            mean = _stopped(op, _reduce(op, "ReduceMean", wide, axes))
            centered = op.Sub(wide, mean)
            variance = _reduce(op, "ReduceMean", op.Mul(centered, centered), axes)
            stdev = _stopped(op, op.Sqrt(op.Add(variance, self._eps)))
            if narrow:
                mean, stdev = op.Cast(mean, to=x.dtype), op.Cast(stdev, to=x.dtype)
                # With the rounded mean, because `inverse` uses it.
                centered = op.Sub(x, mean)
            return _scaled(op, centered, stdev, *parameters), mean, stdev

        y, *statistics = _graft.append(self._accessor, self._doing, [input_name, *parameters], write)
        self._names = [*statistics, *parameters]
        return y


class _Reusing(_Norm):
    """Base class for blocks that read the statistics and parameters of an RINorm."""

    def __init__(self, norm: RINorm) -> None:
        super().__init__()
        self._norm = norm

    @property
    def _doing(self) -> str:
        return f"building RINorm.{type(self).__name__.removeprefix('_').lower()}"

    def _kept(self) -> list[str]:
        """Returns the names of the RINorm's mean, stdev and parameters in the base model.

        Raises:
            GraphBuildError: the RINorm has not been called on this base model.
        """
        # The layer may have been called on another base model.
        names = self._norm._names
        if not names or not all(_graft.has_value(self.base, name) for name in names):
            raise GraphBuildError(
                f"{self._doing}: the base model has no statistics of this layer yet; call the layer on the input "
                "series first"
            )
        return names


class _Transform(_Reusing):
    """Block that normalizes a value with the statistics of an RINorm."""

    def build(self, input_name: str) -> str:
        """Normalizes a value with the statistics of the layer's last call; returns the name of the output."""
        self._checked(input_name, [self._norm._dim])
        return self._append(
            lambda op, x, mean, stdev, *parameters: _scaled(op, op.Sub(x, mean), stdev, *parameters),
            input_name,
            *self._kept(),
        )


class _Inverse(_Reusing):
    """Block that undoes the normalization of an RINorm."""

    def build(self, input_name: str) -> str:
        """Denormalizes a value [batch, length, input_dim, params]; returns the name of the result."""
        self._checked(input_name, [self._norm._dim], params=1)

        def write(
            op: Emitter, x: ir.Value, mean: ir.Value, stdev: ir.Value, *parameters: ir.Value
        ) -> ir.Value:
            # As in darts, eps² avoids a division by zero for a weight of 0. With such a weight, x equals the bias,
            # which is subtracted before the product, so that the mean remains.
            factor = stdev
            if parameters:
                weight, bias = parameters
                factor = op.Div(stdev, op.Add(weight, self._norm._eps**2))
                x = op.Sub(x, op.Unsqueeze(bias, [-1]))
            result: ir.Value = op.Add(op.Mul(x, op.Unsqueeze(factor, [-1])), op.Unsqueeze(mean, [-1]))
            return result

        return self._append(write, input_name, *self._kept())


def _scaled(op: Emitter, centered: ir.Value, stdev: ir.Value, *parameters: ir.Value) -> ir.Value:
    """Emits centered / stdev · weight + bias; `parameters` are the weight and the bias, or empty."""
    if not parameters:
        return op.Div(centered, stdev)
    # The quotient has one element per series, so the series themselves are only multiplied once.
    weight, bias = parameters
    return op.Add(op.Mul(centered, op.Div(weight, stdev)), bias)


def _stopped(op: Emitter, value: ir.Value) -> ir.Value:
    """Emits a node that returns the value and stops its gradient."""
    # ONNX has no op for this; `onnxtrain.passes.mark_stopped_gradients` recognizes this Where.
    return op.Where(op.const(True), value, value)


def _reduce(op: Emitter, op_type: str, x: ir.Value, axes: list[int]) -> ir.Value:
    """Emits a reduction, with the axes as an input or an attribute depending on the opset."""
    if op.opset < _AXES_AS_INPUT_OPSET:
        return op.emit(op_type, x, axes=axes, keepdims=1)
    return op.emit(op_type, x, axes, keepdims=1)


def _rank(x: ir.Value) -> int:
    assert x.shape is not None
    return x.shape.rank()
