"""Lowers solutions of linear equations: inverses, Cholesky factors, triangular systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.functions import cholesky, inverse
from onnxtrain.ortmodule._torch import linalg_check_errors
from onnxtrain.ortmodule.lowering._table import Lowering, lower

INT32 = ir.DataType.INT32

_LIBRARY = torch.library.Library("onnxtrain", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("check_errors(Tensor info, str name, *, bool is_matrix) -> Tensor")  # type: ignore[no-untyped-call]
CHECKS: dict[Any, Any] = {
    torch.ops.aten._linalg_check_errors.default: torch.ops.onnxtrain.check_errors.default
}
"""Replacements for ops that only raise an error. A functional graph would drop such an op, since it has no result."""


@torch.library.register_fake("onnxtrain::check_errors")  # type: ignore[untyped-decorator]
def _fake_check_errors(info: torch.Tensor, name: str, *, is_matrix: bool) -> torch.Tensor:
    return info.new_empty(())


@torch.library.impl("onnxtrain::check_errors", "CompositeExplicitAutograd")
def _checked(info: torch.Tensor, name: str, *, is_matrix: bool) -> torch.Tensor:
    linalg_check_errors(info, name, is_matrix=is_matrix)
    return info.new_zeros(())


@lower("aten._linalg_det.default")
def det(low: Lowering, a: ir.Value) -> tuple[ir.Value | None, ...]:
    # ONNX has no LU factors.
    if low.uses_result(1) or low.uses_result(2):
        raise low.unsupported("readers of the factors")
    # The rule of Det writes its gradient for one size.
    _ = int(low.fake(0).shape[-1])
    matrices = low.op.Identity(a)
    matrices.shape = low.shape(low.fake(0))
    return low.op.Det(matrices), None, None


@lower("aten.linalg_cholesky_ex.default")
def cholesky_ex(
    low: Lowering, a: ir.Value, *, upper: bool = False, check_errors: bool = False
) -> tuple[ir.Value, ir.Value]:
    """Lowers to the factor, and the number of the first leading minor that is not positive (0 if all are)."""
    op = low.op
    factor = op.call(cholesky, _turned(low, a) if upper else a)
    factor.shape = low.shape(low.fake(0))
    rows = op.ReduceSum(low.op.stop_gradient(_on_diagonal(low, factor)), [-1], keepdims=0)
    good = op.Greater(rows, 0.0)
    return _turned(low, factor) if upper else factor, _first_that_is_not(low, good, -1)


@lower("aten.linalg_inv_ex.default")
def inv_ex(low: Lowering, a: ir.Value, *, check_errors: bool = False) -> tuple[ir.Value, ir.Value]:
    return _inverse(low, a)


@lower("aten._linalg_solve_ex.default")
def solve_ex(
    low: Lowering, a: ir.Value, b: ir.Value, *, left: bool = True, check_errors: bool = False
) -> tuple[ir.Value | None, ...]:
    """Lowers to the solution of A X = B, or of X A = B with left=False. B may be a batch of vectors."""
    if low.uses_result(1) or low.uses_result(2):
        raise low.unsupported("readers of the factors")
    op = low.op
    of_vectors = low.result[0].dim() < low.fake(0).dim()
    if of_vectors:
        b = op.Unsqueeze(b, [-1])
    y, info = _inverse(low, a)
    x = _solved(low, a, y, b, left, [*low.shape(low.result[0]), *([1] if of_vectors else [])])
    return op.Squeeze(x, [-1]) if of_vectors else x, None, None, info


@lower("aten.linalg_solve_triangular.default")
def solve_triangular(
    low: Lowering, a: ir.Value, b: ir.Value, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> ir.Value:
    return _solved_triangular(low, a, b, upper=upper, left=left, unitriangular=unitriangular)


@lower("aten.cholesky_solve.default", "aten._cholesky_solve_helper.default")
def cholesky_solve(low: Lowering, b: ir.Value, factor: ir.Value, upper: bool = False) -> ir.Value:
    """Lowers to the solution of L Lᵀ X = B, or with upper=True of Uᵀ U X = B."""
    below = _turned(low, factor, 1) if upper else factor
    y = _solved_triangular(low, below, b, upper=False)
    return _solved_triangular(low, _turned(low, below, 1), y, upper=True)


@lower("aten.cholesky_inverse.default")
def cholesky_inverse(low: Lowering, factor: ir.Value, upper: bool = False) -> ir.Value:
    """Lowers to the inverse of L Lᵀ, or with upper=True of Uᵀ U."""
    triangle = _triangle(low, factor, upper, False)
    y, _ = low.op.call(inverse, triangle, _outputs=2)
    y.shape = factor.shape
    turned = _turned(low, y)
    return low.op.MatMul(y, turned) if upper else low.op.MatMul(turned, y)


def _inverse(low: Lowering, a: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns the inverse, and the number of the first pivot that is zero (0 if none is)."""
    y, pivots = low.op.call(inverse, a, _outputs=2)
    y.shape = a.shape
    good = low.op.Not(low.op.Equal(low.op.stop_gradient(pivots), 0.0))
    first = _first_that_is_not(low, good, 0)
    return y, low.op.Reshape(first, low.op.Shape(a, end=-2), allowzero=1)


def _first_that_is_not(low: Lowering, good: ir.Value, axis: int) -> ir.Value:
    """Returns the first place along an axis, counted from 1, where `good` is false; 0 if there is none. int32."""
    op = low.op
    wrong = op.Cast(op.Not(good), to=INT32)
    # Of a matrix without rows nothing is wrong; ONNX Runtime has no ArgMax along an axis of size 0.
    if low.fake(0).shape[-1] == 0:
        return op.ReduceSum(wrong, [axis], keepdims=0)
    # ArgMax finds the first one; it also finds the first zero where there is no one.
    first = op.Cast(op.Add(op.ArgMax(wrong, axis=axis, keepdims=0), 1), to=INT32)
    return op.Mul(first, op.ReduceMax(wrong, [axis], keepdims=0))


def _solved_triangular(
    low: Lowering,
    a: ir.Value,
    b: ir.Value,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> ir.Value:
    a = _triangle(low, a, upper, unitriangular)
    y, _ = low.op.call(inverse, a, _outputs=2)
    y.shape = a.shape
    return _solved(low, a, y, b, left, list(low.shape(low.result)))


def _triangle(low: Lowering, a: ir.Value, upper: bool, unitriangular: bool) -> ir.Value:
    op, shape = low.op, a.shape
    a = op.Trilu(a, upper=int(upper))
    if unitriangular:
        a = op.Add(op.Sub(a, _on_diagonal(low, a)), _on_diagonal(low, op.ones_like(a)))
    a.shape = shape
    return a


def _solved(
    low: Lowering, a: ir.Value, y: ir.Value, b: ir.Value, left: bool, shape: Sequence[Any]
) -> ir.Value:
    """Returns Y B, or B Y, where Y is the inverse of A, with one step of iterative refinement.

    Args:
        low: the lowering.
        a: the matrices.
        y: their inverses.
        b: the right sides.
        left: whether A stands to the left of the solution.
        shape: the shape of the result.
    """
    op = low.op

    def product(matrix: ir.Value, x: ir.Value) -> ir.Value:
        result: ir.Value = op.MatMul(matrix, x) if left else op.MatMul(x, matrix)
        result.shape = ir.Shape(shape)
        return result

    x = product(y, b)
    # The product with a rounded inverse is less exact than a solution by elimination: solve once more for the residual.
    rest = op.Sub(b, product(a, x))
    rest.shape = ir.Shape(shape)
    return op.Add(x, product(y, rest))


def _on_diagonal(low: Lowering, a: ir.Value) -> ir.Value:
    """Returns matrices with all elements off the diagonal set to zero."""
    return low.op.Trilu(low.op.Trilu(a, upper=0), upper=1)


def _turned(low: Lowering, a: ir.Value, argument: int = 0) -> ir.Value:
    """Returns the transposed matrices; `a` has as many axes as that argument of the node."""
    axes = list(range(low.fake(argument).dim()))
    turned: ir.Value = low.op.Transpose(a, perm=[*axes[:-2], axes[-1], axes[-2]])
    turned.shape = a.shape
    return turned


@lower("onnxtrain.check_errors.default")
def check_errors(low: Lowering, info: ir.Value, name: str, *, is_matrix: bool) -> ir.Value:
    """Lowers the error for a matrix that has no inverse, or no Cholesky factor, to an assertion after the run."""
    holds = low.op.Equal(low.tensor(info, ir.DataType.INT64), 0)
    low.assertions.append((holds, f"{name}: a matrix is singular, or not positive-definite"))
    return low.op.const(0, INT32)
