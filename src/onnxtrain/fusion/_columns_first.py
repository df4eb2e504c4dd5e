"""Emits the standard ops of an elementwise program with the last axis of all values moved to the front.

ONNX Runtime broadcasts, slices and pads row by row, and starts a loop for each row. Where rows are short, e.g. the 11
B-splines of each number, starting the loops takes most of the time. With the last axis in front, a row is a number of
columns, and a Slice or a Pad of the columns copies whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.fusion._windows import Reduction, reduction_of, window_of
from onnxtrain.passes import Dims, dims_of

_SHORT_RUN = 64
"""ONNX Runtime broadcasts slowly along fewer numbers than this."""
_LONGEST_ROW = 32
"""Maximum numbers of a row that are moved."""
# Times of ONNX Runtime in ns: for each number of a Transpose, and for each row that an op starts a loop for.
_TRANSPOSE_OF_NUMBER = 0.3
_MUCH = 40.0
_BROADCAST_ROW, _SLICED_ROW, _PADDED_ROW, _REDUCED_ROW = 8.0, 3.0, 8.0, -3.0


class ColumnsFirst:
    """Emits the ops of a program one by one. Values have `rank` axes, with the last axis in front, or none.

    Args:
        op: emitter of the body.
        rank: number of axes of the program's values, e.g. 3.
    """

    def __init__(self, op: Emitter, rank: int) -> None:
        self._op, self._rank = op, rank
        # The ranks that values have in the model, by which their axes are numbered.
        self._ranks: dict[ir.Value, int] = {}

    def scalar(self, value: ir.Value) -> ir.Value:
        """Returns a value without axes, which has no layout."""
        self._ranks[value] = 0
        return value

    def moved(self, value: ir.Value, dims: Dims) -> ir.Value:
        """Returns an input of the program in this layout.

        Args:
            value: the input.
            dims: its sizes.
        """
        rank = len(dims)
        if rank == 0:
            return self.scalar(value)
        op, missing = self._op, self._rank - rank
        if dims[-1] == 1:
            # Not a Transpose, which ONNX Runtime would move behind all ops, to cancel the Transposes of the outputs.
            rest = op.Squeeze(value, self._integers([-1]))
            result = op.Unsqueeze(rest, self._integers(range(missing + 1)))
        else:
            whole = op.Unsqueeze(value, self._integers(range(missing))) if missing else value
            result = op.Transpose(whole, perm=[self._rank - 1, *range(self._rank - 1)])
        self._ranks[result] = rank
        return result

    def restored(self, value: ir.Value, reduction: Reduction | None) -> ir.Value:
        """Returns an output of the program in the model's layout.

        Args:
            value: the output in this layout.
            reduction: the reduction over last axes that has computed it.
        """
        op, rank = self._op, self._rank
        if reduction is None:
            return op.Transpose(value, perm=[*range(1, rank), 0])
        if reduction.keepdims:
            return op.Unsqueeze(op.Squeeze(value, self._integers([0])), self._integers([-1]))
        return op.Squeeze(value, self._integers([0, *range(rank - reduction.axes + 1, rank)]))

    def emit(
        self,
        op_type: str,
        attributes: dict[str, object],
        operands: Sequence[ir.Value | tuple[int, ...]],
    ) -> ir.Value:
        """Emits one op; returns its result.

        Args:
            op_type: a standard op.
            attributes: its attributes in the model.
            operands: its operands: values in this layout, and lists of integers as in the model.
        """
        values = [operand for operand in operands if isinstance(operand, ir.Value)]
        rank = max(self._ranks[value] for value in values)
        if op_type in _WRITERS:
            lists = [operand for operand in operands if isinstance(operand, tuple)]
            result = _WRITERS[op_type](self, op_type, values[0], lists)
        else:
            result = self._op.emit(op_type, *values, **attributes)
        self._ranks[result] = rank
        return result

    # A program with columns, whose axis is the last one, has no windows of other axes.
    def _slice(self, _: str, data: ir.Value, lists: Sequence[tuple[int, ...]]) -> ir.Value:
        starts, ends, *_rest = lists
        return self._op.Slice(data, *map(self._integers, (starts, ends, [0])))

    def _pad(self, _: str, data: ir.Value, lists: Sequence[tuple[int, ...]]) -> ir.Value:
        pads, rank = lists[0], self._ranks[data]
        axes = [axis % rank for axis in lists[1]] if len(lists) > 1 else list(range(rank))
        moved = [0] * (2 * self._rank)
        last = axes.index(rank - 1)
        moved[0], moved[self._rank] = pads[last], pads[last + len(axes)]
        return self._op.Pad(data, self._integers(moved))

    def _reduce(self, op_type: str, data: ir.Value, lists: Sequence[tuple[int, ...]]) -> ir.Value:
        rank = self._ranks[data]
        # The last axis is the first one here, and the others follow it.
        places = sorted((axis + 1) % rank for axis in lists[0])
        return self._op.emit(op_type, data, self._integers(places), keepdims=1)

    def _integers(self, numbers: Sequence[int]) -> ir.Value:
        return self._op.const(np.array(numbers, np.int64))


_Writer = Callable[[ColumnsFirst, str, ir.Value, Sequence[tuple[int, ...]]], ir.Value]
_WRITERS: dict[str, _Writer] = {
    "Slice": ColumnsFirst._slice,
    "Pad": ColumnsFirst._pad,
    "ReduceSum": ColumnsFirst._reduce,
    "ReduceMean": ColumnsFirst._reduce,
}


def is_faster_columns_first(
    dims: Dims, nodes: Sequence[ir.Node], inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> bool:
    """True if ONNX Runtime computes a program faster with the last axis in front, in spite of the Transposes.

    Args:
        dims: the sizes of the program's values.
        nodes: its nodes.
        inputs: the values that it reads.
        outputs: the values that it returns.
    """
    size = dims[-1] if len(dims) > 1 else None
    if not isinstance(size, int) or not 1 < size <= _LONGEST_ROW:
        return False
    transposed = sum(_has_rows(value, dims) for value in (*inputs, *outputs))
    return sum(map(_saved, nodes)) > transposed * _TRANSPOSE_OF_NUMBER * size


def may_have_short_rows(graph: ir.Graph) -> bool:
    """True if a graph may have a program that is faster with the last axis in front: it slices or pads a short axis.

    Sizes that are not yet inferred count as short.
    """
    return any(
        node.op_type in ("Slice", "Pad") and node.domain == "" and _may_be_short(node.inputs[0])
        for node in graph
    )


def has_many_short_rows(nodes: Iterable[ir.Node]) -> bool:
    """True if nodes take much longer than one program of them would with the last axis in front."""
    return sum(map(_saved, nodes)) >= _MUCH


def _may_be_short(value: ir.Value | None) -> bool:
    dims = dims_of(value) if value is not None else None
    if dims is None:
        return value is not None and value.dtype == ir.DataType.FLOAT
    return len(dims) > 1 and isinstance(dims[-1], int) and 1 < dims[-1] <= _LONGEST_ROW


def _has_rows(value: ir.Value, dims: Dims) -> bool:
    """True if a value has a row for each row of a program with the sizes `dims`, of more than one number."""
    own = dims_of(value) or ()
    return len(own) == len(dims) and own[:-1] == dims[:-1] and own[-1] != 1


def _saved(node: ir.Node) -> float:
    """Returns the time per row that a node takes longer with the last axis at the end, in ns."""
    window, reduction = window_of(node), reduction_of(node)
    if window is not None:
        if window.size > _LONGEST_ROW:
            return 0
        return (_SLICED_ROW, _PADDED_ROW)[window.bounded] if window.axis == 1 else 0
    if reduction is not None:
        # Sums over other axes can be long: their order, which the layout would change, is part of their accuracy.
        rank = len(dims_of(node.inputs[0]) or ()) if node.inputs[0] is not None else 0
        return _REDUCED_ROW if 0 < reduction.axes < rank else -math.inf
    dims = dims_of(node.outputs[0])
    if not dims or not isinstance(dims[-1], int) or dims[-1] > _LONGEST_ROW:
        return 0
    shapes = [(dims_of(value) if value is not None else None) or () for value in node.inputs]
    moved = [(own[-1], *[1] * (len(dims) - len(own)), *own[:-1]) if own else () for own in shapes]
    short, still = runs_are_short(dims, shapes), runs_are_short((dims[-1], *dims[:-1]), moved)
    return _BROADCAST_ROW * (short - still)


def runs_are_short(dims: Dims, shapes: Sequence[Dims]) -> bool:
    """True if an input broadcasts in short runs, for each of which ONNX Runtime starts a loop.

    Args:
        dims: the sizes of the result of an elementwise op.
        shapes: the sizes of its inputs.
    """
    for own in shapes:
        run, kinds = 1, set()
        for place in range(1, len(dims) + 1):
            size = dims[-place]
            kinds.add(place <= len(own) and own[-place] == size)
            if size == 1:
                kinds.discard(True)
                continue
            if len(kinds) > 1 and run < _SHORT_RUN:
                return True
            if not isinstance(size, int):
                break
            run *= size
    return False
