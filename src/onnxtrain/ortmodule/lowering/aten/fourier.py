"""Lowers discrete Fourier transforms (DFTs) to products with matrices of cosines and sines.

A long axis of fixed, composite size is transformed by smaller DFTs (Cooley and Tukey, Math. Comp. 19 (1965), 297-301).
Large primes, and sizes that are only known at run time, are transformed by DFTs whose size is a power of two
(Bluestein, IEEE Trans. Audio Electroacoust. 18 (1970), 451-455).
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

# ONNX's DFT, which has no CUDA kernel, only for sizes that are powers of two at run time. ONNX Runtime (1.32) computes
# those of other sizes inaccurately (2e-3 off for float32 of size 10,007), normalizes a float64 inverse by a float32
# length, and infers wrong symbolic sizes.
_MAX_MATRIX_SIZE = 128
"""Sizes up to this one are transformed by one matrix product; larger composite ones are factored."""

_MAX_PRIME = 1024
"""Primes up to this one are transformed by one matrix product, too."""

_FORWARD, _BACKWARD = -1, 1
"""Signs of the exponent of exp(± 2 pi i j k / size)."""


@lower_complex("aten._fft_r2c.default")
def real_to_complex(
    low: Lowering, x: ir.Value, dim: Sequence[int], normalization: int, onesided: bool
) -> Complex:
    axes = _axes(low, dim)
    last = axes[-1]
    kept: Any = low.result.shape[last] if onesided else low.fake(0).shape[last]
    # Starts with the last axis: if one-sided, half of it is dropped, which halves the work on the other axes.
    z = _transform_axis(low, Complex(x, x), last, low.fake(0).shape[last], kept, _FORWARD, real=True)
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
    # The last axis, of which the input has the non-redundant half, is transformed last, because the result is real.
    z = _transformed(low, z, axes[:-1], (), shape, 0, _BACKWARD)
    x = _real_inverse(low, z, last, shape[last], low.result.shape[last], last_dim_size)
    shape[last] = low.result.shape[last]
    return _normalized(low, Complex(x, x), axes, shape, normalization).re


def _axes(low: Lowering, dim: Sequence[int]) -> list[int]:
    """Returns the axes as non-negative indices."""
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
    """Computes the DFT of `z` along `axes`, and normalizes the result.

    Args:
        low: the lowering.
        z: the input, of any shape.
        axes: the axes to transform.
        normalized: the axes whose sizes determine the normalization.
        shape: the shape of `z`, possibly symbolic.
        normalization: PyTorch's argument: 0 for none, 1 to divide by sqrt(n), 2 to divide by n, where n is the product
            of the sizes of the `normalized` axes.
        sign: `_FORWARD` or `_BACKWARD`.
    """
    for axis in axes:
        z = _transform_axis(low, z, axis, shape[axis], shape[axis], sign)
    return _normalized(low, z, normalized, shape, normalization)


def _normalized(
    low: Lowering, z: Complex, axes: Sequence[int], shape: Sequence[Any], normalization: int
) -> Complex:
    """Normalizes a DFT over `axes` with n elements: divides by 1, sqrt(n) or n if `normalization` is 0, 1 or 2."""
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
    """Returns `shape[axis]` as an int64 [1] value.

    A symbolic size is read at run time, from the op's input if its axis `axis` has this size, otherwise from `z`.
    """
    if isinstance(shape[axis], int):
        return low.op.const([shape[axis]])
    source = low.env[low.node.args[0]]  # type: ignore[index]
    if str(low.fake(0).shape[axis]) == str(shape[axis]):
        return low.op.dim(source.re if isinstance(source, Complex) else source, axis)
    return low.op.dim(z.re, axis)


def _transform_axis(
    low: Lowering, z: Complex, axis: int, size: Any, kept: Any, sign: int, real: bool = False
) -> Complex:
    """Returns the DFT along an axis, without normalization.

    Args:
        low: the lowering.
        z: the input, of any shape.
        axis: the axis.
        size: size of the axis, perhaps symbolic.
        kept: number of frequencies to return, starting with frequency 0.
        sign: `_FORWARD` or `_BACKWARD`.
        real: True if the input is real. Then only `z.re` is used.
    """
    order = list(range(len(low.fake(0).shape)))
    order[axis], order[-1] = order[-1], order[axis]
    # MatMul contracts the last axis.
    z = Complex(transposed(low, z.re, order), transposed(low, z.im, order))
    if not isinstance(size, int):
        z = _bluestein_at_run_time(low, z, sign, real)
        if kept is not size and str(kept) != str(size):
            # The only other number of frequencies is size // 2 + 1, of a one-sided transform.
            count = low.op.Add(low.op.Div(low.op.Shape(z.re, start=-1), [2]), [1])
            z = Complex(*(low.op.Slice(part, [0], count, [-1]) for part in (z.re, z.im)))
    elif _is_factored(size):
        z = _cooley_tukey(low, z, len(order), size, sign, real)
        if kept is not size:
            z = Complex(*(low.op.Slice(part, [0], low.op.const([kept]), [-1]) for part in (z.re, z.im)))
    else:
        z = _multiply(low, z, *_dft_matrix(low, size, kept, sign), real=real)
    return Complex(transposed(low, z.re, order), transposed(low, z.im, order))


def _multiply(low: Lowering, z: Complex, cosines: ir.Value, sines: ir.Value, real: bool) -> Complex:
    """Returns the matrix product z @ (cosines + i sines). If `real`, the imaginary part of `z` is taken as zero."""
    op = low.op
    if real:
        return Complex(op.MatMul(z.re, cosines), op.MatMul(z.re, sines))
    return Complex(
        op.Sub(op.MatMul(z.re, cosines), op.MatMul(z.im, sines)),
        op.Add(op.MatMul(z.re, sines), op.MatMul(z.im, cosines)),
    )


def _dft_matrix(low: Lowering, size: int, kept: int, sign: int) -> tuple[ir.Value, ir.Value]:
    """Returns the real and imaginary parts of exp(sign * 2 pi i j k / size) for j < size and k < kept: [size, kept]."""
    angles = _angles(np.arange(size)[:, None], np.arange(kept), size, sign)
    return low.op.const(np.cos(angles), low.dtype), low.op.const(np.sin(angles), low.dtype)


def _angles(j: np.ndarray, k: np.ndarray, size: int, sign: int) -> np.ndarray:
    """Returns sign * 2 pi (j k mod size) / size. Small angles have more accurate sines and cosines."""
    angles: np.ndarray = sign * 2 * np.pi * ((j * k) % size) / size
    return angles


def _run_time_angles(low: Lowering, j: ir.Value, k: ir.Value, size: ir.Value, sign: int) -> ir.Value:
    """Like `_angles`, but computed at run time. `size` is an int64 [1] value. The result is float64."""
    op = low.op
    # float64 for all dtypes, because float32 angles would not be accurate enough for float32 results.
    products = op.Mod(op.Mul(j, k), size)
    turns = op.Div(op.Cast(products, to=ir.DataType.DOUBLE), op.Cast(size, to=ir.DataType.DOUBLE))
    return op.Mul(turns, op.const(sign * 2 * math.pi, ir.DataType.DOUBLE))


def _factor(size: int) -> int:
    """Returns the largest divisor of `size` that is at most its square root, e.g. 1 for a prime."""
    return next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)


def _is_factored(size: int) -> bool:
    """True if a DFT of this size is composed of DFTs of other sizes, False if it is a single matrix product."""
    return size > _MAX_MATRIX_SIZE and (_factor(size) > 1 or size > _MAX_PRIME)


def _cooley_tukey(low: Lowering, z: Complex, rank: int, size: int, sign: int, real: bool = False) -> Complex:
    """Returns the DFT of `z` along the last of its `rank` axes, factored recursively into smaller DFTs.

    With size = a b, j = b j1 + j2 and k = k1 + a k2, the factors are DFTs of size a over j1, a multiplication by the
    twiddle factors exp(sign * 2 pi i j2 k1 / size), and DFTs of size b over j2.
    """
    op = low.op
    if not _is_factored(size):
        return _multiply(low, z, *_dft_matrix(low, size, size, sign), real=real)
    a = _factor(size)
    if a == 1:
        return _bluestein(low, z, rank, size, sign, real)
    b = size // a
    swap = [*range(rank - 1), rank, rank - 1]

    def swapped(value: Complex) -> Complex:
        return Complex(op.Transpose(value.re, perm=swap), op.Transpose(value.im, perm=swap))

    def split(value: ir.Value) -> ir.Value:
        return op.Reshape(value, [0] * (rank - 1) + [a, b])

    z = swapped(Complex(split(z.re), split(z.im)))
    z = _cooley_tukey(low, z, rank + 1, a, sign, real)  # [..., j2, k1]
    twiddle_angles = _angles(np.arange(b)[:, None], np.arange(a), size, sign)
    cosines, sines = op.const(np.cos(twiddle_angles), low.dtype), op.const(np.sin(twiddle_angles), low.dtype)
    z = _product(low, z, Complex(cosines, sines))
    z = swapped(
        _cooley_tukey(low, swapped(z), rank + 1, b, sign)
    )  # [..., k1, j2] -> [..., k1, k2] -> [..., k2, k1]
    flat = [0] * (rank - 1) + [size]
    return Complex(op.Reshape(z.re, flat), op.Reshape(z.im, flat))


def _product(low: Lowering, a: Complex, b: Complex, real: bool = False) -> Complex:
    """Returns the product a b. If `real`, the imaginary part of `a` is taken as zero."""
    op = low.op
    if real:
        return Complex(op.Mul(a.re, b.re), op.Mul(a.re, b.im))
    return Complex(
        op.Sub(op.Mul(a.re, b.re), op.Mul(a.im, b.im)), op.Add(op.Mul(a.re, b.im), op.Mul(a.im, b.re))
    )


def _bluestein(low: Lowering, z: Complex, rank: int, size: int, sign: int, real: bool) -> Complex:
    """Returns the DFT of `z` along the last of its `rank` axes, computed as a cyclic convolution with a chirp.

    Because j k = (j² + k² - (k - j)²) / 2, the DFT is c_k times the convolution of z_j c_j with the conjugate of the
    chirp c_j = exp(sign * pi i j² / size). The convolution uses DFTs whose size is a power of two,
    at least 2 * size - 1.
    """
    op = low.op
    longer = 1 << (2 * size - 2).bit_length()
    places = np.arange(size)
    chirp = np.exp(1j * _angles(places, places, 2 * size, sign))
    filter_ = np.zeros(longer, np.complex128)
    filter_[:size] = chirp.conj()
    filter_[longer - size + 1 :] = chirp.conj()[:0:-1]
    spectrum = np.fft.fft(filter_) / longer
    factors, filter_spectrum = (
        Complex(op.const(value.real, low.dtype), op.const(value.imag, low.dtype))
        for value in (chirp, spectrum)
    )
    z = _product(low, z, factors, real)
    z = Complex(*(op.pad(part, [0, longer - size], [rank - 1], rank) for part in (z.re, z.im)))
    z = _product(low, _cooley_tukey(low, z, rank, longer, _FORWARD), filter_spectrum)
    z = _cooley_tukey(low, z, rank, longer, _BACKWARD)
    z = Complex(*(op.Slice(part, [0], [size], [-1]) for part in (z.re, z.im)))
    return _product(low, z, factors)


def _bluestein_at_run_time(low: Lowering, z: Complex, sign: int, real: bool) -> Complex:
    """Like `_bluestein`, for a size that is only known at run time."""
    op, rank = low.op, len(low.fake(0).shape)
    size = op.Shape(z.re, start=-1)
    # Exact in float64 for all sizes that fit into memory.
    bits = op.Ceil(
        op.Div(
            op.Log(op.Cast(op.Add(size, size), to=ir.DataType.DOUBLE)),
            op.const(math.log(2.0), ir.DataType.DOUBLE),
        )
    )
    longer = op.Cast(op.Pow(op.const(2.0, ir.DataType.DOUBLE), bits), to=ir.DataType.INT64)
    twice = op.Add(size, size)

    def chirp(places: ir.Value, of_sign: int) -> Complex:
        angles = _run_time_angles(low, places, places, twice, of_sign)
        return Complex(low.tensor(op.Cos(angles), low.dtype), low.tensor(op.Sin(angles), low.dtype))

    factors = chirp(arange(low, size), sign)
    places = arange(low, longer)
    distances = op.Min(places, op.Sub(longer, places))
    inside = op.Less(distances, size)
    conjugates = chirp(op.Where(inside, distances, 0), -sign)
    filter_ = Complex(
        *(op.Where(inside, part, low.tensor(0.0, low.dtype)) for part in (conjugates.re, conjugates.im))
    )
    z = _product(low, z, factors, real)
    pads = op.Concat([0], op.Sub(longer, size), axis=0)
    z = Complex(*(op.pad(part, pads, [rank - 1], rank) for part in (z.re, z.im)))
    z = _product(low, _power_of_two(low, z), _power_of_two(low, filter_))
    # The inverse DFT, computed with conjugates.
    z = _power_of_two(low, Complex(z.re, op.Neg(z.im)))
    scale = low.tensor(longer, low.dtype)
    z = Complex(op.Div(z.re, scale), op.Div(op.Neg(z.im), scale))
    z = Complex(*(op.Slice(part, [0], size, [-1]) for part in (z.re, z.im)))
    return _product(low, z, factors)


def _power_of_two(low: Lowering, z: Complex) -> Complex:
    """Computes the forward DFT of `z` along the last axis with ONNX's DFT. The size must be a power of two."""
    op = low.op
    pairs = op.Concat(op.Unsqueeze(z.re, [-1]), op.Unsqueeze(z.im, [-1]), axis=-1)
    # DFT needs an axis of batches.
    transformed = op.Squeeze(op.DFT(op.Unsqueeze(pairs, [0]), None, op.const(-2)), [0])
    return Complex(op.Gather(transformed, 0, axis=-1), op.Gather(transformed, 1, axis=-1))


def _real_inverse(low: Lowering, z: Complex, axis: int, half: Any, size: Any, run_time_size: Any) -> ir.Value:
    """Returns the real inverse DFT of a one-sided input along an axis, without normalization.

    Args:
        low: the lowering.
        z: the input. The missing frequencies are conjugates of the given ones.
        axis: the axis.
        half: number of frequencies in the input, possibly symbolic.
        size: size of the axis of the result, possibly symbolic.
        run_time_size: `size` as an argument of the op, i.e. an int or an ONNX value.
    """
    op = low.op
    order = list(range(len(low.fake(0).shape)))
    order[axis], order[-1] = order[-1], order[axis]
    re, im = transposed(low, z.re, order), transposed(low, z.im, order)
    if not (isinstance(size, int) and isinstance(half, int)):
        length = low.ints([run_time_size])
        mirrored = Complex(_mirrored(low, re, length), _mirrored(low, im, length, odd=True))
        return transposed(low, _bluestein_at_run_time(low, mirrored, _BACKWARD, real=False).re, order)
    if _is_factored(size):
        mirrored = Complex(_mirrored(low, re, size), _mirrored(low, im, size, odd=True))
        return transposed(low, _cooley_tukey(low, mirrored, len(order), size, _BACKWARD).re, order)
    k = np.arange(half)
    # All frequencies count twice, for themselves and for their conjugates, except 0 and size / 2.
    weight = np.where((k == 0) | (2 * k == size), 1.0, 2.0)[:, None]
    angles = _angles(k[:, None], np.arange(size), size, _BACKWARD)
    cosines = op.const(weight * np.cos(angles), low.dtype)
    sines = op.const(-weight * np.sin(angles), low.dtype)
    return transposed(low, op.Add(op.MatMul(re, cosines), op.MatMul(im, sines)), order)


def _mirrored(low: Lowering, half: ir.Value, size: int | ir.Value, odd: bool = False) -> ir.Value:
    """Extends the last axis of `half` from size // 2 + 1 to `size` elements, e.g. [a, b, c] to [a, b, c, b] for size 4.

    The added elements are negated if `odd`.
    """
    op = low.op
    if isinstance(size, int):
        missing: Any = [size - size // 2 - 1]
    else:
        missing = op.Sub(op.Sub(size, op.Div(size, [2])), [1])
    second_half = op.Slice(half, missing, [0], [-1], [-1])  # elements missing, ..., 1
    return op.Concat(half, op.Neg(second_half) if odd else second_half, axis=-1)
