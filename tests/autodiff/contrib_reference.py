"""Ops of onnxruntime for onnx's reference evaluator: what their documentation says, by PyTorch, in the input's dtype.

ContribOperators.md of onnxruntime is the source; the fuzz compares each with onnxruntime's own kernel in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from onnx.reference.op_run import OpRun
from torch.nn import functional as fn

Array = np.ndarray
DOMAIN = "com.microsoft"


def _tensors(*arrays: Array | None) -> list[Any]:
    return [None if array is None else torch.from_numpy(np.array(array)) for array in arrays]


def _total(*parts: Array | None) -> torch.Tensor:
    return sum(torch.from_numpy(np.array(part)) for part in parts if part is not None)


class Contrib(OpRun):
    """An op of onnxruntime."""

    op_domain = DOMAIN


class Gelu(Contrib):
    """Gelu; onnx passes the attribute of its own Gelu, too."""

    def _run(self, x: Array, approximate: str | None = None) -> tuple[Array]:
        return (fn.gelu(_total(x), approximate=approximate or "none").numpy(),)


class BiasGelu(Contrib):
    """Gelu of a sum."""

    def _run(self, a: Array, b: Array) -> tuple[Array]:
        return (fn.gelu(_total(a, b)).numpy(),)


class FastGelu(Contrib):
    """Gelu by tanh, of a sum."""

    def _run(self, x: Array, bias: Array | None = None) -> tuple[Array]:
        return (fn.gelu(_total(x, bias), approximate="tanh").numpy(),)


class QuickGelu(Contrib):
    """x * sigmoid(alpha * x)."""

    def _run(self, x: Array, alpha: float | None = None) -> tuple[Array]:
        value = _total(x)
        return ((value * torch.sigmoid((1.702 if alpha is None else alpha) * value)).numpy(),)


class BiasSoftmax(Contrib):
    """Softmax of a sum along the last axis."""

    def _run(
        self, data: Array, bias: Array, axis: int | None = None, is_inner_broadcast: int = 0
    ) -> tuple[Array]:
        assert axis == data.ndim - 1
        return (torch.softmax(_total(data, bias), -1).numpy(),)


class FusedMatMul(Contrib):
    """alpha * A B, of transposed factors on request."""

    def _run(
        self, a: Array, b: Array, alpha: float | None = None, transA: int | None = None, transB: int | None = None
    ) -> tuple[Array]:  # fmt: skip
        a = np.swapaxes(a, -1, -2) if transA else a
        b = np.swapaxes(b, -1, -2) if transB else b
        return (np.asarray(np.matmul(a, b) * (1.0 if alpha is None else alpha), a.dtype),)


class SkipLayerNormalization(Contrib):
    """LayerNormalization of a sum; the fourth output is that sum."""

    def _run(
        self,
        x: Array,
        skip: Array,
        gamma: Array,
        beta: Array | None = None,
        bias: Array | None = None,
        epsilon: float | None = None,
    ) -> tuple[Array, ...]:
        total = _total(x, skip, bias)
        scale, shift = _tensors(gamma, beta)
        variance, mean = torch.var_mean(total, -1, unbiased=False, keepdim=True)
        inverse = torch.rsqrt(variance + epsilon)
        y = fn.layer_norm(total, scale.shape, scale, shift, epsilon)
        return y.numpy(), mean.numpy(), inverse.numpy(), total.numpy()


class SkipSimplifiedLayerNormalization(Contrib):
    """RMSNormalization of a sum; the fourth output is that sum."""

    def _run(
        self, x: Array, skip: Array, gamma: Array, bias: Array | None = None, epsilon: float | None = None
    ) -> tuple[Array, ...]:
        total = _total(x, skip, bias)
        (scale,) = _tensors(gamma)
        inverse = torch.rsqrt((total * total).mean(-1, keepdim=True) + epsilon)
        return (total * inverse * scale).numpy(), inverse.numpy(), inverse.numpy(), total.numpy()


class MultiHeadAttention(Contrib):
    """Scaled dot-product attention of `[batch, sequence, hidden]`, with a bias of queries, keys and values."""

    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        key_padding_mask: Array | None = None,
        attention_bias: Array | None = None,
        num_heads: int | None = None,
        scale: float | None = None,
        unidirectional: int | None = None,
    ) -> tuple[Array]:
        assert key_padding_mask is None
        q, k, v, b, added = _tensors(query, key, value, bias, attention_bias)
        if b is not None:
            parts = torch.split(b, [q.shape[-1], k.shape[-1], v.shape[-1]])
            q, k, v = (x + part for x, part in zip((q, k, v), parts, strict=True))
        q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        y = fn.scaled_dot_product_attention(q, k, v, added, is_causal=bool(unidirectional), scale=scale)
        return (y.transpose(1, 2).flatten(2).numpy(),)


class RotaryEmbedding(Contrib):
    """Turns pairs of features of `[batch, heads, sequence, size]` by the angles of their positions.

    onnx passes the attributes of its own RotaryEmbedding, too.
    """

    def _run(
        self,
        x: Array,
        positions: Array,
        cos: Array,
        sin: Array,
        interleaved: int | None = None,
        num_heads: int | None = None,
        rotary_embedding_dim: int | None = None,
    ) -> tuple[Array]:
        if positions.ndim == 1:
            positions = positions[0] + np.arange(x.shape[2])[None]
        c, s = cos[positions][:, None], sin[positions][:, None]
        half = x.shape[-1] // 2
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
        turned = a * c - b * s, b * c + a * s
        y = np.stack(turned, -1).reshape(x.shape) if interleaved else np.concatenate(turned, -1)
        return (y.astype(x.dtype),)


CONTRIB = {
    (DOMAIN, op.__name__): op
    for op in (
        BiasGelu,
        BiasSoftmax,
        FastGelu,
        FusedMatMul,
        Gelu,
        MultiHeadAttention,
        QuickGelu,
        RotaryEmbedding,
        SkipLayerNormalization,
        SkipSimplifiedLayerNormalization,
    )
}
