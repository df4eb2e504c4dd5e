"""Lowers inverses, Cholesky factorizations and solvers of linear systems."""

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
"""Maps ops that only raise errors to custom ops with a result, because tracing drops ops without a result."""


@torch.library.register_fake("onnxtrain::check_errors")  # type: ignore[untyped-decorator]
def _fake_check_errors(info: torch.Tensor, name: str, *, is_matrix: bool) -> torch.Tensor:
    return info.new_empty(())


@torch.library.impl("onnxtrain::check_errors", "CompositeExplicitAutograd")
def _check_errors(info: torch.Tensor, name: str, *, is_matrix: bool) -> torch.Tensor:
    linalg_check_errors(info, name, is_matrix=is_matrix)
    return info.new_zeros(())


@lower("aten._linalg_det.default")
def det(low: Lowering, a: ir.Value) -> tuple[ir.Value | None, ...]:
    """Lowers to Det. The LU factors, which ONNX lacks, are None."""
    if low.uses_result(1) or low.uses_result(2):
        raise low.unsupported("uses of the LU factors")
    # The gradient rule of Det needs a fixed size.
    _ = int(low.fake(0).shape[-1])
    matrices = low.op.Identity(a)
    matrices.shape = low.shape(low.fake(0))
    return low.op.Det(matrices), None, None


@lower("aten.linalg_cholesky_ex.default")
def cholesky_ex(
    low: Lowering, a: ir.Value, *, upper: bool = False, check_errors: bool = False
) -> tuple[ir.Value, ir.Value]:
    """Returns the Cholesky factor and `info`: 0, or the 1-based index of the first non-positive leading minor."""
    op = low.op
    factor = op.call(cholesky, _transpose(low, a) if upper else a)
    factor.shape = low.shape(low.fake(0))
    rows = op.ReduceSum(low.op.stop_gradient(_diagonal_part(low, factor)), [-1], keepdims=0)
    is_positive = op.Greater(rows, 0.0)
    return _transpose(low, factor) if upper else factor, _first_false(low, is_positive, -1)


@lower("aten.linalg_inv_ex.default")
def inv_ex(low: Lowering, a: ir.Value, *, check_errors: bool = False) -> tuple[ir.Value, ir.Value]:
    return _inverse(low, a)


@lower("aten._linalg_solve_ex.default")
def solve_ex(
    low: Lowering, a: ir.Value, b: ir.Value, *, left: bool = True, check_errors: bool = False
) -> tuple[ir.Value | None, ...]:
    """Returns (X, None, None, info), where X is the solution of A X = B, or of X A = B if `left` is False.

    B may be a batch of vectors. For `info`, see :func:`_inverse`.

    Raises:
        UnsupportedATenOp: the graph reads the LU factors or pivots, which are None.
    """
    if low.uses_result(1) or low.uses_result(2):
        raise low.unsupported("uses of the LU factors")
    op = low.op
    is_vector = low.result[0].dim() < low.fake(0).dim()
    if is_vector:
        b = op.Unsqueeze(b, [-1])
    y, info = _inverse(low, a)
    x = _solve(low, a, y, b, left, [*low.shape(low.result[0]), *([1] if is_vector else [])])
    return op.Squeeze(x, [-1]) if is_vector else x, None, None, info


@lower("aten.linalg_solve_triangular.default")
def solve_triangular(
    low: Lowering, a: ir.Value, b: ir.Value, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> ir.Value:
    return _solve_triangular(low, a, b, upper=upper, left=left, unitriangular=unitriangular)


@lower("aten.cholesky_solve.default", "aten._cholesky_solve_helper.default")
def cholesky_solve(low: Lowering, b: ir.Value, factor: ir.Value, upper: bool = False) -> ir.Value:
    """Returns the solution of L Lᵀ X = B, or of Uᵀ U X = B if `upper`, where `factor` is L or U."""
    lower_factor = _transpose(low, factor, 1) if upper else factor
    y = _solve_triangular(low, lower_factor, b, upper=False)
    return _solve_triangular(low, _transpose(low, lower_factor, 1), y, upper=True)


@lower("aten.cholesky_inverse.default")
def cholesky_inverse(low: Lowering, factor: ir.Value, upper: bool = False) -> ir.Value:
    """Returns the inverse of L Lᵀ, or of Uᵀ U if `upper`, where `factor` is L or U."""
    triangle = _triangle(low, factor, upper, False)
    y, _ = low.op.call(inverse, triangle, _outputs=2)
    y.shape = factor.shape
    transposed = _transpose(low, y)
    return low.op.MatMul(y, transposed) if upper else low.op.MatMul(transposed, y)


def _inverse(low: Lowering, a: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns the inverse of each matrix, and `info`: 0, or the 1-based index of the first pivot that is zero."""
    y, pivots = low.op.call(inverse, a, _outputs=2)
    y.shape = a.shape
    is_nonzero = low.op.Not(low.op.Equal(low.op.stop_gradient(pivots), 0.0))
    info = _first_false(low, is_nonzero, 0)
    return y, low.op.Reshape(info, low.op.Shape(a, end=-2), allowzero=1)


def _first_false(low: Lowering, condition: ir.Value, axis: int) -> ir.Value:
    """Returns the 1-based index of the first false element along an axis, int32, or 0 if all elements are true."""
    op = low.op
    is_false = op.Cast(op.Not(condition), to=INT32)
    # ONNX Runtime's ArgMax fails along an axis of size 0.
    if low.fake(0).shape[-1] == 0:
        return op.ReduceSum(is_false, [axis], keepdims=0)
    # If all elements are true, ArgMax returns 0, and the ReduceMax below is 0.
    first = op.Cast(op.Add(op.ArgMax(is_false, axis=axis, keepdims=0), 1), to=INT32)
    return op.Mul(first, op.ReduceMax(is_false, [axis], keepdims=0))


def _solve_triangular(
    low: Lowering,
    a: ir.Value,
    b: ir.Value,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> ir.Value:
    """Returns the solution of A X = B, or of X A = B if `left` is False, for triangular matrices A."""
    a = _triangle(low, a, upper, unitriangular)
    y, _ = low.op.call(inverse, a, _outputs=2)
    y.shape = a.shape
    return _solve(low, a, y, b, left, list(low.shape(low.result)))


def _triangle(low: Lowering, a: ir.Value, upper: bool, unitriangular: bool) -> ir.Value:
    """Returns the upper or lower triangle of the matrices, with ones on the diagonal if `unitriangular`."""
    op, shape = low.op, a.shape
    a = op.Trilu(a, upper=int(upper))
    if unitriangular:
        a = op.Add(op.Sub(a, _diagonal_part(low, a)), _diagonal_part(low, op.ones_like(a)))
    a.shape = shape
    return a


def _solve(
    low: Lowering, a: ir.Value, y: ir.Value, b: ir.Value, left: bool, shape: Sequence[Any]
) -> ir.Value:
    """Returns the solution of A X = B, by multiplication with the inverse and one step of iterative refinement.

    Args:
        low: the lowering.
        a: the matrices A.
        y: their inverses.
        b: the right-hand sides B.
        left: False to solve X A = B instead.
        shape: the shape of the result.
    """
    op = low.op

    def product(matrix: ir.Value, x: ir.Value) -> ir.Value:
        result: ir.Value = op.MatMul(matrix, x) if left else op.MatMul(x, matrix)
        result.shape = ir.Shape(shape)
        return result

    x = product(y, b)
    # Without refinement, the result would be less accurate than that of elimination.
    residual = op.Sub(b, product(a, x))
    residual.shape = ir.Shape(shape)
    return op.Add(x, product(y, residual))


def _diagonal_part(low: Lowering, a: ir.Value) -> ir.Value:
    """Returns the matrices with all off-diagonal elements set to zero."""
    return low.op.Trilu(low.op.Trilu(a, upper=0), upper=1)


def _transpose(low: Lowering, a: ir.Value, argument: int = 0) -> ir.Value:
    """Transposes square matrices, [..., n, n].

    Args:
        low: the lowering.
        a: the matrices.
        argument: index of a tensor argument of the node that has the same rank as `a`.
    """
    axes = list(range(low.fake(argument).dim()))
    result: ir.Value = low.op.Transpose(a, perm=[*axes[:-2], axes[-1], axes[-2]])
    result.shape = a.shape
    return result


@lower("onnxtrain.check_errors.default")
def check_errors(low: Lowering, info: ir.Value, name: str, *, is_matrix: bool) -> ir.Value:
    """Lowers PyTorch's check for singular or non-positive-definite matrices to an assertion that `info` is 0.

    The assertion is evaluated after the ONNX graph has run. The result is a constant that nothing reads.

    Args:
        low: the lowering.
        info: the error codes of the factorization, int32; 0 for success.
        name: name of the function in the error message, e.g. "linalg.cholesky".
        is_matrix: ignored.
    """
    holds = low.op.Equal(low.tensor(info, ir.DataType.INT64), 0)
    low.assertions.append((holds, f"{name}: a matrix is singular, or not positive-definite"))
    return low.op.const(0, INT32)
