"""Rewrites sums as functions that have native kernels, which add in float64."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import column_sum, running_sum
from onnxtrain.fusion._pass import KeepingPass, become
from onnxtrain.passes import is_long_sum, known_array, read_once, remove_unread_chains

_LEAST_COLUMNS, _LEAST_ROWS = 8, 16
"""Of fewer columns or rows, ONNX Runtime's sums are as fast."""


class DoubleSumPass(KeepingPass):
    """Replaces float32 sums with functions that have native kernels.

    Running sums that `LongSumsPass` computes in float64 become `RunningSum`. Sums over the first axes, e.g. the
    gradients of biases, become `ColumnSum`: those that `LongSumsPass` has divided into blocks, and shorter ones of
    known sizes.

    On a stock runtime, the Casts of a running sum take twice as long as the CumSum, and the four or five small ops of a
    column sum longer than reading the numbers. ONNX Runtime adds rows that are not adjacent one number at a time.

    Run this pass after `LongSumsPass`. A running sum is left unchanged if its axis is computed, and a column sum if the
    sizes of the columns are unknown. All sums are if another node reads one of their float64 values.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        op, modified = Emitter(model.graph, functions=model.functions), False
        for node in tuple(model.graph):
            if self.keeps(node):
                continue
            if _rewrite_short_sum(op, node):
                modified = True
                continue
            if not _is_cast(node, ir.DataType.FLOAT):
                continue
            replaced = _rewrite_running_sum(op, node) or _rewrite_column_sum(op, node)
            if replaced is not None:
                remove_unread_chains(op.graph, [replaced])
                modified = True
        return ir.passes.PassResult(model, modified)


def _rewrite_running_sum(op: Emitter, last: ir.Node) -> ir.Node | None:
    """Turns the last Cast of a running sum into a call; returns the CumSum, or None if there is none."""
    node = _sole_producer(last, "CumSum")
    x = None if node is None else _source_of_wide(node)
    if node is None or x is None:
        return None
    axis = known_array(node.inputs[1])
    if axis is None:
        return None
    flags = {name: node.attributes.get_int(name, 0) for name in ("exclusive", "reverse")}
    become(op, last, running_sum, {"axis": int(axis.item()), **flags})
    last.replace_input_with(0, x)
    return node


def _rewrite_column_sum(op: Emitter, last: ir.Node) -> ir.Node | None:
    """Turns the last Cast of a column sum into a call; returns the sum in float64, or None if there is none.

    The sum has two levels: over the rows of each block, and over the blocks.
    """
    total = _sole_producer(last, "ReduceSum")
    sums = None if total is None else _source_of_wide(total)
    block = None if sums is None else sums.producer()
    if total is None or block is None or (block.op_type, block.domain) != ("ReduceSum", ""):
        return None
    x = block.inputs[0]
    if x is None or not read_once(block.outputs[0]) or not (_reduces(block, 1) and _reduces(total, 0)):
        return None
    cut = _sole_producer(block, "Reshape")
    rows = x if cut is None else cut.inputs[0]
    columns = _columns(rows, None if cut is None else cut.inputs[1], last.outputs[0])
    if rows is None or columns is None:
        return None
    if cut is None:
        with op.placing(before=last):
            shape = op.const([0, 0, *columns])
    else:
        assert cut.inputs[1] is not None
        shape = cut.inputs[1]
    allowzero = 0 if cut is None else cut.attributes.get_int("allowzero", 0)
    become(op, last, column_sum, {"columns": len(columns), "allowzero": allowzero})
    last.resize_inputs(2)
    last.replace_input_with(0, rows)
    last.replace_input_with(1, shape)
    return total


def _rewrite_short_sum(op: Emitter, node: ir.Node) -> bool:
    """Turns a sum over the first axes of a value of known sizes into a call; False if the node is no such sum."""
    x = node.inputs[0] if (node.op_type, node.domain) == ("ReduceSum", "") else None
    if x is None or x.dtype != ir.DataType.FLOAT or node.attributes.get_int("keepdims", 1) == 1:
        return False
    axes = known_array(node.inputs[1]) if len(node.inputs) > 1 else None
    sizes = tuple(size for size in static_dims(x) or () if size is not None)
    if axes is None or x.shape is None or len(sizes) != x.shape.rank():
        return False
    reduced = sorted(axis % len(sizes) for axis in axes.tolist())
    columns = sizes[len(reduced) :]
    rows = math.prod(sizes[: len(reduced)])
    if reduced != list(range(len(reduced))) or rows < _LEAST_ROWS or math.prod(columns) < _LEAST_COLUMNS:
        return False
    with op.placing(before=node):
        shape = op.const([1, rows, *columns])
    become(op, node, column_sum, {"columns": len(columns), "allowzero": 0})
    node.replace_input_with(1, shape)
    return True


def _columns(rows: ir.Value | None, blocks: ir.Value | None, result: ir.Value) -> tuple[int, ...] | None:
    """Returns the sizes of the axes of the columns; None if they are unknown, or not the last ones of the rows.

    Args:
        rows: the summed value.
        blocks: the shape of its blocks: their number, their rows, and the sizes of the columns; None if the value has
            this shape.
        result: the sums.
    """
    dims = None if rows is None else static_dims(rows)
    known = None if blocks is None else known_array(blocks)
    columns = static_dims(result) if known is None else tuple(known.tolist()[2:])
    if dims is None or columns is None or not 0 < len(columns) < len(dims):
        return None
    if blocks is None and len(dims) != len(columns) + 2:
        return None
    sizes = tuple(size for size in columns if size is not None)
    if sizes != dims[-len(columns) :] or math.prod(sizes) < _LEAST_COLUMNS:
        return None
    return sizes


def _reduces(node: ir.Node, axis: int) -> bool:
    """True if a reduction is over one axis, which is removed."""
    axes = known_array(node.inputs[1]) if len(node.inputs) > 1 else None
    return axes is not None and axes.tolist() == [axis] and not node.attributes.get_int("keepdims", 1)


def _source_of_wide(node: ir.Node) -> ir.Value | None:
    """Returns the float32 value whose Cast to float64 `LongSumsPass` has written for a sum; None if there is none."""
    cast = _sole_producer(node, "Cast")
    if cast is None or not is_long_sum(cast) or not _is_cast(cast, ir.DataType.DOUBLE):
        return None
    x = cast.inputs[0]
    return x if x is not None and x.dtype in (ir.DataType.FLOAT, None) else None


def _is_cast(node: ir.Node, dtype: ir.DataType) -> bool:
    return (node.op_type, node.domain) == ("Cast", "") and node.attributes.get_int("to", 0) == dtype


def _sole_producer(reader: ir.Node, op_type: str) -> ir.Node | None:
    """Returns the `op_type` node that computes the first input of `reader`, if no other node reads this value."""
    value = reader.inputs[0]
    source = None if value is None else value.producer()
    if value is None or source is None or (source.op_type, source.domain) != (op_type, ""):
        return None
    # Subgraphs are not rewritten.
    return source if read_once(value) and source.graph is reader.graph else None
