"""Lowers matrix products, trilinear products, cdist and pdist."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ortmodule.lowering._table import Lowering, lower
from onnxtrain.passes.canonical.einsum_pairs import contract


@lower("aten.mm.default", "aten.bmm.default", "aten.matmul.default", "aten.mv.default")
def matmul(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    left, right = low.tensors(a, b)
    return _product(low, left, right, low.fake(1).dim())


def _product(low: Lowering, a: ir.Value, b: ir.Value, rank: int) -> ir.Value:
    """Returns the matrix product of `a` and `b`. `rank` is the rank of `b`, which may be a vector."""
    if rank > 1:
        return low.op.MatMul(a, b)
    # Multiplies by a column: ONNX Runtime (1.31.1) fuses a Transpose of `a` into the MatMul, and the fused op is wrong
    # for vectors.
    return low.op.Squeeze(low.op.MatMul(a, low.op.Unsqueeze(b, [-1])), [-1])


@lower("aten.addmm.default")
def addmm(low: Lowering, c: ir.Value, a: ir.Value, b: ir.Value, beta: Any = 1, alpha: Any = 1) -> ir.Value:
    low.refuse_overflow(alpha, beta)
    # Gemm ignores `c` if beta = 0, as PyTorch does. It does not support integers, and ignores beta if `a` has no
    # elements. Its attributes alpha and beta are float32 constants.
    if (
        low.has_no_elements(1)
        or not low.dtype.is_floating_point()
        or _has_symbol(alpha, beta)
        or _loses_digits(low, alpha, beta)
    ):
        return _addmm(low, c, a, b, beta, alpha)
    return low.op.Gemm(a, b, c, alpha=float(alpha), beta=float(beta))


def _loses_digits(low: Lowering, *numbers: float) -> bool:
    """True if the result is float64 and a number is not exact in float32, the dtype of ONNX attributes."""
    return low.is_double and any(float(np.float32(number)) != number for number in numbers)


def _has_symbol(*numbers: Any) -> bool:
    """True if one of the numbers is symbolic."""
    return any(isinstance(number, ir.Value) for number in numbers)


@lower("aten.baddbmm.default", "aten.addmv.default")
def baddbmm(low: Lowering, c: ir.Value, a: ir.Value, b: ir.Value, beta: Any = 1, alpha: Any = 1) -> ir.Value:
    return _addmm(low, c, a, b, beta, alpha)


@lower("aten.addbmm.default")
def addbmm(low: Lowering, c: ir.Value, a: ir.Value, b: ir.Value, beta: Any = 1, alpha: Any = 1) -> ir.Value:
    product = low.op.ReduceSum(low.op.MatMul(a, b), [0], keepdims=0)
    return _scaled_sum(low, c, product, beta, alpha)


@lower("aten._trilinear.default")
def trilinear(
    low: Lowering,
    a: ir.Value,
    b: ir.Value,
    c: ir.Value,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int = 1,
) -> ir.Value:
    """Lowers `_trilinear`: adds axes to three tensors, multiplies them, and sums over the axes `sumdim`.

    Contracts two tensors at a time, so that the full product is never stored.
    """
    rank = len(low.fake(0).shape) + len(expand1)
    letters = "abcdefghijklmnopqrstuvwxyz"[:rank]
    terms = [
        "".join(letter for axis, letter in enumerate(letters) if axis not in new)
        for new in (expand1, expand2, expand3)
    ]
    result = "".join(letter for axis, letter in enumerate(letters) if axis not in sumdim)
    sizes = {
        letter: size
        for term, index in zip(terms, range(3), strict=True)
        for letter, size in zip(term, low.fake(index).shape, strict=True)
        if isinstance(size, int)
    }
    return contract(low.op.emit, [a, b, c], terms, result, sizes)


def _addmm(low: Lowering, c: ir.Value, a: ir.Value, b: ir.Value, beta: Any, alpha: Any) -> ir.Value:
    """Returns beta * c + alpha * a @ b, where `b`, the third argument of the node, may be a vector."""
    return _scaled_sum(low, c, _product(low, a, b, low.fake(2).dim()), beta, alpha)


def _scaled_sum(low: Lowering, c: ir.Value, product: ir.Value, beta: Any, alpha: Any) -> ir.Value:
    """Returns beta * c + alpha * product."""
    low.refuse_overflow(alpha, beta)
    if _has_symbol(alpha) or alpha != 1:
        product = low.op.Mul(product, low.tensor(alpha, low.dtype))
    # If beta = 0, PyTorch ignores `c`, even if it is NaN.
    if not _has_symbol(beta) and beta == 0:
        if not low.dtype.is_floating_point():
            return product
        # As in PyTorch, `c` has a gradient of zero instead of None.
        zeros = low.op.zeros_like(c)
        return low.op.Add(product, low.with_slope(zeros, c, zeros))
    if _has_symbol(beta) or beta != 1:
        c = low.op.Mul(c, low.tensor(beta, low.dtype))
    return low.op.Add(c, product)


@lower("aten._cdist_forward.default")
def cdist(low: Lowering, a: ir.Value, b: ir.Value, p: float, compute_mode: Any = None) -> ir.Value:
    """Lowers to the norms of the differences between each row of `a` and each row of `b`."""
    op = low.op
    return _distance(low, op.Sub(op.Unsqueeze(a, [-2]), op.Unsqueeze(b, [-3])), p)


@lower("aten._pdist_forward.default")
def pdist(low: Lowering, x: ir.Value, p: float = 2.0) -> ir.Value:
    """Lowers to the norms of the differences between rows i and j of `x` for all i < j, sorted by i, then j."""
    op = low.op
    rows = op.dim(x, 0)
    square = op.Expand(op.const(1.0), op.Concat(rows, rows, axis=0))
    pairs = op.NonZero(op.Trilu(square, 1, upper=1))
    first, second = (op.Gather(x, op.Gather(pairs, i)) for i in (0, 1))
    return _distance(low, op.Sub(first, second), p)


def _distance(low: Lowering, difference: ir.Value, p: float) -> ir.Value:
    """Returns the norms of order `p` of `difference` along its last axis, which is removed."""
    op = low.op
    # Not [-1], which ONNX Runtime (1.31) does not support for tensors without elements.
    axes = [low.result.dim()]
    if p in (1, 2):
        return op.emit(f"ReduceL{int(p)}", difference, axes, keepdims=0)
    if p == math.inf:
        return op.ReduceMax(op.Abs(difference), axes, keepdims=0)
    raise low.unsupported(f"distances of order {p}")


@lower("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
def grouped_mm(
    low: Lowering, a: ir.Value, b: ir.Value, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> ir.Value:
    """Lowers to one MatMul per group: a[: offs[0]] @ b[0], a[offs[0] : offs[1]] @ b[1], ...

    Rows after the last group are zero. In PyTorch, they are uninitialized.

    a: [rows, k]; b: [groups, k, n]; offs: [groups].
    """
    op = low.op
    # The loop over groups is unrolled, so their number is specialized.
    groups = low.specialized(low.fake(1).shape[0])
    if offs is None or bias is not None or len(low.fake(0).shape) != 2 or len(low.fake(1).shape) != 3:
        raise low.unsupported("shapes other than [rows, k] by [groups, k, n]")
    ends = low.tensor(offs, ir.DataType.INT64)
    sizes = op.Sub(op.Concat(ends, op.Shape(a, start=0, end=1), axis=0), op.Concat([0], ends, axis=0))
    parts = op.Split(a, sizes, axis=0, _outputs=groups + 1)
    (_, k), (_, n) = low.shape(low.fake(0)), low.shape(low.result)
    products = []
    for group, part in enumerate(parts[:-1]):
        # With a named size, shape inference finds that the gradient has the same shape as the part.
        part.shape = ir.Shape([f"rows of {part.name}", k])
        factor = op.Gather(b, group)
        factor.shape = ir.Shape([k, n])
        products.append(op.MatMul(part, factor))
        products[-1].shape = ir.Shape([part.shape[0], n])
    rest_shape = op.Concat(op.Shape(parts[-1], start=0, end=1), op.dim(b, -1), axis=0)
    zeros = op.Expand(op.const(0.0, low.dtype), rest_shape)
    return op.Concat(*products, zeros, axis=0)
