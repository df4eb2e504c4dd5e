"""Defines matrix inversion and Cholesky factorization, which ONNX lacks, and the product of two matrices.

Inversion and factorization are Loops with one step per row. In their inputs, the last two axes, of size 1 or more, are
the matrices. The axes before them are batch axes.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import composite

Step = Callable[[Emitter, ir.Value, ir.Value], tuple[ir.Value, ir.Value]]


@composite("Inverse", ["a"], outputs=2)
def inverse(op: Emitter, a: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Computes A⁻¹ by Gauss-Jordan elimination with partial pivoting; the second output contains the pivots.

    If A is singular, a pivot is 0.

    a: `[..., n, n]`; pivots: `[n, batch]`, with flattened batch axes.
    """
    matrices, places = _flat(op, a), _row_indices(op, a)
    identity = op.Cast(op.Equal(op.Unsqueeze(places, [1]), places), to=a.dtype)
    # [A | I]: the operations that turn A into I turn I into the inverse.
    pair = op.Concat(matrices, op.Expand(identity, op.Shape(matrices)), axis=2)

    def eliminate(op: Emitter, row: ir.Value, pair: ir.Value) -> tuple[ir.Value, ir.Value]:
        column = op.Gather(pair, row, axis=2)
        # Rows above are done; -1 is less than the magnitude of any candidate.
        sizes = op.Where(op.GreaterOrEqual(places, row), op.Abs(column), -1.0)
        is_pivot = op.Unsqueeze(op.Equal(places, op.ArgMax(sizes, axis=1, keepdims=1)), [2])
        # The pivot row differs between the matrices of a batch; zeroing all other rows and summing selects it.
        pivot_row = op.ReduceSum(op.Where(is_pivot, pair, 0.0), [1], keepdims=1)
        swapped = op.Where(is_pivot, op.Unsqueeze(op.Gather(pair, row, axis=1), [1]), pair)
        pivot = op.Gather(pivot_row, row, axis=2)
        scaled = op.Div(pivot_row, op.Unsqueeze(pivot, [2]))
        factors = op.Unsqueeze(op.Gather(swapped, row, axis=2), [2])
        cleared = op.Sub(swapped, op.Mul(factors, scaled))
        # The pivot row, scaled to a pivot of 1, becomes row `row`.
        done = op.Where(op.Unsqueeze(op.Equal(places, row), [1]), scaled, cleared)
        return done, op.Squeeze(pivot, [1])

    reduced, pivots = _eliminate_rows(op, a, pair, eliminate, op.Shape(pair, end=1))
    size = op.Shape(a, start=-1)
    right = op.Slice(reduced, size, op.Add(size, size), [2])
    return op.Reshape(right, op.Shape(a), allowzero=1), pivots


@composite("Cholesky", ["a"])
def cholesky(op: Emitter, a: ir.Value) -> ir.Value:
    """Computes the lower triangular L with L Lᵀ = A.

    If A is not positive definite, the diagonal of L is 0 or NaN from some row on.

    a: `[..., n, n]`; only the lower triangle is read.
    """
    places = _row_indices(op, a)

    def eliminate(op: Emitter, row: ir.Value, rest: ir.Value) -> tuple[ir.Value, ir.Value]:
        column = op.Gather(rest, row, axis=2)
        # A negative pivot gives NaN, which remains in L and shows that A is not positive definite.
        root = op.Sqrt(op.Unsqueeze(op.Gather(column, row, axis=1), [1]))
        # Rows above the pivot belong to the zeros of L.
        factor = op.Where(op.GreaterOrEqual(places, row), op.Div(column, root), 0.0)
        return op.Sub(rest, op.Mul(op.Unsqueeze(factor, [2]), op.Unsqueeze(factor, [1]))), factor

    matrices = _flat(op, a)
    _, columns = _eliminate_rows(op, a, matrices, eliminate, op.Shape(matrices, end=-1))
    return op.Reshape(op.Transpose(columns, perm=[1, 2, 0]), op.Shape(a), allowzero=1)


def _flat(op: Emitter, a: ir.Value) -> ir.Value:
    """Returns the matrices as [batch, n, n], with flattened batch axes."""
    # Not -1, which cannot be inferred for an empty batch.
    batch = op.ReduceProd(op.Shape(a, end=-2), [0], keepdims=1)
    return op.Reshape(a, op.Concat(batch, op.Shape(a, start=-2), axis=0), allowzero=1)


def _row_indices(op: Emitter, a: ir.Value) -> ir.Value:
    """Returns the row indices 0, 1, ..., n - 1."""
    return op.Range(0, op.Squeeze(op.Shape(a, start=-1)), 1)


def _eliminate_rows(
    op: Emitter, a: ir.Value, state: ir.Value, step: Step, result_shape: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Runs `step` for each row of `a`, in a Loop.

    Args:
        op: emitter.
        a: the matrices, `[..., n, n]`.
        state: the initial state, passed from step to step.
        step: emits a step: (emitter of the body, row, state) -> (next state, result).
        result_shape: shape of one result, int64 vector.

    Returns:
        The final state, and the results stacked along a new first axis.
    """
    kinds = {"row": ir.DataType.INT64, "going": ir.DataType.BOOL, "state": a.dtype}
    inner = op.subgraph(kinds)
    row, going, before = inner.graph.inputs
    # Shape inference needs ranks to infer the shapes in the body.
    row.shape = going.shape = ir.Shape([])
    after, result = step(inner, row, before)
    inner.graph.outputs.extend([inner.Identity(going), after, result])
    count = op.Squeeze(op.Shape(a, start=-1))
    final, results = op.Loop(count, None, state, body=inner.graph, _outputs=2)
    # ONNX Runtime (1.32) gives the stacked results only one axis if the Loop runs no step, i.e. for matrices without
    # rows.
    shape = op.Concat(op.Shape(a, start=-1), result_shape, axis=0)
    return final, op.Reshape(results, shape, allowzero=1)


_TRANSPOSITIONS = {"transA": ir.AttributeType.INT, "transB": ir.AttributeType.INT}


@composite("MatrixProduct", ["a", "b"], _TRANSPOSITIONS)
def matrix_product(
    op: Emitter, a: ir.Value, b: ir.Value, *, transA: AttributeRef, transB: AttributeRef
) -> ir.Value:
    """Computes A B for two matrices, each of which may be stored transposed: Gemm without C."""
    return op.Gemm(a, b, transA=transA, transB=transB)


_LINEAR = {"transB": ir.AttributeType.INT}


@composite("Linear", ["x", "weight", "bias"], _LINEAR)
def linear(op: Emitter, x: ir.Value, weight: ir.Value, bias: ir.Value, *, transB: AttributeRef) -> ir.Value:
    """Computes a linear layer of a matrix x: Gemm with C = bias, a vector. The weight may be stored transposed."""
    return op.Gemm(x, weight, bias, transB=transB)


@composite("LinearRelu", ["x", "weight", "bias"], _LINEAR)
def linear_relu(
    op: Emitter, x: ir.Value, weight: ir.Value, bias: ir.Value, *, transB: AttributeRef
) -> ir.Value:
    """Computes Linear, with Relu applied to the output."""
    return op.Relu(op.Gemm(x, weight, bias, transB=transB))
