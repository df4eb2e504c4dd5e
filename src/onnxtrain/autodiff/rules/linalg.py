"""Differentiates matrix products, inverses, Cholesky factors and determinants."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._broadcast import sum_to_shape_of
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.autodiff.rules._composite import composite_vjp
from onnxtrain.emitter import Emitter
from onnxtrain.functions import cholesky, inverse


@vjp("MatMul", wrt=("A", "B"))
def matmul(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Y = A B:  ct_A = ct B^T,  ct_B = A^T ct, each summed over the operand's broadcast batch axes.

    A vector A is treated as a row, a vector B as a column; the axis that Y lacks is restored in ct.
    """
    if n.A.shape is None and n.B.shape is not None and n.B.shape.rank() == 2:
        # A has unknown rank, B is a matrix: with leading axes flattened, A is a matrix whatever its rank; a vector is
        # one row.
        product = (
            op.MatMul(op.Transpose(_rows(op, n.A), perm=[1, 0]), _rows(op, ct)) if n.needs("B") else None
        )
        return op.MatMul(ct, op.Transpose(n.B, perm=[1, 0])) if n.needs("A") else None, product
    ranks = n.rank(n.A), n.rank(n.B)
    # The product of two vectors is a scalar: there are no axes to restore.
    if ranks == (1, 1):
        return (
            op.Mul(ct, n.B) if n.needs("A") else None,
            op.Mul(ct, n.A) if n.needs("B") else None,
        )
    a = _as_matrix(op, n.A, 0)
    b = _as_matrix(op, n.B, 1)
    if ranks[0] == 1:
        ct = op.Unsqueeze(ct, [-2])
    elif ranks[1] == 1:
        ct = op.Unsqueeze(ct, [-1])
    return (
        _left_cotangent(op, n, ct, a, b) if n.needs("A") else None,
        _right_cotangent(op, n, ct, a, b) if n.needs("B") else None,
    )


def _as_matrix(op: Emitter, value: ir.Value, axis: int) -> ir.Value:
    """Reshapes a vector to a matrix with size one along `axis`; returns other values unchanged."""
    assert value.shape is not None
    if value.shape.rank() > 1:
        return value
    matrix: ir.Value = op.Unsqueeze(value, [axis])
    matrix.shape = ir.Shape([1, value.shape[0]] if axis == 0 else [value.shape[0], 1])
    return matrix


def _left_cotangent(op: Emitter, n: NodeView, ct: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns the cotangent of A; a and b are the operands as (batches of) matrices."""
    product = op.MatMul(ct, _transposed(op, n, b))
    return _sum_batch(op, n, product, a, n.A)


def _right_cotangent(op: Emitter, n: NodeView, ct: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """Returns the cotangent of B; a and b are the operands as (batches of) matrices."""
    # One matrix multiplied by a batch: a single product over the rows of the whole batch replaces a sum of products.
    if n.rank(b) == 2 and n.rank(a) > 2:
        product = op.MatMul(op.Transpose(_rows(op, a), perm=[1, 0]), _rows(op, ct))
        return product if b is n.B else op.reshape_like(product, n.B)
    return _sum_batch(op, n, op.MatMul(_transposed(op, n, a), ct), b, n.B)


def _rows(op: Emitter, value: ir.Value) -> ir.Value:
    """Flattens all axes but the last into the rows of a matrix."""
    # With Flatten, because a Reshape to -1 rows is undefined for an empty value.
    return op.Flatten(value, axis=-1)


def _transposed(op: Emitter, n: NodeView, value: ir.Value) -> ir.Value:
    """Transposes the last two axes of `value`."""
    axes = list(range(n.rank(value)))
    return op.Transpose(value, perm=[*axes[:-2], axes[-1], axes[-2]])


def _sum_batch(op: Emitter, n: NodeView, product: ir.Value, matrix: ir.Value, primal: ir.Value) -> ir.Value:
    """Sums `product`, a batch of cotangents, to the shape of `matrix`, then reshapes it to the shape of `primal`."""
    assert matrix.shape is not None
    output = n.out.Y
    if output.shape is not None:
        vectors = (n.rank(n.A) == 1) + (n.rank(n.B) == 1)
        batch = list(output.shape)[: output.shape.rank() - 2 + vectors]
        product.shape = ir.Shape([*batch, *list(matrix.shape)[-2:]])
    total = sum_to_shape_of(op, product, product, matrix)
    return total if matrix is primal else op.reshape_like(total, primal)


@vjp("Gemm", wrt=("A", "B", "C"))
def gemm(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Y = alpha A' B' + beta C:  ct_A' = alpha ct B'^T, ct_B' = alpha A'^T ct, ct_C = beta ct.

    A' is A^T if transA=1, else A; B' likewise.
    """
    alpha, beta, trans_a, trans_b = (n.attr(name) for name in ("alpha", "beta", "transA", "transB"))
    result: dict[str, ir.Value | None] = {}
    if n.needs("A"):
        result["A"] = (
            op.Gemm(n.B, ct, alpha=alpha, transA=trans_b, transB=1)
            if trans_a
            else op.Gemm(ct, n.B, alpha=alpha, transB=1 - trans_b)
        )
    if n.needs("B"):
        result["B"] = (
            op.Gemm(ct, n.A, alpha=alpha, transA=1, transB=trans_a)
            if trans_b
            else op.Gemm(n.A, ct, alpha=alpha, transA=1 - trans_a)
        )
    if n.needs("C"):
        # C may be a row, a column or a scalar, which Gemm broadcasts.
        total = sum_to_shape_of(op, ct, n.out.Y, n.C)
        result["C"] = total if beta == 1 else op.Mul(total, beta)
    return result


@composite_vjp(inverse, ("y", "pivots"))
def inverse_rule(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of Y = A⁻¹:  dY = -Y dA Y, so ct_A = -Yᵀ ct Yᵀ."""
    y = _transposed(op, n, n.outputs[0])
    return op.Neg(op.MatMul(op.MatMul(y, ct), y))


@composite_vjp(cholesky, ("y",))
def cholesky_rule(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of the Cholesky factor L of A = L Lᵀ:  ct_A = (S + Sᵀ) / 2 with S = L⁻ᵀ Φ(Lᵀ ct) L⁻¹.

    Φ keeps the lower triangle and half of the diagonal. Murray, Differentiation of the Cholesky decomposition (2016),
    arXiv:1602.07527.
    """
    factor = n.out.y
    product = op.MatMul(_transposed(op, n, factor), ct)
    # The sum contains the part below the diagonal twice and the diagonal once; half of it is Φ.
    half = op.Mul(op.Add(op.Trilu(product, upper=0), op.Trilu(product, -1, upper=0)), 0.5)
    inverted, _ = op.call(inverse, factor, _outputs=2)
    inverted.shape = factor.shape
    s = op.MatMul(op.MatMul(_transposed(op, n, inverted), half), inverted)
    s.shape = factor.shape
    return op.Mul(op.Add(s, _transposed(op, n, s)), 0.5)


@vjp("Det", wrt=("X",))
def det(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Det: ct_X = ct * cofactors of X.  X is float [..., n, n] with static n.

    The cofactors are computed as det(X) X^-T where this is numerically stable, otherwise as minors: the signed
    determinants of X without row i and column j.
    """
    (size,) = n.static(n.X, [-1])
    scale = op.Unsqueeze(ct, [-2, -1])
    # The only minor of a 1x1 matrix is the determinant of an empty matrix, 1, which no runtime computes.
    if size == 1:
        return scale
    # An empty matrix has no gradient to compute; any value of its shape will do.
    if size == 0:
        return op.Mul(scale, n.X)
    # For 2x2, the cofactors are the entries themselves with signs, without rounding errors.
    if size == 2:
        return op.Mul(scale, _minors(op, n, n.X, size))
    # The inverse keeps X^-T Y accurate where X is ill-conditioned and Y lies in its range: with determinants, the
    # gradient of W in det(W W^T + I) has 260 times the error. Determinants, on the other hand, are exact for singular
    # matrices.
    regular = op.stop_gradient(_is_regular(op, n, size))
    if size > _LARGEST_WITH_BOTH:
        return op.Mul(scale, _cofactors_of_large(op, n, regular, size))
    # Each method gets a well-behaved matrix where the other one is used: a second derivative multiplies its result by
    # 0.
    identity = op.const(np.eye(size), like=n.X)
    by_inverse = _by_inverse(op, n, op.Where(regular, n.X, identity))
    by_minors = _minors(op, n, op.Where(regular, identity, n.X), size)
    return op.Mul(scale, op.Where(regular, by_inverse, by_minors))


_LARGEST_WITH_BOTH = 8
"""Largest n for which cofactors of n x n matrices are computed both from inverses (n³ operations) and minors (n⁵)."""


def _cofactors_of_large(op: Emitter, n: NodeView, regular: ir.Value, size: int) -> ir.Value:
    """Returns the cofactors of X; computes minors, row by row, only if a matrix of the batch is not regular.

    Args:
        op: emitter.
        n: the Det node.
        regular: mask, bool [..., 1, 1]: True for matrices whose cofactors can be computed from the inverse.
        size: number of rows of a matrix.
    """
    branches = {}
    for name in ("then_branch", "else_branch"):
        inner = op.subgraph({})
        if name == "then_branch":
            result = _by_inverse(inner, n, n.X)
        else:
            identity = inner.const(np.eye(size), like=n.X)
            by_inverse = _by_inverse(inner, n, inner.Where(regular, n.X, identity))
            by_minors = _minors_by_row(inner, n, inner.Where(regular, identity, n.X), size)
            result = inner.Where(regular, by_inverse, by_minors)
        result = inner.Identity(result)
        result.type, result.shape = ir.TensorType(n.X.dtype), n.X.shape
        inner.graph.outputs.append(result)
        branches[name] = ir.AttrGraph(name, inner.graph)
    all_regular = op.ReduceMin(op.Cast(regular, to=ir.DataType.INT32), keepdims=0)
    cofactors: ir.Value = op.emit("If", op.Cast(all_regular, to=ir.DataType.BOOL), **branches)
    cofactors.type, cofactors.shape = ir.TensorType(n.X.dtype), n.X.shape
    return cofactors


def _by_inverse(op: Emitter, n: NodeView, x: ir.Value) -> ir.Value:
    """Returns the cofactors of X, computed from an inverse: det(X) x^-T.

    `x` is X, with the identity in place of the matrices whose cofactors are computed as minors. The results for these
    matrices must not be used.
    """
    y, _ = op.call(inverse, x, _outputs=2)
    y.shape = n.X.shape
    return op.Mul(op.Unsqueeze(n.outputs[0], [-2, -1]), _transposed(op, n, y))


def _is_regular(op: Emitter, n: NodeView, size: int) -> ir.Value:
    """Returns a mask, bool [..., 1, 1]: True for each matrix X for which det(X) X^-T has some correct digits.

    For large matrices, an overflow or underflow of the determinant is accepted: it is common, and nearly all cofactors
    overflow or underflow as well, as in eager PyTorch.
    """
    least_pivot, least_determinant = (
        (2.0**-48, 2.0**-900) if n.X.dtype == ir.DataType.DOUBLE else (2.0**-20, 2.0**-100)
    )
    _, pivots = op.call(inverse, n.X, _outputs=2)
    largest = op.ReduceMax(op.Abs(n.X), [-2, -1], keepdims=0)
    # Pivots are [n, batch], and NaN after a pivot of 0: comparisons with NaN are false.
    has_pivots = op.GreaterOrEqual(
        op.Abs(pivots), op.Mul(op.Reshape(largest, [1, -1]), op.const(least_pivot, like=n.X))
    )
    all_pivots = op.Cast(
        op.ReduceMin(op.Cast(has_pivots, to=ir.DataType.INT32), [0], keepdims=0), to=ir.DataType.BOOL
    )
    determinant = op.Abs(n.outputs[0])
    # A smaller determinant is subnormal and has lost digits; an infinite one is useless.
    is_normal = op.And(
        op.GreaterOrEqual(determinant, op.const(least_determinant, like=n.X)),
        op.Less(determinant, op.const(np.inf, like=n.X)),
    )
    regular = op.Reshape(all_pivots, op.Shape(n.outputs[0]), allowzero=1)
    return op.Unsqueeze(regular if size > _LARGEST_WITH_BOTH else op.And(regular, is_normal), [-2, -1])


def _minors(op: Emitter, n: NodeView, x: ir.Value, size: int) -> ir.Value:
    """Returns the cofactors of `x`: its minors (determinants without row i and column j), with signs."""
    others = _all_but_one(size)
    batch = n.rank(n.X) - 2
    minors = op.Gather(op.Gather(x, others, axis=batch), others, axis=batch + 2)
    # Axes after the two Gathers: [..., row i, rows but i, column j, columns but j].
    minors = op.Transpose(minors, perm=[*range(batch), batch, batch + 2, batch + 1, batch + 3])
    return op.Mul(op.Det(minors), op.const(_signs(size), like=x))


def _minors_by_row(op: Emitter, n: NodeView, x: ir.Value, size: int) -> ir.Value:
    """Returns the cofactors of `x`, one row per Loop iteration: this takes memory for size³ elements, not size⁴."""
    others = op.const(_all_but_one(size))
    batch = n.rank(n.X) - 2
    inner = op.subgraph({"row": ir.DataType.INT64, "going": ir.DataType.BOOL})
    row, going = inner.graph.inputs
    row.shape = going.shape = ir.Shape(())
    # [..., rows but one, column j, columns but j]
    minors = inner.Gather(inner.Gather(x, inner.Gather(others, row), axis=batch), others, axis=batch + 1)
    minors = inner.Det(inner.Transpose(minors, perm=[*range(batch), batch + 1, batch, batch + 2]))
    minors.type, minors.shape = ir.TensorType(n.X.dtype), ir.Shape([*list(n.X.shape or [])[:batch], size])
    inner.graph.outputs.extend([inner.Identity(going), minors])
    always = op.const(np.array(True))
    rows = op.emit("Loop", op.const(size), always, body=ir.AttrGraph("body", inner.graph))
    rows.type, rows.shape = minors.type, ir.Shape([size, *minors.shape])
    return op.Mul(
        op.Transpose(rows, perm=[*range(1, batch + 1), 0, batch + 1]), op.const(_signs(size), like=x)
    )


def _all_but_one(size: int) -> np.ndarray:
    """Returns an array [size, size - 1] whose row i lists the integers from 0 to `size` - 1, except i."""
    return np.array([[k for k in range(size) if k != i] for i in range(size)], dtype=np.int64)


def _signs(size: int) -> list[list[float]]:
    """Returns the signs of the cofactors, 1.0 and -1.0 in a checkerboard pattern."""
    return [[(-1.0) ** (i + j) for j in range(size)] for i in range(size)]
