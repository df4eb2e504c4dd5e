"""Draw recurrent layers, attention, losses and quantization, and whole graphs of all ops."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from hypothesis import reject
from hypothesis import strategies as st

from autodiff.fuzz import bodies, contrib, elementwise, images, sampling, signals, structure
from autodiff.fuzz.builder import Builder
from autodiff.fuzz.draw import Draw, Rejected
from autodiff.fuzz.graph import Graph

Drawer = Callable[[Builder, Draw], None]
OPSETS = range(13, 27)
GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


def _recurrent(op: str) -> Drawer:
    def drawer(b: Builder, d: Draw) -> None:
        x = b.tensor([3], fits=lambda a: 0 not in a.shape, shape=lambda: b.sizes(3, least=1))
        if 0 in b.shape(x):
            raise Rejected("a sequence of nothing")
        _, batch, size = b.shape(x)
        # The judge knows single directions, and neither lengths nor other activations.
        direction = d.choice(["forward", "reverse", "bidirectional", None])
        hidden, count = d.integer(1, 3), 2 if direction == "bidirectional" else 1
        rows = GATES[op] * hidden

        def weight(*shape: int) -> str:
            return b.leaf(shape, -0.8, 0.8, kind="parameter" if d.chance(75) else None)

        inputs = [x, weight(count, rows, size), weight(count, rows, hidden)]
        inputs.append(weight(count, 2 * rows) if d.chance(60) else "")
        inputs.append("")
        if d.chance(50):
            inputs += [b.leaf([count, batch, hidden], -1, 1) for _ in range(2 if op == "LSTM" else 1)]
        attrs: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
        if op == "GRU":
            attrs["linear_before_reset"] = d.choice([None, 1])
        b.nodes(op, inputs, d.integer(1, 3 if op == "LSTM" else 2), **attrs)

    return drawer


def attention(b: Builder, d: Draw) -> None:
    """With and without a mask; several heads of queries may share one of keys."""
    kv_heads, batch = d.integer(1, 2), b.sizes(1, least=1)[0]
    heads = kv_heads * d.integer(1, 2)
    queries, keys, size = d.integer(1, 3), d.integer(1, 3), d.choice([1, 4])
    q = b.like([batch, heads, queries, size])
    k, v = b.like([batch, kv_heads, keys, size]), b.like([batch, kv_heads, keys, d.integer(1, 3)])
    mask = []
    if d.chance(40):
        mask = [b.leaf([queries, keys], -1, 1)] if d.chance(50) else [b.data(np.ones((queries, keys), bool))]
    b.node("Attention", [q, k, v, *mask], is_causal=d.choice([None, 1]) if not mask else None)


def rotary_embedding(b: Builder, d: Draw) -> None:
    """With positions, or a row of the table for each."""
    batch, heads, length, half = *b.sizes(3, least=1), d.integer(1, 2)
    x = b.like([batch, heads, length, 2 * half])
    table = [4, half] if d.chance(50) else [batch, length, half]
    positions = [b.data(d.rng().integers(0, 4, (batch, length)))] if len(table) == 2 else []
    b.node(
        "RotaryEmbedding", [x, b.leaf(table), b.leaf(table), *positions], interleaved=d.choice([None, 0, 1])
    )


def _loss(op: str) -> Drawer:
    def drawer(b: Builder, d: Draw) -> None:
        x = b.tensor(
            [2, 3, 4], fits=lambda a: 0 not in a.shape, shape=lambda: b.sizes(d.integer(2, 4), least=1)
        )
        if 0 in b.shape(x):
            raise Rejected("a mean of nothing")
        batch, classes, *rest = b.shape(x)
        labels = d.rng().integers(0, classes, (batch, *rest), dtype=d.choice([np.int64, np.int32]))
        ignored = d.choice([None, None, 0, -100])
        if ignored is not None and d.chance(50):
            labels.flat[0] = ignored
        if ignored is not None and (labels == ignored).all():
            raise Rejected("a mean of nothing")
        weights = [b.leaf([classes], 0.3, 1.0, wrt=False)] if d.chance(40) else []
        reduction = d.choice([None, "mean", "sum", "none"])
        outputs = 2 if op == "SoftmaxCrossEntropyLoss" and d.chance(30) else 1
        b.nodes(op, [x, b.data(labels), *weights], outputs, reduction=reduction, ignore_index=ignored)

    return drawer


def dequantize_linear(b: Builder, d: Draw) -> None:
    """A scale for all, per axis, or per block."""
    if b.graph.dtype is np.float64:
        raise Rejected("there is no float64 scale")
    shape = b.sizes(d.integer(1, 3))
    x = b.data(d.rng().integers(-12, 12, shape, dtype=np.int8))
    axis = d.integer(-len(shape), len(shape) - 1)
    kind = d.choice(["all", "axis", "blocks"])
    if kind == "blocks" and b.supports("DequantizeLinear", "block_size") and shape[axis]:
        size = d.integer(1, 2)
        scales = list(shape)
        scales[axis] = -(-shape[axis] // size)
        b.node("DequantizeLinear", [x, b.leaf(scales, 0.1, 0.5)], axis=axis, block_size=size)
        return
    scales = [] if kind == "all" else [shape[axis]]
    zero = [b.data(d.rng().integers(-3, 3, scales, dtype=np.int8))] if d.chance(40) else []
    b.node("DequantizeLinear", [x, b.leaf(scales, 0.1, 0.5), *zero], axis=axis)


DRAWERS: dict[str, Drawer] = {
    **elementwise.DRAWERS,
    **structure.DRAWERS,
    **images.DRAWERS,
    **sampling.DRAWERS,
    **signals.DRAWERS,
    **contrib.DRAWERS,
    **{op: _recurrent(op) for op in GATES},
    **{op: _loss(op) for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")},
    "Attention": attention,
    "DequantizeLinear": dequantize_linear,
    "RotaryEmbedding": rotary_embedding,
    **bodies.drawers(lambda b, d, most: add_nodes(b, d, most, AVAILABLE[b.graph.opset])),
}
"""By op, the function that adds a node of it to a graph."""


def available(opset: int) -> list[str]:
    """Returns the ops that can be drawn at an opset."""
    result = []
    for op in sorted(DRAWERS):
        if op in contrib.DRAWERS:
            result.append(op)
            continue
        try:
            deprecated = onnx.defs.get_schema(op, opset).deprecated
        except onnx.defs.SchemaError:
            continue
        if not deprecated:
            result.append(op)
    return result


AVAILABLE = {opset: available(opset) for opset in OPSETS}


def add_nodes(b: Builder, d: Draw, most: int, ops: Sequence[str]) -> None:
    """Adds up to this number of nodes of these ops."""
    for _ in range(most):
        restore = b.save()
        op = d.choice(ops)
        try:
            DRAWERS[op](b, d)
        except Rejected:
            restore()


def draw_graph(d: Draw, ops: Sequence[str] | None = None) -> Graph:
    """Returns a graph of one to five drawn nodes, of these ops if given.

    Raises:
        Rejected: none could be added.
    """
    opset = d.choice([*OPSETS, 26, 26, 25, 24, 24, 23, 21, 21])
    allowed = [op for op in AVAILABLE[opset] if ops is None or op in ops]
    if not allowed:
        raise Rejected(f"no such op at opset {opset}")
    shapes = d.choice(["static", "symbolic", "unranked"])
    graph = Graph(opset, d.choice([np.float32, np.float64]), shapes)
    b = Builder(d, graph, rank=d.choice([2, 3, 4, 1, 0]), empty=d.chance(15))
    add_nodes(b, d, d.integer(1, 5), allowed)
    if not graph.nodes:
        raise Rejected("no node")
    b.finish()
    return graph


def random_graph(seed: str, ops: Sequence[str] | None = None) -> Graph:
    """Returns the graph that belongs to a seed; it is the same on every machine."""
    numbers = random.Random(seed)
    while True:
        try:
            return draw_graph(Draw(numbers.randrange), ops)
        except Rejected:
            continue


@st.composite
def graphs(draw: Any, ops: Sequence[str] | None = None) -> Graph:
    """Strategy of graphs."""
    try:
        return draw_graph(Draw(lambda count: draw(_below(count))), ops)
    except Rejected:
        reject()


@functools.cache
def _below(count: int) -> st.SearchStrategy[int]:
    return st.sampled_from(range(count))
