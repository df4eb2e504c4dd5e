"""Lowers discrete Fourier transforms to products with matrices of cosines and sines.

A long axis of a known size with factors is transformed in stages (Cooley and Tukey, Math. Comp. 19 (1965), 297-301).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ortmodule.lowering._table import Complex, Lowering, lower_complex
from onnxtrain.ortmodule.lowering.aten.complex import as_complex
from onnxtrain.ortmodule.lowering.aten.shape import arange, transposed

# Not ONNX's DFT: ONNX Runtime (1.32) divides a float64 inverse by a length in float32, and takes symbolic sizes for
# those before the transform.
_LARGEST = 128
"""Transform sizes up to this one by one matrix; factor larger ones."""

_FORWARD, _BACKWARD = -1, 1
"""Signs of the exponent of exp(± 2 pi i j k / size)."""


@lower_complex("aten._fft_r2c.default")
def real_to_complex(
    low: Lowering, x: ir.Value, dim: Sequence[int], normalization: int, onesided: bool
) -> Complex:
    axes = _axes(low, dim)
    last = axes[-1]
    kept: Any = low.result.shape[last] if onesided else low.fake(0).shape[last]
    # The last axis first: one-sided, only half of it is kept, which halves the work on the other axes.
    z = _along(low, Complex(x, x), last, low.fake(0).shape[last], kept, _FORWARD, real=True)
    return _transformed(low, z, axes[:-1], axes, low.fake(0).shape, normalization, _FORWARD)


@lower_complex("aten._fft_c2c.default")
def complex_to_complex(
    low: Lowering, x: Any, dim: Sequence[int], normalization: int, forward: bool
) -> Complex:
    axes = _axes(low, dim)
    sign = _FORWARD if forward else _BACKWARD
    return _transformed(low, as_complex(low, x), axes, axes, low.fake(0).shape, normalization, sign)


@lower_complex("aten._fft_c2r.default")
def complex_to_real(
    low: Lowering, z: Complex, dim: Sequence[int], normalization: int, last_dim_size: Any
) -> ir.Value:
    axes = _axes(low, dim)
    last, shape = axes[-1], list(low.fake(0).shape)
    # The last axis holds half of a conjugate-symmetric one and comes last, as its result is real.
    z = _transformed(low, z, axes[:-1], (), shape, 0, _BACKWARD)
    x = _symmetric(low, z, last, shape[last], low.result.shape[last], last_dim_size)
    shape[last] = low.result.shape[last]
    return _normalized(low, Complex(x, x), axes, shape, normalization).re


def _axes(low: Lowering, dim: Sequence[int]) -> list[int]:
    return [axis % len(low.fake(0).shape) for axis in dim]


def _transformed(
    low: Lowering,
    z: Complex,
    axes: Sequence[int],
    normalized: Sequence[int],
    shape: Sequence[Any],
    normalization: int,
    sign: int,
) -> Complex:
    for axis in axes:
        z = _along(low, z, axis, shape[axis], shape[axis], sign)
    return _normalized(low, z, normalized, shape, normalization)


def _normalized(
    low: Lowering, z: Complex, axes: Sequence[int], shape: Sequence[Any], normalization: int
) -> Complex:
    """Divides by 1, the square root of the number of elements, or that number, for `normalization` 0, 1 and 2."""
    if normalization == 0 or not axes:
        return z
    op = low.op
    if all(isinstance(shape[axis], int) for axis in axes):
        count = math.prod(shape[axis] for axis in axes)
        scale = op.const(1 / (math.sqrt(count) if normalization == 1 else count), low.dtype)
    else:
        sizes = op.Concat(*(_size(low, shape, axis, z) for axis in axes), axis=0)
        total = op.Cast(op.ReduceProd(sizes, keepdims=0), to=low.dtype)
        scale = op.Reciprocal(op.Sqrt(total) if normalization == 1 else total)
    return Complex(op.Mul(z.re, scale), z.im if z.im is z.re else op.Mul(z.im, scale))


def _size(low: Lowering, shape: Sequence[Any], axis: int, z: Complex) -> ir.Value:
    """Returns the size of an axis before the transform, int64 [1]."""
    if isinstance(shape[axis], int):
        return low.op.const([shape[axis]])
    source = low.env[low.node.args[0]]  # type: ignore[index]
    if str(low.fake(0).shape[axis]) == str(shape[axis]):
        return low.op.dim(source.re if isinstance(source, Complex) else source, axis)
    return low.op.dim(z.re, axis)


def _along(
    low: Lowering, z: Complex, axis: int, size: Any, kept: Any, sign: int, real: bool = False
) -> Complex:
    """Returns the transform along an axis.

    Args:
        low: the lowering.
        z: any shape; with `real` only the real part is read.
        axis: the axis.
        size: number of its elements, perhaps symbolic.
        kept: number of the first elements of the transform to return.
        sign: `_FORWARD` or `_BACKWARD`.
        real: whether the input is real.
    """
    order = list(range(len(low.fake(0).shape)))
    order[axis], order[-1] = order[-1], order[axis]
    # MatMul works along the last axis.
    z = Complex(transposed(low, z.re, order), transposed(low, z.im, order))
    if isinstance(size, int) and size > _LARGEST and _factor(size) > 1:
        z = _staged(low, z, size, sign, real)
        if kept is not size:
            z = Complex(*(low.op.Slice(part, [0], low.op.const([kept]), [-1]) for part in (z.re, z.im)))
    else:
        z = _multiplied(low, z, *_waves(low, z, size, kept, sign), real=real)
    return Complex(transposed(low, z.re, order), transposed(low, z.im, order))


def _multiplied(low: Lowering, z: Complex, cosines: ir.Value, sines: ir.Value, real: bool) -> Complex:
    """Returns the rows of z times (cosines + i sines)."""
    op = low.op
    if real:
        return Complex(op.MatMul(z.re, cosines), op.MatMul(z.re, sines))
    return Complex(
        op.Sub(op.MatMul(z.re, cosines), op.MatMul(z.im, sines)),
        op.Add(op.MatMul(z.re, sines), op.MatMul(z.im, cosines)),
    )


def _waves(low: Lowering, z: Complex, size: Any, kept: Any, sign: int) -> tuple[ir.Value, ir.Value]:
    """Returns cosines and sines of sign * 2 pi j k / size for j < size and k < kept."""
    op = low.op
    if isinstance(size, int) and isinstance(kept, int):
        angles = _angles(np.arange(size)[:, None], np.arange(kept), size, sign)
        return op.const(np.cos(angles), low.dtype), op.const(np.sin(angles), low.dtype)
    length = op.Shape(z.re, start=-1)
    count = length
    # One-sided: of real numbers half of the transform is the conjugate of the other half.
    if kept is not size and str(kept) != str(size):
        count = op.Add(op.Div(length, [2]), [1])
    rows, columns = op.Unsqueeze(arange(low, length), [1]), arange(low, count)
    radians = _run_time_angles(low, rows, columns, length, sign)
    return low.tensor(op.Cos(radians), low.dtype), low.tensor(op.Sin(radians), low.dtype)


def _angles(j: np.ndarray, k: np.ndarray, size: int, sign: int) -> np.ndarray:
    """Returns sign * 2 pi (j k mod size) / size."""
    # The sine of a large angle would lose digits.
    angles: np.ndarray = sign * 2 * np.pi * ((j * k) % size) / size
    return angles


def _run_time_angles(low: Lowering, j: ir.Value, k: ir.Value, size: ir.Value, sign: int) -> ir.Value:
    """Returns `_angles` for a size that is known at run time, int64 [1], in float64."""
    op = low.op
    # Angles in float32 would lose digits in models of float32, too.
    products = op.Mod(op.Mul(j, k), size)
    turns = op.Div(op.Cast(products, to=ir.DataType.DOUBLE), op.Cast(size, to=ir.DataType.DOUBLE))
    return op.Mul(turns, op.const(sign * 2 * math.pi, ir.DataType.DOUBLE))


def _factor(size: int) -> int:
    """Returns the largest divisor that is at most the square root."""
    return next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)


def _staged(low: Lowering, z: Complex, size: int, sign: int, real: bool = False) -> Complex:
    """Transforms the last axis in stages.

    With size = a b, j = b j1 + j2 and k = k1 + a k2: transforms of size a over j1, turns by 2 pi j2 k1 / size,
    transforms of size b over j2.
    """
    op = low.op
    if size <= _LARGEST or _factor(size) == 1:
        return _multiplied(low, z, *_waves(low, z, size, size, sign), real=real)
    a = _factor(size)
    b = size // a
    rank = len(low.fake(0).shape)
    swap = [*range(rank - 1), rank, rank - 1]

    def swapped(value: Complex) -> Complex:
        return Complex(op.Transpose(value.re, perm=swap), op.Transpose(value.im, perm=swap))

    def split(value: ir.Value) -> ir.Value:
        return op.Reshape(value, [0] * (rank - 1) + [a, b])

    z = swapped(Complex(split(z.re), split(z.im)))
    z = _staged(low, z, a, sign, real)  # [..., j2, k1]
    turns = _angles(np.arange(b)[:, None], np.arange(a), size, sign)
    cosines, sines = op.const(np.cos(turns), low.dtype), op.const(np.sin(turns), low.dtype)
    z = Complex(
        op.Sub(op.Mul(z.re, cosines), op.Mul(z.im, sines)), op.Add(op.Mul(z.re, sines), op.Mul(z.im, cosines))
    )
    z = swapped(_staged(low, swapped(z), b, sign))  # [..., k1, j2] -> [..., k1, k2] -> [..., k2, k1]
    flat = [0] * (rank - 1) + [size]
    return Complex(op.Reshape(z.re, flat), op.Reshape(z.im, flat))


def _symmetric(low: Lowering, z: Complex, axis: int, half: Any, size: Any, run_time_size: Any) -> ir.Value:
    """Returns the real backward transform of an axis of which the first `half` of `size` elements are there."""
    op = low.op
    order = list(range(len(low.fake(0).shape)))
    order[axis], order[-1] = order[-1], order[axis]
    re, im = transposed(low, z.re, order), transposed(low, z.im, order)
    if isinstance(size, int) and isinstance(half, int):
        if size > _LARGEST and _factor(size) > 1:
            mirrored = Complex(_mirrored(low, re, size), _mirrored(low, im, size, odd=True))
            return transposed(low, _staged(low, mirrored, size, _BACKWARD).re, order)
        k = np.arange(half)
        # Each element but the first and the middle one stands for its conjugate, too.
        weight = np.where((k == 0) | (2 * k == size), 1.0, 2.0)[:, None]
        angles = _angles(k[:, None], np.arange(size), size, _BACKWARD)
        cosines = op.const(weight * np.cos(angles), low.dtype)
        sines = op.const(-weight * np.sin(angles), low.dtype)
    else:
        cosines, sines = _half_waves(low, op.Shape(re, start=-1), low.ints([run_time_size]))
    return transposed(low, op.Add(op.MatMul(re, cosines), op.MatMul(im, sines)), order)


def _half_waves(low: Lowering, half: ir.Value, size: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns the matrices of `_symmetric` for sizes that are known at run time, int64 [1]."""
    op = low.op
    k = op.Unsqueeze(arange(low, half), [1])
    angles = _run_time_angles(low, k, arange(low, size), size, _BACKWARD)
    once = op.Or(op.Equal(k, op.const(0)), op.Equal(op.Mul(k, op.const(2)), size))
    weight = op.Where(once, op.const(1.0, ir.DataType.DOUBLE), op.const(2.0, ir.DataType.DOUBLE))
    cosines, sines = op.Mul(weight, op.Cos(angles)), op.Neg(op.Mul(weight, op.Sin(angles)))
    return low.tensor(cosines, low.dtype), low.tensor(sines, low.dtype)


def _mirrored(low: Lowering, half: ir.Value, size: int, odd: bool = False) -> ir.Value:
    """Returns the whole of a symmetric (or, with `odd`, antisymmetric) last axis from its first half."""
    op = low.op
    rest = size - size // 2 - 1
    behind = op.Slice(half, [rest], [0], [-1], [-1])  # elements rest, ..., 1
    return op.Concat(half, op.Neg(behind) if odd else behind, axis=-1)
