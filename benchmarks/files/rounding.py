"""Ops that round, in float64, for ONNX's reference evaluator.

What rounds is, after its first run, what a straight-through gradient takes it for: the number that went in plus what
rounding has added to it then, or a constant where it is beyond the range of its integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from reference import MS, Array, convolved, op, softmax

from autodiff.reference import Resize as CorrectedResize


def _spread(value: Array, x: Array, axis: int | None) -> Array:
    """A value for all or for each entry of an axis, for each element of x."""
    if value.ndim != 1 or value.size == 1 or axis is None:
        return value.reshape(()) if value.size == 1 else value
    return value.reshape([-1 if k == axis % x.ndim else 1 for k in range(x.ndim)])


class _Levels(np.ndarray):
    """Places among integers, and the number that they stand for, which is exact where scales are huge."""

    stands_for: Array | None = None


def _real(q: Array, scale: Array, zero: Array | None = None, axis: int | None = None) -> Array:
    known = getattr(q, "stands_for", None)
    if known is not None:
        return np.asarray(known)
    shifted = np.asarray(q, np.float64) - (0.0 if zero is None else _spread(zero.astype(np.float64), q, axis))
    return shifted * _spread(scale, q, axis)


class _Rounding(OpRun):
    """An op that keeps the rounding of its first run."""

    def _levels(self, x: Array, scale: Array, zero: Array | None, axis: int | None = None) -> Array:
        offset = 0.0 if zero is None else _spread(zero.astype(np.float64), x, axis)
        scale = _spread(scale, x, axis)
        if not hasattr(self, "_rest"):
            bounds = np.iinfo(np.uint8 if zero is None else zero.dtype)
            found = np.rint(x / scale) + offset
            self._inside = (found >= bounds.min) & (found <= bounds.max)
            self._first = np.clip(found, bounds.min, bounds.max) - offset
            self._rest = self._first - x / scale
        levels = np.asarray(np.where(self._inside, x / scale + self._rest, self._first) + offset).view(
            _Levels
        )
        levels.stands_for = np.where(self._inside, x + self._rest * scale, self._first * scale)
        return levels


@op("", "QuantizeLinear")
@op(MS, "QuantizeLinear")
class _QuantizeLinear(_Rounding):
    def _run(self, x: Array, scale: Array, zero: Array | None = None, axis: int | None = 1, **_: Any) -> Any:
        return (self._levels(x, scale, zero, axis),)


@op("", "DynamicQuantizeLinear")
class _DynamicQuantizeLinear(_Rounding):
    def _run(self, x: Array) -> Any:
        if not hasattr(self, "_rest"):
            low, high = min(x.min(), 0.0), max(x.max(), 0.0)
            self._scale = np.asarray((high - low) / 255 or 1.0)
            self._zero = np.asarray(np.clip(np.rint(-low / self._scale), 0, 255)).astype(np.uint8)
            self._levels(x, self._scale, self._zero)
            self._inside[...] = True  # the range is that of the numbers
        return self._levels(x, self._scale, self._zero), self._scale, self._zero


@op("", "Resize")
class _Resize(CorrectedResize):
    """Cuts off fractions, as onnxruntime does."""

    def _run(self, x: Array, *inputs: Array, **attributes: Any) -> Any:
        (y,) = super()._run(np.asarray(x), *inputs, **attributes)
        if isinstance(x, _Levels):
            if not hasattr(self, "_rest"):
                self._rest = np.floor(y + 1e-6) - y
            y = (y + self._rest).view(_Levels)
        return (y,)


@op("", "DequantizeLinear")
@op(MS, "DequantizeLinear")
class _DequantizeLinear(OpRun):
    def _run(self, q: Array, scale: Array, zero: Array | None = None, axis: int | None = 1, **_: Any) -> Any:
        return (_real(q, scale, zero, 1 if axis is None else axis),)


def _shifted(q: Array, zero: Array | None, axis: int) -> Array:
    return np.asarray(q, np.float64) - (
        0.0 if zero is None else _spread(np.asarray(zero, np.float64), q, axis)
    )


@op("", "MatMulInteger")
class _MatMulInteger(OpRun):
    def _run(self, a: Array, b: Array, a_zero: Array | None = None, b_zero: Array | None = None) -> Any:
        return (np.matmul(_shifted(a, a_zero, -2), _shifted(b, b_zero, -1)),)


@op("", "ConvInteger")
class _ConvInteger(OpRun):
    def _run(
        self, x: Array, w: Array, x_zero: Array | None = None, w_zero: Array | None = None, **given: Any
    ) -> Any:
        return (convolved(_shifted(x, x_zero, 1), _shifted(w, w_zero, 0), None, given),)


@op(MS, "MatMulIntegerToFloat")
class _MatMulIntegerToFloat(OpRun):
    def _run(
        self, a: Array, b: Array, a_scale: Array, b_scale: Array, a_zero: Array | None = None,
        b_zero: Array | None = None, bias: Array | None = None,
    ) -> Any:  # fmt: skip
        y = np.matmul(_real(a, a_scale, a_zero, -1), _real(b, b_scale, b_zero, -1))
        return (y if bias is None else y + bias,)


@op("", "QLinearMatMul")
class _QLinearMatMul(_Rounding):
    def _run(
        self, a: Array, sa: Array, za: Array, b: Array, sb: Array, zb: Array, sy: Array, zy: Array
    ) -> Any:
        return (self._levels(np.matmul(_real(a, sa, za, -2), _real(b, sb, zb, -1)), sy, zy),)


@op("", "QLinearConv")
class _QLinearConv(_Rounding):
    def _run(
        self, x: Array, sx: Array, zx: Array, w: Array, sw: Array, zw: Array, sy: Array, zy: Array,
        b: Array | None = None, **given: Any,
    ) -> Any:  # fmt: skip
        bias = None if b is None else b * (sx * sw).reshape(-1)
        return (self._levels(convolved(_real(x, sx, zx), _real(w, sw, zw, 0), bias, given), sy, zy),)


@op(MS, "QGemm")
class _QGemm(_Rounding):
    def _run(
        self, a: Array, sa: Array, za: Array, b: Array, sb: Array, zb: Array, c: Array | None = None,
        sy: Array | None = None, zy: Array | None = None, **given: Any,
    ) -> Any:  # fmt: skip
        left, right = _real(a, sa, za), _real(b, sb, zb, 0 if given.get("transB") else 1)
        left, right = (x.T if given.get(f"trans{s}") else x for x, s in ((left, "A"), (right, "B")))
        alpha = 1.0 if given.get("alpha") is None else given["alpha"]
        y = alpha * (left @ right + (0.0 if c is None else c * sa * sb))
        return (y if sy is None else self._levels(y, sy, zy),)


@op(MS, "QLinearAdd", "QLinearMul")
class _QLinearBinary(_Rounding):
    def _run(
        self, a: Array, sa: Array, za: Array, b: Array, sb: Array, zb: Array, sy: Array, zy: Array
    ) -> Any:
        x, y = _real(a, sa, za), _real(b, sb, zb)
        return (self._levels(x + y if type(self).__name__ == "QLinearAdd" else x * y, sy, zy),)


@op(MS, "QLinearSoftmax", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearGlobalAveragePool")
class _QLinearUnary(_Rounding):
    def _run(self, x: Array, sx: Array, zx: Array, sy: Array, zy: Array, **given: Any) -> Any:
        real = _real(x, sx, zx)
        y = {
            "QLinearSoftmax": lambda: softmax(real, given.get("axis", -1)),
            "QLinearSigmoid": lambda: 1 / (1 + np.exp(-real)),
            "QLinearLeakyRelu": lambda: np.where(real < 0, given.get("alpha", 0.01) * real, real),
            "QLinearGlobalAveragePool": lambda: real.mean(axis=tuple(range(2, real.ndim)), keepdims=True),
        }[type(self).__name__]()
        return (self._levels(y, sy, zy),)


@op(MS, "QLinearConcat")
class _QLinearConcat(_Rounding):
    def _run(self, sy: Array, zy: Array, *given: Array, axis: int = 0) -> Any:
        parts = [_real(*given[k : k + 3]) for k in range(0, len(given), 3)]
        return (self._levels(np.concatenate(parts, axis), sy, zy),)
