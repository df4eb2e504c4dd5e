"""Attention and its parts, differentiated through their ONNX function bodies."""

import math

import numpy as np
import torch

from autodiff.case import Case, F, R


def _attend(q, k, v, mask=None, *, causal=False, scale=None, softcap=0.0):
    """[batch, heads, sequence, size]; several heads of q may share one of k and v."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores.softmax(-1) @ v


def _windowed(q, k, v, *, left=-1, right=-1):
    """Each query attends to `left` keys before its own position, and to `right` keys after it; -1 for all."""
    distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    seen = (distance >= -left) | torch.tensor(left < 0)
    return _attend(q, k, v, seen & ((distance <= right) | torch.tensor(right < 0)))


def _heads(t, count):
    return t.reshape(*t.shape[:2], count, -1).transpose(1, 2)


def _flat(q, k, v, *, q_heads, kv_heads):
    out = _attend(_heads(q, q_heads), _heads(k, kv_heads), _heads(v, kv_heads))
    return out.transpose(1, 2).flatten(2)


# The body multiplies q and k by the root of the scale rounded to float32: sizes for which that is exact.
Q, K, V = F(2, 4, 3, 16), F(2, 4, 5, 16), F(2, 4, 5, 7)
FLOAT_MASK = F(3, 5, low=-1, high=1)
BOOL_MASK = R(np.array([[1, 1, 0, 0, 1], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0]], bool))

CASES = [
    Case("Attention", (Q, K, V), _attend, opset=23, name="plain"),
    Case("Attention", (Q, K, V), lambda q, k, v: _attend(q, k, v, causal=True), {"is_causal": 1}, opset=23),
    Case("Attention", (Q, K, V, FLOAT_MASK), _attend, opset=23, name="float_mask"),
    Case("Attention", (Q, K, V, BOOL_MASK), _attend, opset=23, name="bool_mask"),
    *(
        Case(
            "Attention", (Q, K, V), lambda q, k, v, w=(left, right): _windowed(q, k, v, left=w[0], right=w[1]),
            {"left_window_size": left, "right_window_size": right}, opset=25,
        )
        for left, right in ((1, 0), (-1, 1), (0, -1), (0, 2))
    ),
    Case(
        "Attention", (F(2, 4, 3, 6), F(2, 2, 5, 6), F(2, 2, 5, 6)), lambda q, k,
        v: _attend(q, k, v, scale=0.25, softcap=2.0), {"scale": 0.25, "softcap": 2.0}, opset=23,
        name="grouped_query_softcap",
    ),
    Case(
        "Attention", (F(2, 3, 64), F(2, 5, 32), F(2, 5, 32)), lambda q, k,
        v: _flat(q, k, v, q_heads=4, kv_heads=2), {"q_num_heads": 4, "kv_num_heads": 2}, opset=23,
        name="three_axes", symbolic={0: (0, 1), 1: (0, 1), 2: (0, 1)},
    ),
]  # fmt: skip


def _rotate(x, cos, sin, position=None, *, interleaved=False, size=0):
    """[batch, heads, sequence, size]; the first `size` entries (all when zero) are rotated in pairs."""
    size = size or x.shape[-1]
    if position is not None:
        cos, sin = cos[position], sin[position]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., :size], x[..., size:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    real, imaginary = a * cos - b * sin, a * sin + b * cos
    turned = (
        torch.stack([real, imaginary], -1).flatten(-2) if interleaved else torch.cat([real, imaginary], -1)
    )
    return torch.cat([turned, rest], -1)


POSITIONS = R(np.array([[0, 1, 2], [3, 1, 4]]))
CASES += [
    Case(
        "RotaryEmbedding", (F(2, 4, 3, 8), F(5, 4), F(5, 4), POSITIONS), _rotate, opset=23, name="positions"
    ),
    Case("RotaryEmbedding", (F(2, 4, 3, 8), F(2, 3, 4), F(2, 3, 4)), _rotate, opset=23, name="no_positions"),
    Case(
        "RotaryEmbedding", (F(2, 4, 3, 8), F(5, 4), F(5, 4), POSITIONS), lambda x, c, s,
        p: _rotate(x, c, s, p, interleaved=True), {"interleaved": 1}, opset=23, name="interleaved",
    ),
    Case(
        "RotaryEmbedding", (F(2, 4, 3, 8), F(5, 2), F(5, 2), POSITIONS), lambda x, c, s,
        p: _rotate(x, c, s, p, size=4), {"rotary_embedding_dim": 4}, opset=23, name="partial",
    ),
    Case(
        "RotaryEmbedding", (F(2, 3, 32), F(5, 4), F(5, 4), POSITIONS), lambda x, c, s,
        p: _rotate(x.unflatten(2, (4, 8)).transpose(1, 2), c, s, p).transpose(1, 2).flatten(2),
        {"num_heads": 4}, opset=23, name="three_axes", symbolic={0: (0, 1)},
    ),
]  # fmt: skip
