"""Defines root mean square normalizations, with one op forward and one backward (Zhang and Sennrich, 2019).

The gradient of ONNX's own RMSNormalization, an op of opset 23, is in `normalization`.

Both variants multiply each row of x by its own r: y = x * r * scale, with r = 1 / rms(x). Let ct be the cotangent of y,
let s = sum(ct * x * scale) over the row, and let `share` be defined by dr/dx = -r³ * share * x. Then:

    ct_x = ct * scale * r - x * r³ * share * s
    ct_scale = sum over rows of ct * x * r

Besides ct_x itself, only one tensor of the size of x is needed: ct * x. Both sums are matrix products with it.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter

from ._composite import composite

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@composite("FlooredRMSNormalization", ["x", "scale", "factor", "floor"], outputs=2)
def floored_rms_normalization(
    op: Emitter, x: ir.Value, scale: ir.Value, factor: ir.Value, floor: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Computes y = x / max(rms, floor) * scale and rms = factor * ||x||, with the norm over the last axis.

    x: `[..., n]`; scale: `[n]`; factor (usually 1 / sqrt(n)) and floor: scalars; rms: `[..., 1]`.
    """
    wide, wide_scale, wide_factor, wide_floor = _to_float32(op, x, scale, factor, floor)
    rms = op.Mul(op.ReduceL2(wide, _last_axis(op, x), keepdims=1), wide_factor)
    y = op.Mul(op.Mul(wide, op.Reciprocal(op.Max(rms, wide_floor))), wide_scale)
    return _to_dtype_of(op, y, x), _to_dtype_of(op, rms, x)


@composite("FlooredRMSNormalizationGradient", ["ct", "x", "scale", "rms", "factor", "floor"], outputs=2)
def floored_rms_normalization_gradient(
    op: Emitter, ct: ir.Value, x: ir.Value, scale: ir.Value, rms: ir.Value, factor: ir.Value, floor: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """VJP of FlooredRMSNormalization: cotangents of x and scale."""
    # A row whose rms is below the floor is divided by a constant. As in torch.clamp and torch.norm, the gradient at the
    # floor is that of the norm, and the gradient of a row of zeros is that of the constant.
    share = op.Where(op.GreaterOrEqual(rms, floor), op.Mul(factor, factor), 0.0)
    return _gradient(op, ct, x, scale, op.Reciprocal(op.Max(rms, floor)), share)


@composite("InverseRMSNormalization", ["x", "scale", "epsilon"], outputs=2)
def inverse_rms_normalization(
    op: Emitter, x: ir.Value, scale: ir.Value, epsilon: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Computes y = x * r * scale and r = 1 / sqrt(mean(x²) + epsilon), with the mean over the last axis.

    This is RMSNormalization of opset 23, with r as an additional output for the backward pass. x: `[..., n]`; scale:
    `[n]`; epsilon: scalar; r: `[..., 1]`.
    """
    wide, wide_scale, wide_epsilon = _to_float32(op, x, scale, epsilon)
    square = op.ReduceMean(op.Mul(wide, wide), _last_axis(op, x), keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.Add(square, wide_epsilon)))
    y = op.Mul(op.Mul(wide, inverse), wide_scale)
    return _to_dtype_of(op, y, x), _to_dtype_of(op, inverse, x)


@composite("InverseRMSNormalizationGradient", ["ct", "x", "scale", "inverse"], outputs=2)
def inverse_rms_normalization_gradient(
    op: Emitter, ct: ir.Value, x: ir.Value, scale: ir.Value, inverse: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """VJP of InverseRMSNormalization: cotangents of x and scale."""
    share = op.Reciprocal(op.Cast(op.Size(scale), to=x.dtype))
    return _gradient(op, ct, x, scale, inverse, share)


def _gradient(
    op: Emitter, ct: ir.Value, x: ir.Value, scale: ir.Value, inverse: ir.Value, share: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Returns the cotangents of x and scale for y = x * r * scale, where each row of x has its own factor r.

    Args:
        op: emits the nodes.
        ct: cotangent of y, `[..., n]`.
        x: the normalized input, `[..., n]`.
        scale: `[n]`.
        inverse: r, the factor of each row, `[..., 1]`.
        share: factor of the derivative of r, dr/dx = -r³ * share * x, e.g. 1 / n; a scalar or `[..., 1]`.
    """
    matrix = op.Concat([-1], op.Unsqueeze(op.Size(scale), [0]), axis=0)
    # The only product of the size of x besides ct_x.
    product = op.Mul(ct, x)
    along = op.MatMul(product, op.Unsqueeze(scale, [1]))
    # One factor r at a time: r³ alone overflows or underflows float32 if x is very small or very large.
    slope = op.Mul(op.Mul(op.Mul(op.Mul(along, inverse), inverse), inverse), share)
    ct_x = op.Sub(op.Mul(op.Mul(ct, scale), inverse), op.Mul(x, slope))
    # Summing rows with a matrix product is faster on ONNX Runtime than ReduceSum.
    ct_scale = op.MatMul(op.Reshape(inverse, [1, -1]), op.Reshape(product, matrix))
    return ct_x, op.Reshape(ct_scale, op.Shape(scale))


def _last_axis(op: Emitter, x: ir.Value) -> ir.Value:
    """Returns the index of the last axis of x, rank - 1, as int64 [1]."""
    # Not -1: ONNX Runtime (1.31) fails to reduce an empty tensor over a negative axis.
    return op.Sub(op.Shape(op.Shape(x)), [1])


def _to_float32(op: Emitter, *values: ir.Value) -> list[ir.Value]:
    """Casts float16 and bfloat16 values to float32; returns values of other dtypes unchanged."""
    # Sums of squares overflow float16.
    return [op.Cast(v, to=ir.DataType.FLOAT) if v.dtype in _NARROW else v for v in values]


def _to_dtype_of(op: Emitter, value: ir.Value, like: ir.Value) -> ir.Value:
    return op.Cast(value, to=like.dtype) if like.dtype in _NARROW else value
