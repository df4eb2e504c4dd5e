"""Decomposes com.microsoft normalization ops into standard ops."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff._bodies import defbody
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff.rules.contrib._shared import MS, unsupported
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import inverse_rms_normalization


@defbody(
    "SkipLayerNormalization", MS,
    "input skip gamma beta bias", "output mean inv_std_var input_skip_bias_sum", epsilon=1e-12,
)  # fmt: skip
def skip_layer_normalization(op: Emitter, n: NodeView) -> list[ir.Value]:
    """Decomposes SkipLayerNormalization: LayerNormalization(input + skip + bias)."""
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
    """Decomposes SkipSimplifiedLayerNormalization: RMSNormalization(input + skip + bias)."""
    # The second output, a mean, is meaningless here; any value of its shape will do.
    total = _sum(op, n)
    y, inverse = _rms(op, n, total, n.gamma)
    return [y, inverse, inverse, total]


@defbody("SimplifiedLayerNormalization", "", "X scale", "Y inv_std_var", axis=-1, epsilon=1e-5, stash_type=1)
def simplified_layer_normalization(op: Emitter, n: NodeView) -> list[ir.Value]:
    """Decomposes SimplifiedLayerNormalization: RMSNormalization(X) over `axis` and all later axes."""
    # ONNX Runtime puts this op into the standard domain, although the standard doesn't have it.
    axis = n.attr("axis")
    axes = [-1] if axis == -1 else list(range(n.axis(n.X, axis), n.rank(n.X)))
    return list(_rms(op, n, n.X, n.scale, axes))


def _sum(op: Emitter, n: NodeView) -> ir.Value:
    """Returns input + skip + bias."""
    total = op.Add(n.input, n.skip)
    return total if n.bias is None else op.Add(total, n.bias)


def _rms(
    op: Emitter, n: NodeView, x: ir.Value, scale: ir.Value, axes: Sequence[int] = (-1,)
) -> tuple[ir.Value, ir.Value]:
    """Returns x·r·scale and r = 1 / sqrt(mean(x²) + epsilon), computed in float32 for half precision."""
    epsilon = n.attr("epsilon")
    # The composite op has a native kernel, and its VJP reads only x and r. But it has no VJP for r, which is the node's
    # second and third output.
    given = n.inputs[0]
    dims = None if given is None else static_dims(given)
    is_float = given is not None and given.dtype == scale.dtype == ir.DataType.FLOAT
    has_statistics = any(value.name for value in n.outputs[1:3])
    is_plain = is_float and list(axes) == [-1] and not has_statistics
    if op.can_call and is_plain and dims and static_dims(scale) == dims[-1:]:
        y, r = op.call(inverse_rms_normalization, x, scale, op.const(epsilon, ir.DataType.FLOAT), _outputs=2)
        return y, r
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
    """Decomposes EmbedLayerNormalization: LayerNormalization of the sum of word, position and segment embeddings."""
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
    # mask_index, the second output, holds the number of valid words of each sequence, or 0 without a mask.
    counted = n.input_ids if n.mask is None else n.mask
    ones = op.Cast(op.Greater(op.Cast(counted, to=ir.DataType.INT64), 0), to=ir.DataType.INT32)
    lengths = op.ReduceSum(ones, [1], keepdims=0)
    if n.mask is None:
        lengths = op.Mul(lengths, op.const(0, ir.DataType.INT32))
    return [y, lengths, total]


@defbody("GroupNorm", MS, "X gamma beta", "Y", activation=0, channels_last=1, epsilon=1e-5, groups=None)
def group_norm(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes GroupNorm: GroupNormalization of channels-last images, then SiLU if `activation` is 1."""
    return _group_normalized(op, n, n.X)


@defbody(
    "SkipGroupNorm", MS, "X gamma beta skip bias", "Y S", activation=0, channels_last=1, epsilon=1e-5, groups=None,
)  # fmt: skip
def skip_group_norm(op: Emitter, n: NodeView) -> list[ir.Value]:
    """Decomposes SkipGroupNorm: GroupNorm(X + skip + bias), where skip may be `[batch, (1, 1,) channels]`."""
    if not n.attr("channels_last"):
        raise unsupported(n, "the channels-first layout")
    # A skip connection without spatial axes is added at every position.
    skip = op.Unsqueeze(n.skip, [1, 2]) if n.rank(n.skip) == 2 else n.skip
    total = op.Add(n.X, skip)
    total = total if n.bias is None else op.Add(total, n.bias)
    return [_group_normalized(op, n, total), total]


def _group_normalized(op: Emitter, n: NodeView, x: ir.Value) -> ir.Value:
    """Returns the GroupNorm of `x` with the parameters and attributes of the node."""
    last = n.attr("channels_last")
    x = op.Transpose(x, perm=[0, 3, 1, 2]) if last else x
    # GroupNorm allows float32 parameters with float16 images; GroupNormalization requires a single dtype.
    scale, bias = (op.CastLike(value, x) for value in (n.gamma, n.beta))
    y = op.GroupNormalization(x, scale, bias, epsilon=n.attr("epsilon"), num_groups=n.attr("groups"))
    y = op.Mul(y, op.Sigmoid(y)) if n.attr("activation") else y
    return op.Transpose(y, perm=[0, 2, 3, 1]) if last else y
