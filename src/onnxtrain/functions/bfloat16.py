"""Defines matrix products in bfloat16: factors rounded to nearest, ties to even, and everything else in float32.

The product of two bfloat16 numbers is exact in float32. Sums and results are float32. That is what AVX512_BF16 and AMX
compute, and what these bodies compute on any stock runtime.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import composite

_PERM = ir.AttributeType.INTS


@composite("MatMulBfloat16", ["a", "b"])
def _plain(op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """Computes MatMul."""
    return op.MatMul(rounded(op, a), rounded(op, b))


@composite("MatMulPermutedLeftBfloat16", ["a", "b"], {"perm_a": _PERM})
def _permuted_left(op: Emitter, a: ir.Value, b: ir.Value, *, perm_a: AttributeRef) -> ir.Value:
    """Computes MatMul with the axes of a permuted, as by Transpose."""
    return op.MatMul(op.Transpose(rounded(op, a), perm=perm_a), rounded(op, b))


@composite("MatMulPermutedRightBfloat16", ["a", "b"], {"perm_b": _PERM})
def _permuted_right(op: Emitter, a: ir.Value, b: ir.Value, *, perm_b: AttributeRef) -> ir.Value:
    """Computes MatMul with the axes of b permuted."""
    return op.MatMul(rounded(op, a), op.Transpose(rounded(op, b), perm=perm_b))


@composite("MatMulPermutedBothBfloat16", ["a", "b"], {"perm_a": _PERM, "perm_b": _PERM})
def _permuted_both(
    op: Emitter, a: ir.Value, b: ir.Value, *, perm_a: AttributeRef, perm_b: AttributeRef
) -> ir.Value:
    """Computes MatMul with the axes of a and b permuted."""
    return op.MatMul(
        op.Transpose(rounded(op, a), perm=perm_a),
        op.Transpose(rounded(op, b), perm=perm_b),
    )


# Not one op with two permutations: on stock runtimes a Transpose that permutes nothing would be a copy.
matmul_bfloat16 = {
    (False, False): _plain,
    (True, False): _permuted_left,
    (False, True): _permuted_right,
    (True, True): _permuted_both,
}
"""MatMul by whether it permutes the axes of a and of b, e.g. matmul_bfloat16[True, False]."""


@composite(
    "GemmBfloat16",
    ["a", "b", "c"],
    {
        "alpha": ir.AttributeType.FLOAT,
        "beta": ir.AttributeType.FLOAT,
        "transA": ir.AttributeType.INT,
        "transB": ir.AttributeType.INT,
    },
)
def gemm_bfloat16(
    op: Emitter,
    a: ir.Value,
    b: ir.Value,
    c: ir.Value,
    *,
    alpha: AttributeRef,
    beta: AttributeRef,
    transA: AttributeRef,
    transB: AttributeRef,
) -> ir.Value:
    """Computes Gemm with all attributes given. c is not rounded, and optional."""
    return op.Gemm(
        rounded(op, a),
        rounded(op, b),
        c,
        alpha=alpha,
        beta=beta,
        transA=transA,
        transB=transB,
    )


@composite("RoundToBfloat16", ["x"])
def round_to_bfloat16(op: Emitter, x: ir.Value) -> ir.Value:
    """Rounds x to the nearest bfloat16 number, in the dtype of x."""
    return rounded(op, x)


def rounded(op: Emitter, x: ir.Value) -> ir.Value:
    """Returns x rounded to bfloat16, in the dtype of x."""
    return op.Cast(op.Cast(x, to=ir.DataType.BFLOAT16), to=x.dtype)
