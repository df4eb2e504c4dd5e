"""Products of matrices in bfloat16: factors rounded to it, to nearest with ties to even, and all else in float32.

Products of two such numbers are exact in float32, and sums are float32's, as is the result. That is what AVX512_BF16
and AMX compute, and every stock runtime by these bodies.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import composite

_PERM = ir.AttributeType.INTS


@composite("MatMulBfloat16", ["a", "b"])
def _plain(op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """MatMul."""
    return op.MatMul(rounded(op, a), rounded(op, b))


@composite("MatMulPermutedLeftBfloat16", ["a", "b"], {"perm_a": _PERM})
def _permuted_left(op: Emitter, a: ir.Value, b: ir.Value, *, perm_a: AttributeRef) -> ir.Value:
    """MatMul of a with its axes in another order, as Transpose gives them."""
    return op.MatMul(op.Transpose(rounded(op, a), perm=perm_a), rounded(op, b))


@composite("MatMulPermutedRightBfloat16", ["a", "b"], {"perm_b": _PERM})
def _permuted_right(op: Emitter, a: ir.Value, b: ir.Value, *, perm_b: AttributeRef) -> ir.Value:
    """MatMul with b's axes in another order."""
    return op.MatMul(rounded(op, a), op.Transpose(rounded(op, b), perm=perm_b))


@composite("MatMulPermutedBothBfloat16", ["a", "b"], {"perm_a": _PERM, "perm_b": _PERM})
def _permuted_both(
    op: Emitter, a: ir.Value, b: ir.Value, *, perm_a: AttributeRef, perm_b: AttributeRef
) -> ir.Value:
    """MatMul with the axes of both in another order."""
    return op.MatMul(
        op.Transpose(rounded(op, a), perm=perm_a),
        op.Transpose(rounded(op, b), perm=perm_b),
    )


matmul_bfloat16 = {
    (False, False): _plain,
    (True, False): _permuted_left,
    (False, True): _permuted_right,
    (True, True): _permuted_both,
}
"""MatMul by whether it permutes the axes of a and of b.

The order of the axes is an attribute, and a Transpose that leaves them as they are would be a copy on stock runtimes.
"""


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
    """Gemm, with all of its attributes written out; c, which is not rounded, may be left out."""
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
    """The nearest number of bfloat16, in the dtype of x."""
    return rounded(op, x)


def rounded(op: Emitter, x: ir.Value) -> ir.Value:
    """Writes the roundings of a body."""
    return op.Cast(op.Cast(x, to=ir.DataType.BFLOAT16), to=x.dtype)
