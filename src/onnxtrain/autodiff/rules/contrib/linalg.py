"""Decomposes com.microsoft matrix product ops, and registers VJPs of Inverse, CDist and MatMulNBits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff._bodies import defbody
from onnxtrain.autodiff._node import NodeView, Signature
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.autodiff.rules.contrib._packed import product_with_weight
from onnxtrain.autodiff.rules.contrib._shared import MS, unsupported
from onnxtrain.autodiff.rules.contrib.activation import activated
from onnxtrain.autodiff.rules.linalg import inverse_rule
from onnxtrain.emitter import Emitter
from onnxtrain.passes.parameters.block_order import fault_of_order


@defbody("FusedMatMul", MS, "A B", "Y", alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0)
def fused_matmul(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes FusedMatMul: Y = alpha·A'·B'.

    A has the layout [*batch, M, K], or [*batch, K, M] if transA=1; transBatchA=1 moves the batch axes between the two
    matrix axes: [M, *batch, K] or [K, *batch, M]. A' is [*batch, M, K] in all cases. Likewise for B.
    """
    return _product(op, n, *((n.attr(f"trans{side}"), n.attr(f"transBatch{side}")) for side in "AB"))


@defbody("TransposeMatMul", MS, "A B", "Y", alpha=1.0, transA=0, transB=0)
def transpose_matmul(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes TransposeMatMul: Y = alpha·A'·B', where A' is A, transposed if transA=1; likewise for B."""
    return _product(op, n, (n.attr("transA"), 0), (n.attr("transB"), 0))


def _product(op: Emitter, n: NodeView, a: tuple[int, int], b: tuple[int, int]) -> ir.Value:
    """Returns alpha·A'·B'; `a` and `b` are the flags (trans, transBatch) of A and of B, each 0 or 1."""
    product = op.MatMul(_transposed(op, n, n.A, *a), _transposed(op, n, n.B, *b))
    return product if n.attr("alpha") == 1 else op.Mul(product, n.attr("alpha"))


def _transposed(op: Emitter, n: NodeView, value: ir.Value, matrix: int, batch: int) -> ir.Value:
    """Moves the first axis after the batch axes if `batch` is 1, then swaps the last two axes if `matrix` is 1."""
    if not matrix and not batch:
        return value
    rank = n.rank(value)
    order = list(range(rank))
    # transBatch: the first and the last axis are those of the matrices, with the batch axes between them.
    if batch and rank > 2:
        order = [*order[1:-1], 0, rank - 1]
    if matrix and rank > 1:
        order[-2:] = order[:-3:-1]
    return op.Transpose(value, perm=order)


@defbody(
    "FusedGemm", MS, "A B C", "Y", alpha=1.0, beta=1.0, transA=0, transB=0,
    activation="", activation_alpha=None, activation_beta=None, activation_gamma=None,
)  # fmt: skip
def fused_gemm(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes FusedGemm: Y = activation(alpha·A'·B' + beta·C)."""
    attributes = {name: n.attr(name) for name in ("alpha", "beta", "transA", "transB")}
    y = op.Gemm(n.A, n.B, *([n.C] if n.C is not None else []), **attributes)
    numbers = [n.attr(f"activation_{name}") for name in ("alpha", "beta", "gamma")]
    return activated(op, n, y, n.attr("activation"), [number for number in numbers if number is not None])


def _nbits_shape(op: Emitter, n: NodeView) -> ir.Value:
    """Emits a matrix product with the shape and dtype of MatMulNBits' output, for shape inference."""
    weight = op.ConstantOfShape(op.const([n.attr("K"), n.attr("N")]))
    return op.MatMul(n.A, op.CastLike(weight, n.A))


@vjp(
    "MatMulNBits", wrt=("A", "scales", "zero_points", "bias"), domain=MS, shapes=_nbits_shape,
    signature=Signature(
        ("A", "B", "scales", "zero_points", "g_idx", "bias"), ("Y",),
        attributes={
            "K": None, "N": None, "accuracy_level": 0, "bits": 4, "block_size": None, "weight_prepacked": 0,
        },
    ),
)  # fmt: skip
def matmul_nbits(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of MatMulNBits: Y = A·Wᵀ + bias with W = scales·(B - zero_points), where the codes B are packed in bytes.

    ct_A = ct·W, ct_bias = sum of ct. With ct_W = ctᵀ·A, the cotangents of scales and zero points are the sums of (B -
    zero_points)·ct_W and of -scales·ct_W over each block. `accuracy_level=4` rounds A to int8 in the forward product;
    gradients pass straight through this rounding.
    """
    _check_nbits(n)
    # The node remains in the forward graph: its kernel reads the packed weights and rounds like the deployed model.
    cotangents: dict[str | ir.Value, ir.Value | None] = {}
    product = product_with_weight(op, n, ct) if n.needs("A") else None
    needs_codes = n.needs("scales") or n.needs("zero_points") or (n.needs("A") and product is None)
    codes, scales = _nbits_weights(op, n) if needs_codes else (ct, ct)
    if n.needs("A"):
        cotangents["A"] = product if product is not None else op.MatMul(ct, op.Mul(codes, scales))
    if n.needs("bias"):
        cotangents["bias"] = op.ReduceSum(op.Reshape(ct, [-1, n.attr("N")]), [0], keepdims=0)
    if n.needs("scales") or n.needs("zero_points"):
        rows, columns = op.Reshape(ct, [-1, n.attr("N")]), op.Reshape(n.A, [-1, n.attr("K")])
        ct_weight = op.MatMul(op.Transpose(rows, perm=[1, 0]), columns)
        for name, factor in (("scales", codes), ("zero_points", op.Neg(scales))):
            if n.needs(name):
                blocks = _block_sums(op, n, op.Mul(ct_weight, factor))
                cotangents[name] = op.CastLike(
                    op.Reshape(blocks, op.Shape(getattr(n, name))), getattr(n, name)
                )
    return cotangents


def _check_nbits(n: NodeView) -> None:
    """Raises NoGradientRule if the rule for MatMulNBits does not support the node, or would not match its kernel.

    The rule does not support prepacked weights, nor bit widths other than 2, 4 and 8. It would not match the kernel for
    `g_idx` orders that the kernel computes wrongly.
    """
    bits = n.attr("bits")
    if bits not in (2, 4, 8):
        raise unsupported(n, f"{bits}-bit weights")
    if n.attr("weight_prepacked"):
        raise unsupported(n, "prepacked weights")
    # The kernel computes such an order wrongly, so forward product and gradients would disagree.
    if (fault := fault_of_order(n.node)) is not None:
        raise unsupported(n, fault)


def _nbits_weights(op: Emitter, n: NodeView) -> tuple[ir.Value, ir.Value]:
    """Unpacks the weights of a MatMulNBits.

    Returns:
        Codes minus zero points, and scales, both float [N, K].
    """
    bits, size, rows, columns = (n.attr(name) for name in ("bits", "block_size", "N", "K"))
    blocks = math.ceil(columns / size)
    like = n.A
    codes = op.Slice(_unpack(op, n.B, bits, [rows, blocks * size], like), [0], [columns], [1])
    # Without zero points, the codes are centered at the middle of their range, e.g. 8 for 4 bits.
    if n.zero_points is None:
        zeros = op.const(float(2 ** (bits - 1)), like=like)
    elif n.zero_points.dtype == ir.DataType.UINT8:
        # Packed row by row: each row of zero points begins at a new byte.
        per_row = math.ceil(blocks * bits / 8) * 8 // bits
        packed = _unpack(op, n.zero_points, bits, [rows, per_row], like)
        zeros = _expand_blocks(op, n, op.Slice(packed, [0], [blocks], [1]))
    else:
        zeros = _expand_blocks(op, n, op.Reshape(op.CastLike(n.zero_points, like), [rows, blocks]))
    return op.Sub(codes, zeros), _expand_blocks(
        op, n, op.Reshape(op.CastLike(n.scales, like), [rows, blocks])
    )


def _expand_blocks(op: Emitter, n: NodeView, values: ir.Value) -> ir.Value:
    """Expands per-block values, [N, blocks], to the columns of each block, [N, K]."""
    # Quantizers that reorder columns by importance store the block of each column in `g_idx`.
    if n.g_idx is not None:
        return op.Gather(values, n.g_idx, axis=1)
    columns, size, rows = n.attr("K"), n.attr("block_size"), n.attr("N")
    blocks = math.ceil(columns / size)
    repeated = op.Reshape(op.Expand(op.Unsqueeze(values, [2]), [rows, blocks, size]), [rows, blocks * size])
    # The last block of a row may extend beyond the last column.
    return repeated if blocks * size == columns else op.Slice(repeated, [0], [columns], [1])


def _block_sums(op: Emitter, n: NodeView, terms: ir.Value) -> ir.Value:
    """Sums per-column values, [N, K], over the columns of each block: [N, blocks]."""
    columns, size, rows = n.attr("K"), n.attr("block_size"), n.attr("N")
    blocks = math.ceil(columns / size)
    if n.g_idx is not None:
        zeros = op.Expand(op.const(0.0, like=terms), [rows, blocks])
        places = op.Expand(op.Unsqueeze(n.g_idx, [0]), [rows, columns])
        return op.ScatterElements(zeros, places, terms, axis=1, reduction="add")
    if blocks * size != columns:
        terms = op.Pad(terms, [0, 0, 0, blocks * size - columns])
    return op.ReduceSum(op.Reshape(terms, [rows, blocks, size]), [2], keepdims=0)


def _unpack(op: Emitter, packed: ir.Value, bits: int, shape: Sequence[int], like: ir.Value) -> ir.Value:
    """Unpacks integers of `bits` bits each from bytes, lowest bits first, into floats of the given shape."""
    in_bytes = op.Unsqueeze(op.Cast(packed, to=ir.DataType.INT64), [-1])
    divisors = op.const([2 ** (bits * k) for k in range(8 // bits)])
    parts = op.Mod(op.Div(in_bytes, divisors), op.const(2**bits))
    return op.CastLike(op.Reshape(parts, list(shape)), like)


vjp(
    "Inverse", wrt=("X",), domain=MS, signature=Signature(("X",), ("Y",), attributes={}),
    shapes=lambda op, n: op.Identity(n.X),
)(inverse_rule)  # fmt: skip


@vjp(
    "CDist", wrt=("A", "B"), domain=MS, signature=Signature(("A", "B"), ("C",), attributes={"metric": "sqeuclidean"}),
    shapes=lambda op, n: op.MatMul(n.A, op.Transpose(n.B, perm=[1, 0])),
)  # fmt: skip
def cdist(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of CDist: C[i, k] = |A[i] - B[k]|², or its square root for the metric "euclidean".

    ct_A[i] = sum_k s[i, k]·(A[i] - B[k]) with s = 2·ct, or s = ct/C for the square root. The square root has a kink
    where two rows are equal: there, s is 0, as in `torch.cdist`.
    """
    metric = n.attr("metric")
    if metric == "sqeuclidean":
        slope = op.Mul(ct, 2.0)
    elif metric == "euclidean":
        # The inner Where avoids 0/0: it is masked by the outer Where, but would be NaN in the second derivative.
        apart = op.Greater(n.out.C, 0.0)
        slope = op.Where(apart, op.Div(ct, op.Where(apart, n.out.C, 1.0)), 0.0)
    else:
        raise unsupported(n, f"the metric {metric!r}")

    def difference(slope: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        """Returns sum_k slope[i, k]·(x[i] - y[k]) without materializing all differences."""
        total = op.ReduceSum(slope, [1], keepdims=1)
        return op.Sub(op.Mul(x, total), op.MatMul(slope, y))

    return {
        "A": difference(slope, n.A, n.B) if n.needs("A") else None,
        "B": difference(op.Transpose(slope, perm=[1, 0]), n.B, n.A) if n.needs("B") else None,
    }
