"""Keeps ONNX Runtime from adding two updates to one element on two threads at the same time."""

from __future__ import annotations

import itertools
import math

import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import WriterBefore, replace_node
from onnxtrain.passes.tidy.unique_names import name_apart, values_of

MOST_ELEMENTS = 200_000
"""ONNX Runtime (1.20 to 1.32) runs a ScatterND on one thread if its updates have fewer than 210,000 elements."""

_BLOCK_KEY = "onnxtrain.scatter_block"
"""Metadata key of a ScatterND that :class:`RacingScatterPass` has written."""


class RacingScatterPass(ir.passes.InPlacePass):
    """Splits a ScatterND that reduces, so that each part has few updates and runs on one thread.

    ONNX Runtime (1.20 to 1.32) divides the updates of a ScatterND between threads. If two threads read an element, add
    an update each, and write the element back, one of the two updates is lost.

    The node becomes an If. For few updates, the If runs the same ScatterND; for many, a Loop over blocks of updates. A
    node is not modified if its updates have a static shape with at most `MOST_ELEMENTS` elements.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place, including subgraphs and functions."""
        graphs = (model.graph, *(function.graph for function in model.functions.values()))
        nodes = [n for graph in graphs for n in ir.traversal.RecursiveGraphIterator(graph) if _may_race(n)]
        for node in nodes:
            _split(node)
        # onnx_ir numbers new values separately in each subgraph.
        if nodes:
            name_apart(model)
        return ir.passes.PassResult(model, bool(nodes))


def _may_race(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != ("", "ScatterND") or _BLOCK_KEY in node.metadata_props:
        return False
    updates = node.inputs[2]
    if node.attributes.get_string("reduction", "none") == "none" or updates is None:
        return False
    sizes = [None] if updates.shape is None else list(updates.shape)
    numbers = [size for size in sizes if isinstance(size, int)]
    return len(numbers) < len(sizes) or math.prod(numbers) > MOST_ELEMENTS


def _split(node: ir.Node) -> None:
    data, indices, updates = node.inputs
    assert data is not None
    assert indices is not None
    assert updates is not None
    scatter = _scatter(node, data, indices, updates)
    once = _graph([], [scatter], scatter.outputs[0])
    _expand_inside(scatter)
    blocks = _blocks(node, data, indices, updates)
    write = WriterBefore(node)
    few = write("LessOrEqual", write("Size", updates), MOST_ELEMENTS)
    result = write("If", few, then_branch=once, else_branch=blocks)
    output = node.outputs[0]
    base = output.name
    replace_node(node, result)
    # Names in a subgraph must differ from those of the graphs around it.
    numbers = itertools.count()
    for graph in (once, blocks, *blocks.subgraphs()):
        for value in values_of(graph):
            value.name = f"{base}/block{next(numbers)}"


def _scatter(node: ir.Node, data: ir.Value, indices: ir.Value, updates: ir.Value) -> ir.Node:
    """Returns a copy of a ScatterND with other inputs."""
    copy = ir.node("ScatterND", [data, indices, updates], dict(node.attributes))
    copy.metadata_props[_BLOCK_KEY] = "true"
    copy.outputs[0].type, copy.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    return copy


def _expand_inside(node: ir.Node) -> None:
    """Copies the Expand that a node of a branch reads into the branch: ONNX Runtime copies a table from outside."""
    data = node.inputs[0]
    producer = None if data is None else data.producer()
    if producer is None or (producer.domain, producer.op_type) != ("", "Expand"):
        return
    table = ir.node("Expand", producer.inputs)
    table.outputs[0].type, table.outputs[0].shape = producer.outputs[0].type, producer.outputs[0].shape
    node.prepend(table)
    node.replace_input_with(0, table.outputs[0])


def _blocks(node: ir.Node, data: ir.Value, indices: ir.Value, updates: ir.Value) -> ir.Graph:
    """Returns the branch for many updates: a Loop over blocks of rows, where each row has one index."""
    block, going = (ir.Value(type=ir.TensorType(t)) for t in (ir.DataType.INT64, ir.DataType.BOOL))
    block.shape = going.shape = ir.Shape([])
    table = ir.Value(type=data.type, shape=data.shape)
    loop = ir.node("Loop", [None, None, data])
    branch = _graph([], [loop], loop.outputs[0])
    write = WriterBefore(loop)
    leading = write("Shape", indices, end=-1)
    count = write("ReduceProd", leading, keepdims=1)
    rest = write("Slice", write("Shape", updates), write("Shape", leading), [2**31 - 1])
    places = write(
        "Reshape", indices, write("Concat", count, write("Shape", indices, start=-1), axis=0), allowzero=1
    )
    rows = write("Reshape", updates, write("Concat", count, rest, axis=0), allowzero=1)
    # A row may have more elements than a block. A ScatterND of one row runs on one thread. ONNX Runtime folds the
    # division, even in a branch that never runs, so the divisor of rows without elements must not be 0.
    width = write("Max", write("ReduceProd", rest, keepdims=1), [1])
    length = write("Max", write("Div", [MOST_ELEMENTS], width), [1])
    trips = write("Div", write("Sub", write("Add", count, length), [1]), length)
    loop.replace_input_with(0, write("Squeeze", trips))

    scatter = _scatter(node, table, indices, updates)
    go_on = ir.node("Identity", [going])
    body = _graph([block, going, table], [go_on, scatter], go_on.outputs[0], scatter.outputs[0])
    write = WriterBefore(scatter)
    start = write("Mul", block, length)
    end = write("Add", start, length)
    scatter.replace_input_with(1, write("Slice", places, start, end, [0]))
    scatter.replace_input_with(2, write("Slice", rows, start, end, [0]))
    loop.attributes.add(ir.AttrGraph("body", body))
    loop.outputs[0].type, loop.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    return branch


def _graph(inputs: list[ir.Value], nodes: list[ir.Node], *outputs: ir.Value) -> ir.Graph:
    return ir.Graph(inputs, outputs, nodes=nodes, name="scatter")
