"""Draw ops of onnxruntime, which are differentiated through their bodies of standard ops.

Optional inputs are left out at the end and between others; what is at the end is written as absent, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autodiff.fuzz.builder import Builder
from autodiff.fuzz.draw import Draw, Rejected

MS = "com.microsoft."


def _features(b: Builder, d: Draw) -> str:
    """Returns a value of rank 3 with something in it."""

    def some(a: np.ndarray) -> bool:
        return 0 not in a.shape

    x = b.tensor([3], fits=some, shape=lambda: [*b.sizes(2, least=1), d.choice([2, 4])])
    if b.shape(x)[-1] < 2:
        raise Rejected("of one number only its sign is left")
    return x


def _optional(b: Builder, d: Draw, shape: list[int]) -> str:
    return b.leaf(shape) if d.chance(50) else ""


def _gelu(op: str, least: int, most: int) -> Callable[[Builder, Draw], None]:
    def drawer(b: Builder, d: Draw) -> None:
        x = _features(b, d)
        biases = [b.leaf([b.shape(x)[-1]])] if least or (most and d.chance(50)) else [""] * most
        b.nodes(f"{MS}{op}", [x, *biases], 1, trailing=d.chance(50))

    return drawer


def quick_gelu(b: Builder, d: Draw) -> None:
    """With and without the factor of GPT."""
    b.node(f"{MS}QuickGelu", [_features(b, d)], alpha=d.choice([None, 1.0]))


def bias_softmax(b: Builder, d: Draw) -> None:
    """Along the last axis, the scores having a bias of their own or one for a row."""
    x = _features(b, d)
    shape = b.shape(x)
    bias = b.leaf(d.choice([[1, *shape[1:]], list(shape)]))
    inner = int(b.shape(bias)[0] == 1)
    b.node(f"{MS}BiasSoftmax", [x, bias], axis=2, is_inner_broadcast=inner)


def fused_matmul(b: Builder, d: Draw) -> None:
    """Of transposed factors, and scaled."""
    x = _features(b, d)
    rows, columns = b.shape(x)[-2:]
    first, second = d.chance(50), d.chance(50)
    inner, outer = rows if first else columns, d.integer(1, 3)
    other = b.leaf([outer, inner] if second else [inner, outer])
    b.node(f"{MS}FusedMatMul", [x, other], alpha=d.choice([None, 0.5]), transA=int(first), transB=int(second))


def _skip(op: str, shifts: int) -> Callable[[Builder, Draw], None]:
    def drawer(b: Builder, d: Draw) -> None:
        x = _features(b, d)
        size = b.shape(x)[-1]
        inputs = [x, b.like(list(b.shape(x))), b.leaf([size])]
        inputs += [_optional(b, d, [size]) for _ in range(shifts + 1)]
        outputs = d.choice([1, 1, 4])
        names = b.nodes(f"{MS}{op}", inputs, outputs, trailing=d.chance(50), epsilon=d.choice([0.01, 1e-5]))
        b.unused.update(names[1:3])  # onnxruntime gives statistics for training only

    return drawer


def multi_head_attention(b: Builder, d: Draw) -> None:
    """With and without biases."""
    q = _features(b, d)
    batch, queries, hidden = b.shape(q)
    keys, heads = d.integer(1, 3), d.choice([1, 2])
    if hidden % heads:
        raise Rejected("heads of unequal size")
    k, v = b.like([batch, keys, hidden]), b.like([batch, keys, hidden])
    bias = _optional(b, d, [3 * hidden])
    added = b.leaf([batch, heads, queries, keys]) if d.chance(30) else ""
    b.nodes(f"{MS}MultiHeadAttention", [q, k, v, bias, "", added], 1, trailing=d.chance(50), num_heads=heads)


def rotary_embedding(b: Builder, d: Draw) -> None:
    """With the positions, or the first one."""
    batch, heads, length, half = *b.sizes(3, least=1), d.choice([2, 4])
    x = b.like([batch, heads, length, 2 * half])
    positions = d.rng().integers(0, 4, (batch, length)) if d.chance(50) else np.zeros(1, np.int64)
    table = [b.leaf([5, half], wrt=False) for _ in range(2)]
    b.node(f"{MS}RotaryEmbedding", [x, b.data(positions), *table], interleaved=d.choice([None, 0, 1]))


DRAWERS = {
    f"{MS}BiasGelu": _gelu("BiasGelu", 1, 1),
    f"{MS}BiasSoftmax": bias_softmax,
    f"{MS}FastGelu": _gelu("FastGelu", 0, 1),
    f"{MS}FusedMatMul": fused_matmul,
    f"{MS}Gelu": _gelu("Gelu", 0, 0),
    f"{MS}MultiHeadAttention": multi_head_attention,
    f"{MS}QuickGelu": quick_gelu,
    f"{MS}RotaryEmbedding": rotary_embedding,
    f"{MS}SkipLayerNormalization": _skip("SkipLayerNormalization", 1),
    f"{MS}SkipSimplifiedLayerNormalization": _skip("SkipSimplifiedLayerNormalization", 0),
}
