"""Defines matrix products in bfloat16: factors are rounded to nearest, ties to even; everything else is float32.

The product of two bfloat16 numbers is exact in float32. Sums and outputs are float32. This is what AVX512_BF16 and AMX
compute, and what these bodies compute on any stock runtime.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import CompositeOp, composite


def _matmul(left: bool, right: bool) -> CompositeOp:
    """Defines a composite op that computes MatMul(a, b) in bfloat16, after permuting the axes of a or b on request.

    Args:
        left: True gives the op an attribute `perm_a`, the permutation of the axes of a, e.g. [0, 2, 1].
        right: True gives the op an attribute `perm_b`, the permutation of the axes of b.
    """
    kind = ("", "PermutedLeft", "PermutedRight", "PermutedBoth")[left + 2 * right]
    attributes = {
        name: ir.AttributeType.INTS for name, wanted in (("perm_a", left), ("perm_b", right)) if wanted
    }

    @composite(f"MatMul{kind}Bfloat16", ["a", "b"], attributes)
    def matmul(op: Emitter, a: ir.Value, b: ir.Value, **permutations: AttributeRef) -> ir.Value:
        factors = {"perm_a": rounded(op, a), "perm_b": rounded(op, b)}
        for name, permutation in permutations.items():
            factors[name] = op.Transpose(factors[name], perm=permutation)
        return op.MatMul(*factors.values())

    return matmul


# Separate ops, because on stock runtimes an identity Transpose would be a copy.
matmul_bfloat16 = {(left, right): _matmul(left, right) for left in (False, True) for right in (False, True)}
"""The bfloat16 MatMul ops, by whether they permute the axes of a and of b, e.g. matmul_bfloat16[True, False]."""


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
    """Computes Gemm with a and b rounded to bfloat16. c is optional and not rounded. Calls must set all attributes."""
    return op.Gemm(rounded(op, a), rounded(op, b), c, alpha=alpha, beta=beta, transA=transA, transB=transB)


@composite("RoundToBfloat16", ["x"])
def round_to_bfloat16(op: Emitter, x: ir.Value) -> ir.Value:
    """Rounds x to the nearest bfloat16 number; the result has the dtype of x."""
    return rounded(op, x)


def rounded(op: Emitter, x: ir.Value) -> ir.Value:
    """Emits casts that round x to bfloat16; the result has the dtype of x. For use in function bodies."""
    return op.Cast(op.Cast(x, to=ir.DataType.BFLOAT16), to=x.dtype)
