"""Ops of onnxruntime's domain com.microsoft, as its optimizer and model builders leave them, in standard ops.

After onnxruntime's `ContribOperators.md`. An input or attribute that asks for what is not written here is an error that
names it, where a gradient passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import defbody
from onnxtrain.autodiff.rules._contrib import CONV, MS, refused
from onnxtrain.emitter import Emitter

_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("HardSwish", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
    **dict.fromkeys(("Elu", "LeakyRelu", "ThresholdedRelu"), ("alpha",)),
    "HardSigmoid": ("alpha", "beta"),
    "Selu": ("alpha", "gamma"),
}
"""What onnxruntime fuses behind a product, and the attributes whose numbers come with it."""


@defbody("FusedMatMul", MS, "A B", "Y", alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0)
def fused_matmul(op: Emitter, n: NodeView) -> ir.Value:
    """alpha·op(A)·op(B); a transposed batch has its matrices along the first and the last axis."""
    return matrix_product(op, n, *((n.attr(f"trans{side}"), n.attr(f"transBatch{side}")) for side in "AB"))


def matrix_product(op: Emitter, n: NodeView, a: tuple[int, int], b: tuple[int, int]) -> ir.Value:
    """Returns alpha·op(A)·op(B); for each, whether its matrices and its batch are transposed."""
    product = op.MatMul(_transposed(op, n, n.A, *a), _transposed(op, n, n.B, *b))
    return product if n.attr("alpha") == 1 else op.Mul(product, n.attr("alpha"))


def _transposed(op: Emitter, n: NodeView, value: ir.Value, matrix: int, batch: int) -> ir.Value:
    if not matrix and not batch:
        return value
    rank = n.rank(value)
    order = list(range(rank))
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
    """A Gemm with an activation behind it."""
    given = {name: n.attr(name) for name in ("alpha", "beta", "transA", "transB")}
    y = op.Gemm(n.A, n.B, *([n.C] if n.C is not None else []), **given)
    numbers = [n.attr(f"activation_{name}") for name in ("alpha", "beta", "gamma")]
    return _activated(op, n, y, n.attr("activation"), [number for number in numbers if number is not None])


@defbody("FusedConv", MS, "X W B Z", "Y", activation="", activation_params=None, **CONV)
def fused_conv(op: Emitter, n: NodeView) -> ir.Value:
    """A Conv, to whose result Z is added, with an activation behind it."""
    return fused_convolution(op, n, n.X, n.Z)


def fused_convolution(op: Emitter, n: NodeView, x: ir.Value, z: ir.Value | None) -> ir.Value:
    """Returns what a FusedConv makes of `x` and `z`, with the weights and attributes of a node."""
    y = op.Conv(x, n.W, n.B, **{name: n.attr(name) for name in CONV})
    y = y if z is None else op.Add(y, z)
    return _activated(op, n, y, n.attr("activation"), n.attr("activation_params") or [])


def _activated(
    op: Emitter, n: NodeView, x: ir.Value, kind: str | bytes, numbers: Sequence[float]
) -> ir.Value:
    """Returns an activation of `x`, by its name and its numbers in the order in which onnxruntime has them."""
    name = kind.decode() if isinstance(kind, bytes) else kind
    if not name:
        return x
    if name == "Clip":
        return op.Clip(x, *numbers)
    if name not in _ACTIVATIONS:
        raise refused(n, f"the activation {name}")
    return op.emit(name, x, **dict(zip(_ACTIVATIONS[name], numbers, strict=False)))


@defbody("Gelu", MS, "X", "Y")
def gelu(op: Emitter, n: NodeView) -> ir.Value:
    """By the error function."""
    return op.Gelu(n.X)


@defbody("BiasGelu", MS, "A B", "C")
def bias_gelu(op: Emitter, n: NodeView) -> ir.Value:
    """Gelu of a sum."""
    return op.Gelu(op.Add(n.A, n.B))


@defbody("FastGelu", MS, "X bias", "Y")
def fast_gelu(op: Emitter, n: NodeView) -> ir.Value:
    """By tanh, of a sum."""
    return op.Gelu(n.X if n.bias is None else op.Add(n.X, n.bias), approximate="tanh")


@defbody("QuickGelu", MS, "X", "Y", alpha=1.702)
def quick_gelu(op: Emitter, n: NodeView) -> ir.Value:
    """x·sigmoid(alpha·x)."""
    return op.Mul(n.X, op.Sigmoid(op.Mul(n.X, n.attr("alpha"))))


@defbody("BiasSoftmax", MS, "data bias", "output", axis=1, is_inner_broadcast=None)
def bias_softmax(op: Emitter, n: NodeView) -> ir.Value:
    """Softmax of a sum, over all axes from `axis` on together."""
    total = op.Add(n.data, n.bias)
    rank, axis = n.rank(n.data), n.axis(n.data, n.attr("axis"))
    if axis == rank - 1:
        return op.Softmax(total, axis=-1)
    flat = op.Softmax(op.Flatten(total, axis=axis), axis=-1)
    return op.Reshape(flat, op.Shape(total), allowzero=1)


@defbody(
    "SkipLayerNormalization", MS,
    "input skip gamma beta bias", "output mean inv_std_var input_skip_bias_sum", epsilon=1e-12,
)  # fmt: skip
def skip_layer_normalization(op: Emitter, n: NodeView) -> list[ir.Value]:
    """LayerNormalization of a sum."""
    total = _sum(op, n)
    y, mean, inverse = op.LayerNormalization(
        total, n.gamma, n.beta, axis=-1, epsilon=n.attr("epsilon"), _outputs=3
    )
    return [y, mean, inverse, total]


@defbody(
    "SkipSimplifiedLayerNormalization", MS,
    "input skip gamma bias", "output mean inv_std_var input_skip_bias_sum", epsilon=1e-12,
)  # fmt: skip
def skip_simplified_layer_normalization(op: Emitter, n: NodeView) -> list[ir.Value]:
    """RMSNormalization of a sum; it has no mean."""
    total = _sum(op, n)
    y, inverse = _rms(op, total, n.gamma, n.attr("epsilon"))
    return [y, inverse, inverse, total]


@defbody("SimplifiedLayerNormalization", "", "X scale", "Y inv_std_var", axis=-1, epsilon=1e-5, stash_type=1)
def simplified_layer_normalization(op: Emitter, n: NodeView) -> list[ir.Value]:
    """RMSNormalization over all axes from `axis` on."""
    axis = n.attr("axis")
    axes = [-1] if axis == -1 else list(range(n.axis(n.X, axis), n.rank(n.X)))
    return list(_rms(op, n.X, n.scale, n.attr("epsilon"), axes))


def _sum(op: Emitter, n: NodeView) -> ir.Value:
    total = op.Add(n.input, n.skip)
    return total if n.bias is None else op.Add(total, n.bias)


def _rms(
    op: Emitter, x: ir.Value, scale: ir.Value, epsilon: float, axes: Sequence[int] = (-1,)
) -> tuple[ir.Value, ir.Value]:
    wide = x if x.dtype in (None, ir.DataType.FLOAT, ir.DataType.DOUBLE) else op.Cast(x, to=ir.DataType.FLOAT)
    square = op.ReduceMean(op.Mul(wide, wide), list(axes), keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.Add(square, epsilon)))
    y = op.Mul(wide, inverse)
    return op.Mul(y if wide is x else op.CastLike(y, x), scale), inverse


@defbody(
    "EmbedLayerNormalization", MS,
    "input_ids segment_ids word_embedding position_embedding segment_embedding gamma beta mask position_ids",
    "output mask_index embedding_sum", epsilon=1e-12, mask_index_type=None,
)  # fmt: skip
def embed_layer_normalization(op: Emitter, n: NodeView) -> list[ir.Value]:
    """LayerNormalization of the sum of the embeddings of words, positions and segments."""
    total = op.Gather(n.word_embedding, n.input_ids)
    if n.position_ids is not None:
        position = op.Gather(n.position_embedding, n.position_ids)
    else:
        length = op.Shape(n.input_ids, start=1, end=2)
        position = op.Slice(n.position_embedding, [0], length, [0])
    total = op.Add(total, position)
    if n.segment_ids is not None:
        total = op.Add(total, op.Gather(n.segment_embedding, n.segment_ids))
    y = op.LayerNormalization(total, n.gamma, n.beta, axis=-1, epsilon=n.attr("epsilon"))
    counted = n.input_ids if n.mask is None else n.mask
    ones = op.Cast(op.Greater(op.Cast(counted, to=ir.DataType.INT64), 0), to=ir.DataType.INT32)
    lengths = op.ReduceSum(ones, [1], keepdims=0)
    if n.mask is None:
        lengths = op.Mul(lengths, op.const(0, ir.DataType.INT32))
    return [y, lengths, total]


@defbody("GroupNorm", MS, "X gamma beta", "Y", activation=0, channels_last=1, epsilon=1e-5, groups=None)
def group_norm(op: Emitter, n: NodeView) -> ir.Value:
    """GroupNormalization of images `[batch, height, width, channels]`, on request with SiLU behind it."""
    return group_normalized(op, n, n.X)


def group_normalized(op: Emitter, n: NodeView, x: ir.Value) -> ir.Value:
    """Returns what GroupNorm makes of `x`, with the parameters of a node."""
    last = n.attr("channels_last")
    x = op.Transpose(x, perm=[0, 3, 1, 2]) if last else x
    scale, bias = (op.CastLike(value, x) for value in (n.gamma, n.beta))
    y = op.GroupNormalization(x, scale, bias, epsilon=n.attr("epsilon"), num_groups=n.attr("groups"))
    y = op.Mul(y, op.Sigmoid(y)) if n.attr("activation") else y
    return op.Transpose(y, perm=[0, 2, 3, 1]) if last else y


@defbody("Trilu", MS, "X k", "Y", upper=1)
def trilu(op: Emitter, n: NodeView) -> ir.Value:
    """As the standard op."""
    return op.Trilu(n.X, *([n.k] if n.k is not None else []), upper=n.attr("upper"))


@defbody(
    "MatMulNBits", MS, "A B scales zero_points g_idx bias", "Y",
    K=None, N=None, accuracy_level=0, bits=4, block_size=None, weight_prepacked=0,
)  # fmt: skip
def matmul_nbits(op: Emitter, n: NodeView) -> ir.Value:
    """A·(scales·(B - zero_points))ᵀ, B packed in groups of `bits`; its gradient is that of A."""
    bits, size, rows, columns = (n.attr(name) for name in ("bits", "block_size", "N", "K"))
    if bits not in (2, 4, 8) or n.g_idx is not None or n.attr("weight_prepacked"):
        raise refused(n, f"{bits} bits, an order of groups or prepacked weights")
    blocks = math.ceil(columns / size)
    like = n.A
    codes = _unpacked(op, n.B, bits, [rows, blocks, size], like)
    if n.zero_points is None:
        zeros = op.const(float(2 ** (bits - 1)), like=like)
    elif n.zero_points.dtype == ir.DataType.UINT8:
        per_row = math.ceil(blocks * bits / 8) * 8 // bits
        packed = _unpacked(op, n.zero_points, bits, [rows, per_row], like)
        zeros = op.Unsqueeze(op.Slice(packed, [0], [blocks], [1]), [2])
    else:
        zeros = op.Reshape(op.CastLike(n.zero_points, like), [rows, blocks, 1])
    scales = op.Reshape(op.CastLike(n.scales, like), [rows, blocks, 1])
    weight = op.Slice(
        op.Reshape(op.Mul(op.Sub(codes, zeros), scales), [rows, blocks * size]), [0], [columns], [1]
    )
    y = op.MatMul(n.A, op.Transpose(weight, perm=[1, 0]))
    return y if n.bias is None else op.Add(y, n.bias)


def _unpacked(op: Emitter, packed: ir.Value, bits: int, shape: Sequence[int], like: ir.Value) -> ir.Value:
    """The numbers in bytes, the lowest bits first, as floating-point numbers of this shape."""
    whole = op.Unsqueeze(op.Cast(packed, to=ir.DataType.INT64), [-1])
    divisors = op.const([2 ** (bits * k) for k in range(8 // bits)])
    parts = op.Mod(op.Div(whole, divisors), op.const(2**bits))
    return op.CastLike(op.Reshape(parts, list(shape)), like)
