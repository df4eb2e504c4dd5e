"""Lowers products of matrices and vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ortmodule.lowering._table import Lowering, lower
from onnxtrain.passes.canonical.einsum_pairs import contract


@lower("aten.mm.default", "aten.bmm.default", "aten.matmul.default", "aten.mv.default", "aten.dot.default")
def matmul(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    left, right = low.tensors(a, b)
    return _product(low, left, right, low.fake(1).dim())


def _product(low: Lowering, a: ir.Value, b: ir.Value, rank: int) -> ir.Value:
    """Returns `a` times a `b` of this rank, which may be a vector."""
    if rank > 1:
        return low.op.MatMul(a, b)
    # A vector becomes a column: ONNX Runtime (1.31.1) merges a transposed `a` into the product, and computes a wrong
    # product where `b` is a vector.
    return low.op.Squeeze(low.op.MatMul(a, low.op.Unsqueeze(b, [-1])), [-1])


@lower("aten.addmm.default")
def addmm(low: Lowering, c: ir.Value, a: ir.Value, b: ir.Value, beta: Any = 1, alpha: Any = 1) -> ir.Value:
    # Gemm skips `c` for beta = 0, as PyTorch does. It also skips beta where there is nothing to multiply, which PyTorch
    # does not, and has attributes for alpha and beta, and no kernels for integers.
    if (
        low.has_no_elements(1)
        or not low.dtype.is_floating_point()
        or _symbolic(alpha, beta)
        or _rounded(low, alpha, beta)
    ):
        return _plus_product(low, c, a, b, beta, alpha)
    return low.op.Gemm(a, b, c, alpha=float(alpha), beta=float(beta))


def _rounded(low: Lowering, *numbers: float) -> bool:
    """Tells whether numbers lose digits as attributes of a float64 node, which ONNX keeps in float32."""
    return low.is_double and any(float(np.float32(number)) != number for number in numbers)


def _symbolic(*numbers: Any) -> bool:
    return any(isinstance(number, ir.Value) for number in numbers)


@lower("aten.baddbmm.default", "aten.addmv.default")
def baddbmm(low: Lowering, c: ir.Value, a: ir.Value, b: ir.Value, beta: Any = 1, alpha: Any = 1) -> ir.Value:
    return _plus_product(low, c, a, b, beta, alpha)


@lower("aten.addbmm.default")
def addbmm(low: Lowering, c: ir.Value, a: ir.Value, b: ir.Value, beta: Any = 1, alpha: Any = 1) -> ir.Value:
    product = low.op.ReduceSum(low.op.MatMul(a, b), [0], keepdims=0)
    return _scaled_sum(low, c, product, beta, alpha)


@lower("aten.addr.default")
def addr(low: Lowering, c: ir.Value, a: ir.Value, b: ir.Value, beta: Any = 1, alpha: Any = 1) -> ir.Value:
    product = low.op.Mul(low.op.Unsqueeze(a, [1]), b)
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
    """Lowers the product of three tensors, each with new axes, summed over some axes, in pairs."""
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


def _plus_product(low: Lowering, c: ir.Value, a: ir.Value, b: ir.Value, beta: Any, alpha: Any) -> ir.Value:
    return _scaled_sum(low, c, _product(low, a, b, low.fake(2).dim()), beta, alpha)


def _scaled_sum(low: Lowering, c: ir.Value, product: ir.Value, beta: Any, alpha: Any) -> ir.Value:
    """Returns beta * c + alpha * product."""
    if _symbolic(alpha) or alpha != 1:
        product = low.op.Mul(product, low.tensor(alpha, low.dtype))
    # PyTorch does not read `c` then, which may be NaN.
    if not _symbolic(beta) and beta == 0:
        return product
    if _symbolic(beta) or beta != 1:
        c = low.op.Mul(c, low.tensor(beta, low.dtype))
    return low.op.Add(c, product)


@lower("aten._cdist_forward.default")
def cdist(low: Lowering, a: ir.Value, b: ir.Value, p: float, compute_mode: Any = None) -> ir.Value:
    """Lowers to the norms of the differences of each row of `a` and each row of `b`."""
    op = low.op
    difference = op.Sub(op.Unsqueeze(a, [-2]), op.Unsqueeze(b, [-3]))
    # Not [-1]: ONNX Runtime (1.31) does not reduce a tensor without elements over an axis counted from the end.
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
    """Multiplies the rows of `a` before `offs[0]` by `b[0]`, the rows from there to `offs[1]` by `b[1]`, ...

    Rows behind the last group become zero, where PyTorch leaves them undefined.

    a: [rows, k]; b: [groups, k, n]; offs: [groups].
    """
    op = low.op
    # Each group is a piece of the graph: another number of groups captures another graph.
    groups = low.known(low.fake(1).shape[0])
    if offs is None or bias is not None or len(low.fake(0).shape) != 2 or len(low.fake(1).shape) != 3:
        raise low.unsupported("shapes other than [rows, k] by [groups, k, n]")
    ends = low.tensor(offs, ir.DataType.INT64)
    sizes = op.Sub(op.Concat(ends, op.Shape(a, start=0, end=1), axis=0), op.Concat([0], ends, axis=0))
    parts = op.Split(a, sizes, axis=0, _outputs=groups + 1)
    (_, k), (_, n) = low.shape(low.fake(0)), low.shape(low.result)
    products = []
    for group, part in enumerate(parts[:-1]):
        # Sizes by name let shape inference see that a gradient has the shape of its part.
        part.shape = ir.Shape([f"rows of {part.name}", k])
        factor = op.Gather(b, group)
        factor.shape = ir.Shape([k, n])
        products.append(op.MatMul(part, factor))
        products[-1].shape = ir.Shape([part.shape[0], n])
    rest = parts[-1]
    behind = op.Concat(op.Shape(rest, start=0, end=1), op.dim(b, -1), axis=0)
    nothing = op.Expand(op.const(0.0, low.dtype), behind)
    return op.Concat(*products, nothing, axis=0)
