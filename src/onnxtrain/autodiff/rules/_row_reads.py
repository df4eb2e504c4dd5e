"""Finds rows that the iterations of a loop read from outer tensors, and scatters their cotangents after the loop.

If every iteration reads a different row, accumulating a cotangent of the whole tensor in each iteration takes
quadratic time. Instead, each iteration emits the cotangents of its rows as scan outputs, which are scattered once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.rules._scatter import add_rows, scatter_nd
from onnxtrain.emitter import Emitter, known_array, static_dims

_MOST_OF_UNKNOWN = 8
"""Maximum number of rows per iteration to stack if the total number of rows is unknown."""

_WRAPPERS = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True)
class RowRead:
    """A node of a loop body that reads a fixed number of rows of an outer tensor.

    Attributes:
        node: Gather, GatherND, or Slice along one axis.
        source: the outer tensor.
        axis: axis along which rows are read; 0 for GatherND.
        count: number of rows, or of slices for GatherND, read per iteration. A Slice that extends past an end of the
            tensor reads fewer.
        depth: number of leading axes of `source` that an index selects from; may exceed 1 only for GatherND.
    """

    node: ir.Node
    source: ir.Value
    axis: int
    count: int
    depth: int = 1

    @property
    def output(self) -> ir.Value:
        """The node's output, which contains the rows."""
        return self.node.outputs[0]

    def stack(self, op: Emitter, ct: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the scan outputs of one iteration: row indices, int64 [count, ...], and cotangents [count, ...]."""
        if self.node.op_type == "Slice":
            return self._stack_of_slice(op, ct)
        indices = op.Cast(self.node.inputs[1], to=ir.DataType.INT64)
        if self.node.op_type == "GatherND":
            dims = _dims(self.source)[self.depth :]
            return (
                _shaped(op.Reshape(indices, [self.count, self.depth]), [self.count, self.depth]),
                _rows(op, ct, self.count, op.shape_of(self.source), range(self.depth, self._rank), dims),
            )
        indices = _shaped(op.Reshape(indices, [self.count]), [self.count])
        read = self.node.inputs[1]
        assert read is not None
        assert read.shape is not None
        return indices, self._to_front(op, ct, len(read.shape))

    def scatter(self, op: Emitter, indices: ir.Value, rows: ir.Value, trips: ir.Value) -> ir.Value:
        """Returns the cotangent of the source, given the stacked scan outputs of all iterations.

        Args:
            op: emitter of the graph that contains the loop.
            indices: int64 [trips, count], or [trips, count, depth] for GatherND.
            rows: [trips, count, *sizes of the other axes].
            trips: number of iterations, int64 [].
        """
        total = op.Mul(op.Unsqueeze(trips, [0]), [self.count])
        sizes = op.shape_of(self.source)
        others = list(range(self.depth, self._rank))
        if self.node.op_type != "GatherND":
            others = [axis for axis in range(self._rank) if axis != self.axis]
        # Without iterations, ONNX Runtime doesn't know the sizes of a stack.
        behind = [op.Gather(sizes, others)] if others else []
        rows = op.Reshape(rows, op.Concat(total, *behind, axis=0), allowzero=1)
        rows = _shaped(rows, [None, *(_dims(self.source)[axis] for axis in others)])
        if self.node.op_type == "GatherND":
            indices = op.Reshape(indices, op.Concat(total, [self.depth], axis=0), allowzero=1)
            return scatter_nd(op, sizes, indices, rows)
        indices = _shaped(op.Reshape(indices, total, allowzero=1), [None])
        if self.node.op_type != "Slice":
            return add_rows(op, self.source, self.axis, indices, rows)
        # Rows past the end of the tensor were not read.
        beyond = op.ScatterElements(np.zeros(self._rank, np.int64), [self.axis], [1], axis=0)
        longer = add_rows(op, self.source, self.axis, indices, rows, op.Add(sizes, beyond))
        return op.Slice(longer, [0], [-1], [self.axis])

    @property
    def _rank(self) -> int:
        return len(_dims(self.source))

    def _to_front(self, op: Emitter, ct: ir.Value, width: int) -> ir.Value:
        """Reshapes the cotangent of a Gather's or Slice's output to one row per index, [rows, ...].

        The output has the index axes in place of :attr:`axis`. They are moved to the front and flattened into one axis.

        Args:
            op: emitter of the loop's body.
            ct: cotangent of :attr:`output`.
            width: number of index axes: the rank of a Gather's indices, 1 for a Slice. For a scalar index (0), an axis
                of size 1 is inserted.
        """
        kept = [axis for axis in range(self._rank) if axis != self.axis]
        dims = [_dims(self.source)[axis] for axis in kept]
        if not width:
            return _shaped(op.Unsqueeze(ct, [0]), [1, *dims])
        rank = self._rank - 1 + width
        places = list(range(self.axis, self.axis + width))
        others = [axis for axis in range(rank) if axis not in places]
        if self.axis:
            ct = op.Transpose(ct, perm=[*places, *others])
        if width == 1:
            return _shaped(op.Identity(ct), [None if self.node.op_type == "Slice" else self.count, *dims])
        return _rows(op, ct, self.count, op.shape_of(self.source), kept, dims)

    def _stack_of_slice(self, op: Emitter, ct: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the scan outputs of a Slice, padded to :attr:`count` rows.

        A Slice that crosses an end of the tensor reads fewer rows. The padding consists of zero cotangents whose index
        is the size of the axis, i.e. one past the last row. :meth:`scatter` appends a row for them and then removes it.
        """
        start, end = op.Reshape(self.node.inputs[1], [1]), op.dim(self.source, self.axis)
        start = op.Cast(start, to=ir.DataType.INT64)
        start = op.Where(op.Less(start, 0), op.Add(start, end), start)
        start = op.Max(start, [0])
        rows = self._to_front(op, ct, 1)
        length = op.Shape(rows, start=0, end=1)
        places = op.const(np.arange(self.count))
        indices = op.Where(op.Less(places, length), op.Add(start, places), end)
        pads = op.Concat([0], op.Sub([self.count], length), axis=0)
        padded = op.pad(rows, pads, [0], self._rank)
        dims = _dims(self.source)
        return (
            _shaped(indices, [self.count]),
            _shaped(padded, [self.count, *dims[: self.axis], *dims[self.axis + 1 :]]),
        )


def row_reads(op: Emitter, nodes: Iterable[ir.Node], sources: Collection[ir.Value]) -> list[RowRead]:
    """Returns a RowRead for each node of a loop body that reads rows of outer tensors at computed positions.

    Skips nodes that read more than a small part of a tensor (see `_is_small`): stacking the rows would need too much
    memory for the time that it saves.

    Args:
        op: emitter of the loop's body.
        nodes: the nodes of the body.
        sources: the outer tensors.
    """
    reads = (_read(op, node) for node in nodes if node.inputs and node.inputs[0] in sources)
    return [read for read in reads if read is not None]


def _read(op: Emitter, node: ir.Node) -> RowRead | None:
    source = node.inputs[0]
    if node.domain or source is None or source.shape is None or len(node.inputs) < 2:
        return None
    index, rank = node.inputs[1], len(source.shape)
    # Indices that are not computed in the loop body are the same in all iterations.
    if index is None or known_array(index) is not None or index.graph is not op.graph:
        return None
    if node.op_type == "Slice":
        read = _slice(node, source)
    elif node.op_type == "Gather":
        count = _count(index)
        axis = node.attributes.get_int("axis", 0) % rank if rank else 0
        read = None if count is None else RowRead(node, source, axis, count)
    elif node.op_type == "GatherND" and not node.attributes.get_int("batch_dims", 0):
        dims = static_dims(index)
        if not dims or None in dims:
            return None
        *outer, depth = (int(size) for size in dims if size is not None)
        read = RowRead(node, source, 0, math.prod(outer), depth)
    else:
        return None
    return read if read is not None and _is_small(read) else None


def _is_small(read: RowRead) -> bool:
    """True if a node reads only a small part of the source.

    A small part is one row, at most a quarter of the rows, or at most `_MOST_OF_UNKNOWN` rows of a source with an
    unknown number of rows.
    """
    sizes = (static_dims(read.source) or ())[read.axis : read.axis + read.depth]
    if read.count == 1:
        return True
    if None in sizes:
        return read.count <= _MOST_OF_UNKNOWN
    return 4 * read.count <= math.prod(size for size in sizes if size is not None)


def _count(indices: ir.Value) -> int | None:
    dims = static_dims(indices)
    if dims is None or None in dims:
        return None
    return math.prod(size for size in dims if size is not None)


def _slice(node: ir.Node, source: ir.Value) -> RowRead | None:
    """Returns the RowRead of a Slice `[start : start + count]` along one axis; None unless `count` is constant."""
    start, end, axes, steps = ([*node.inputs[1:], None, None])[:4]
    if end is None or start is None or _count(start) != 1 or source.shape is None:
        return None
    axis = np.zeros(1, np.int64) if axes is None else known_array(axes)
    step = np.ones(1, np.int64) if steps is None else known_array(steps)
    if axis is None or step is None or step.tolist() != [1]:
        return None
    (base, before), (other, after) = _offset(start), _offset(end)
    if base is not other or after <= before:
        return None
    return RowRead(node, source, int(axis[0]) % len(source.shape), after - before)


def _offset(value: ir.Value) -> tuple[ir.Value, int]:
    """Splits a value with one element, e.g. the start or end of a Slice, into `base + constant`.

    If the start and the end have the same base, the difference of their constants is the length of the slice.

    Returns:
        The base, whose rank or dtype may differ from the value's, and the constant.
    """
    total = 0
    while True:
        producer = value.producer()
        if producer is None or producer.domain:
            return value, total
        first = producer.inputs[0] if producer.inputs else None
        if producer.op_type in _WRAPPERS and first is not None:
            value = first
            continue
        if producer.op_type not in ("Add", "Sub") or len(producer.inputs) != 2:
            return value, total
        arrays = [known_array(operand) for operand in producer.inputs]
        sign = -1 if producer.op_type == "Sub" else 1
        if arrays[1] is not None and arrays[1].size == 1 and first is not None:
            value, total = first, total + sign * int(arrays[1].item())
        elif arrays[0] is not None and arrays[0].size == 1 and sign == 1 and producer.inputs[1] is not None:
            value, total = producer.inputs[1], total + int(arrays[0].item())
        else:
            return value, total


def _rows(
    op: Emitter, ct: ir.Value, count: int, sizes: ir.Value, axes: Iterable[int], dims: Sequence[object]
) -> ir.Value:
    """Reshapes a cotangent to `[count, *sizes of some axes of the source]`.

    Args:
        op: emitter.
        ct: the cotangent.
        count: number of rows.
        sizes: shape of the source, int64 [rank].
        axes: the axes of the source to keep.
        dims: static or symbolic sizes of these axes, for shape inference.
    """
    behind = [op.Gather(sizes, list(axes))] if dims else []
    return _shaped(op.Reshape(ct, op.Concat([count], *behind, axis=0), allowzero=1), [count, *dims])


def _shaped(value: ir.Value, dims: Sequence[object]) -> ir.Value:
    value.shape = ir.Shape(dims)  # type: ignore[arg-type]
    return value


def _dims(value: ir.Value) -> list[object]:
    assert value.shape is not None
    return list(value.shape)
