"""Computes index tensors before they are expanded."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.shapes.dims import Dims, dims_of
from onnxtrain.passes.tidy.constants import add_constant, known_array
from onnxtrain.passes.tidy.replace_value import successor

_OPS = frozenset(
    {
        "Add", "And", "BitwiseAnd", "Cast", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min",
        "Mod", "Mul", "Neg", "Not", "Or", "Sub", "Where",
    }
)  # fmt: skip
_DTYPES = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


class LateExpandPass(ir.passes.InPlacePass):
    """Moves integer elementwise ops before the Expand of their inputs: Mod(Expand(x), n) becomes Expand(Mod(x, n)).

    Index tensors for `gather` and `scatter` are often one index per row, expanded to all elements. Checks of the
    indices then take as long as the gather. Passes that look for such indices see the Expand only if it comes last.

    A Tile of integers along axes of size 1 becomes an Expand, and an Expand to the shape that its input has is removed.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; the caller removes Expands that are no longer read."""
        modified = False
        for node in tuple(model.graph):
            if node.domain == "" and node.op_type == "Expand":
                modified |= _remove_if_same(node)
            elif node.domain == "" and node.op_type == "Tile":
                modified |= _expand_instead(model.graph, node)
            elif node.domain == "" and node.op_type in _OPS:
                modified |= _expand_afterwards(node)
        return ir.passes.PassResult(model, modified)


def expand_source(value: ir.Value) -> ir.Value | None:
    """Returns the input of the Expand that computes a value; None if another node does, or its sizes are unknown."""
    node = value.producer()
    if node is None or (node.op_type, node.domain) != ("Expand", "") or node.inputs[0] is None:
        return None
    return node.inputs[0] if dims_of(node.inputs[0]) is not None else None


def _expand_afterwards(node: ir.Node) -> bool:
    """Moves a node before the Expands of its inputs, and expands its result instead. Returns True if it was moved."""
    inputs = [value for value in node.inputs if value is not None]
    sources = [expand_source(value) for value in inputs]
    result = node.outputs[0]
    if not any(sources) or result.is_graph_output() or result.dtype not in _DTYPES:
        return False
    full = _broadcast([dims_of(value) for value in inputs])
    narrow = _broadcast([dims_of(s or value) for s, value in zip(sources, inputs, strict=True)])
    shapes = [
        v.producer() for v, s in zip(inputs, sources, strict=True) if s is not None and dims_of(v) == full
    ]
    if full is None or narrow is None or narrow == full or not shapes or shapes[0] is None:
        return False
    for index, source in enumerate(sources):
        if source is not None:
            node.replace_input_with(index, source)
    expanded = successor(result)
    expanded.shape = ir.Shape(full)
    result.name, result.shape = f"{expanded.name}/narrow", ir.Shape(narrow)
    node.append(ir.node("Expand", [result, shapes[0].inputs[1]], outputs=[expanded]))
    return True


def _remove_if_same(expand: ir.Node) -> bool:
    """Makes the readers of an Expand read its input, if both have the same shape. Returns True if they do."""
    source, result = expand.inputs[0], expand.outputs[0]
    if source is None or result.is_graph_output() or not result.uses():
        return False
    dims = dims_of(source)
    if dims is None or dims != dims_of(result):
        return False
    result.replace_all_uses_with(source)
    return True


def _expand_instead(graph: ir.Graph, tile: ir.Node) -> bool:
    """Replaces a Tile of integers that only repeats axes of size 1. Returns True if it was replaced."""
    source, repeats = tile.inputs[0], known_array(tile.inputs[1])
    dims = None if source is None else dims_of(source)
    if repeats is None or dims is None or tile.outputs[0].dtype not in _DTYPES:
        return False
    if any(count != 1 and dim != 1 for count, dim in zip(repeats.tolist(), dims, strict=True)):
        return False
    # An Expand to a size of 1 keeps the size of its input.
    name = f"{tile.outputs[0].name}/shape"
    if name in graph.initializers:
        return False
    tile.op_type = "Expand"
    tile.replace_input_with(1, add_constant(graph, ir.tensor(repeats, name=name)))
    return True


def _broadcast(shapes: list[Dims | None]) -> Dims | None:
    """Returns the sizes to which shapes broadcast; None if one is unknown, or symbolic sizes may be 1."""
    rank = max((len(dims) for dims in shapes if dims is not None), default=0)
    if None in shapes:
        return None
    padded = [(1,) * (rank - len(dims)) + dims for dims in shapes if dims is not None]
    columns = [{dim for dim in column if dim != 1} for column in zip(*padded, strict=True)]
    return None if any(len(column) > 1 for column in columns) else tuple(next(iter(c), 1) for c in columns)
