"""Rewrites gathers and scatters with one index per row as ops on rows.

PyTorch's `gather`, `scatter_reduce` and `take_along_dim` take an index for each element. Graph nets and pooling expand
one index per row to that shape. ONNX Runtime's GatherElements and ScatterElements then read as many indices as
elements, which takes ten to fifty times as long as copying or adding whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import REDUCTIONS, CompositeOp, gather_rows, scatter_rows
from onnxtrain.fusion._pass import KeepingPass, set_inputs, sole_transpose, take_over
from onnxtrain.passes import (
    LateExpandPass,
    dims_of,
    expand_source,
    known_array,
    permutation,
    remove_unread_chains,
)

_SHORT_ROW = 256
"""Rows up to this length are gathered by the native kernel. ONNX Runtime copies longer rows as fast."""

_FEW_NUMBERS = 4096
"""Up to this many numbers are gathered by ONNX Runtime, as any op takes longer to start."""

ROW_OPS = frozenset({"GatherElements", "GatherND", "ScatterElements", "ScatterND"})
"""Ops that `RowsPass` replaces even where no native kernels are installed."""


class RowsPass(KeepingPass):
    """Replaces GatherElements, ScatterElements, GatherND and ScatterND that have one index per row.

    Rows are read by Gather, or by the function `GatherRows`, and written by the function `ScatterRows`. Both functions
    have native kernels for float32. An Expand of the indices remains only if another node reads it. A GatherND or
    ScatterND between Transposes becomes an op along the axis that they move to the front.

    The pass needs inferred shapes, with a name for each symbolic size. Run it last: the functions have no gradient
    rules. `kept` does not apply to gathers, which are exact.
    """

    def __init__(self, kept: Collection[str] = (), *, gathers: bool = True) -> None:
        """Creates the pass.

        Args:
            kept: names of the first outputs of scatters that must not be rewritten.
            gathers: True to replace Gather by `GatherRows` where the native kernel is faster.
        """
        super().__init__(kept)
        self._gathers = gathers

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        modified = LateExpandPass()(model).modified
        rewriter = _Rewriter(Emitter(model.graph, functions=model.functions), self._gathers)
        rewrites = {
            "Gather": rewriter.gather,
            "GatherND": rewriter.gather_nd,
            "GatherElements": rewriter.gather_elements,
            "ScatterND": rewriter.scatter_nd,
            "ScatterElements": rewriter.scatter_elements,
        }
        for node in tuple(model.graph):
            rewrite = rewrites.get(node.op_type) if node.domain == "" and node.graph is model.graph else None
            if rewrite is None or (node.op_type.startswith("Scatter") and self.keeps(node)):
                continue
            modified |= rewrite(node)
        remove_unread_chains(model.graph, tuple(model.graph))
        return ir.passes.PassResult(model, modified)


class _Rewriter:
    """Rewrites nodes of a graph. Each method returns True if it has rewritten the node."""

    def __init__(self, op: Emitter, gathers: bool) -> None:
        self._op, self._gathers = op, gathers

    def gather(self, node: ir.Node) -> bool:
        data, indices = node.inputs
        if data is None or indices is None or not self._gathers:
            return False
        dims, count = static_dims(data), _count(static_dims(node.outputs[0]) or (None,))
        axis = _axis(node, 0, data)
        if dims is None or axis is None or not indices.shape or (count is not None and count <= _FEW_NUMBERS):
            return False
        width = _count(dims[axis + 1 :])
        if data.dtype != ir.DataType.FLOAT or width is None or width > _SHORT_ROW:
            return False
        return self._become(node, gather_rows(axis, 0), [data, self._as_int64(node, indices)], axis, 0)

    def gather_nd(self, node: ir.Node) -> bool:
        data, places = node.inputs
        if data is None or places is None or node.attributes.get_int("batch_dims", 0) != 0:
            return False
        if not data.shape or not places.shape or len(places.shape) < 2 or places.shape[-1] != 1:
            return False
        rows, axis = self._column(node, places), 0
        moved, last, source = _transposed_gather(node, data, len(places.shape) - 1)
        if source is not None:
            take_over(node.outputs[0], last)
            data, axis = source, moved
        self._become_gather(node, data, rows, axis)
        return True

    def gather_elements(self, node: ir.Node) -> bool:
        data, indices = node.inputs
        if data is None or indices is None:
            return False
        found = self._row_indices(node, data, indices, _axis(node, 0, data))
        if found is None:
            return False
        rows, axis, batch_dims = found
        if not batch_dims:
            self._become_gather(node, data, rows, axis)
            return True
        # Other dtypes have no composite ops.
        if data.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            return False
        return self._become(node, gather_rows(axis, batch_dims), [data, rows], axis, batch_dims)

    def scatter_elements(self, node: ir.Node) -> bool:
        data, indices, updates = node.inputs
        reduction = node.attributes.get_string("reduction", "none")
        if data is None or indices is None or updates is None or reduction not in REDUCTIONS:
            return False
        if data.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            return False
        found = self._row_indices(node, data, indices, _axis(node, 0, data))
        if found is None:
            return False
        rows, axis, batch_dims = found
        composite = scatter_rows(axis, batch_dims, reduction, len(rows.shape or ()))
        return self._become(
            node, composite, [data, rows, updates], axis, batch_dims, REDUCTIONS.index(reduction)
        )

    def scatter_nd(self, node: ir.Node) -> bool:
        data, places, updates = node.inputs
        reduction = node.attributes.get_string("reduction", "none")
        if data is None or places is None or updates is None or reduction not in REDUCTIONS:
            return False
        if data.dtype != ir.DataType.FLOAT or not data.shape or not places.shape or len(places.shape) < 2:
            return False
        if places.shape[-1] != 1:
            return False
        rows = self._column(node, places)
        axis, last, source = _transposed_scatter(node, len(places.shape) - 1)
        if source is not None:
            updates = source
            data = self._moved(node, data, last)
            take_over(node.outputs[0], last)
        composite = scatter_rows(axis, 0, reduction, len(places.shape) - 1)
        return self._become(node, composite, [data, rows, updates], axis, 0, REDUCTIONS.index(reduction))

    def _become(
        self, node: ir.Node, composite: CompositeOp, inputs: Sequence[ir.Value], *attributes: int
    ) -> bool:
        """Turns a node into a call of a composite op; the node keeps its outputs."""
        dtype = inputs[0].dtype
        assert dtype is not None
        node.domain, node.op_type, _ = self._op.function(composite, dtype)
        node.attributes.clear()
        for name, value in zip(composite.attributes, attributes, strict=True):
            node.attributes.add(ir.AttrInt64(name, value))
        set_inputs(node, inputs)
        return True

    def _become_gather(self, node: ir.Node, data: ir.Value, rows: ir.Value, axis: int) -> None:
        """Turns a node into a Gather, or into a `GatherRows` where that is faster."""
        node.op_type = "Gather"
        node.attributes.clear()
        node.attributes.add(ir.AttrInt64("axis", axis))
        set_inputs(node, [data, rows])
        self.gather(node)

    def _as_int64(self, node: ir.Node, indices: ir.Value) -> ir.Value:
        """Returns indices as int64."""
        if indices.dtype == ir.DataType.INT64:
            return indices
        with self._op.placing(before=node):
            cast: ir.Value = self._op.Cast(indices, to=ir.DataType.INT64)
        cast.shape, cast.type = indices.shape, ir.TensorType(ir.DataType.INT64)
        return cast

    def _column(self, node: ir.Node, places: ir.Value) -> ir.Value:
        """Returns indices `[*k, 1]` as `[*k]`."""
        source = places.producer()
        rank = len(places.shape or ())
        if source is not None and (source.op_type, source.domain) == ("Unsqueeze", ""):
            axes = known_array(source.inputs[1])
            if axes is not None and axes.tolist() in ([-1], [rank - 1]) and source.inputs[0] is not None:
                return source.inputs[0]
        with self._op.placing(before=node):
            column: ir.Value = self._op.Squeeze(places, [-1])
        column.shape, column.type = ir.Shape(list(places.shape or ())[:-1]), places.type
        return column

    def _moved(self, node: ir.Node, data: ir.Value, last: ir.Node) -> ir.Value:
        """Returns the table of a scatter, with its axes as the Transpose `last` orders those of the result."""
        order = permutation(last)
        source, producer = None, data.producer()
        if producer is not None and (producer.op_type, producer.domain) == ("Transpose", ""):
            source = producer.inputs[0]
            if source is not None and [permutation(producer)[axis] for axis in order] == list(
                range(len(order))
            ):
                return source
        with self._op.placing(before=node):
            number = expand_source(data)
            moved: ir.Value
            if producer is not None and number is not None and dims_of(number) == ():
                moved = self._op.Expand(number, self._op.Gather(producer.inputs[1], order))
            else:
                moved = self._op.Transpose(data, perm=order)
        moved.shape, moved.type = last.outputs[0].shape, data.type
        return moved

    def _row_indices(
        self, node: ir.Node, data: ir.Value, indices: ir.Value, axis: int | None
    ) -> tuple[ir.Value, int, int] | None:
        """Finds the indices of rows, if indices of elements are equal along each row.

        Args:
            node: node that reads the indices.
            data: the table.
            indices: one index for each element.
            axis: the axis that they index.

        Returns:
            The indices `[k]`, or `[*lead, k]` if they differ between entries of the leading axes; the axis; and the
            number of these leading axes, 0 or `axis`. None if the indices are not those of rows, or are read as fast.
        """
        source = expand_source(indices) or indices
        sizes, full, narrow = dims_of(data), dims_of(indices), dims_of(source)
        if sizes is None or full is None or narrow is None or axis is None:
            return None
        # The rows must be whole.
        if any(full[other] != sizes[other] for other in range(len(sizes)) if other != axis):
            return None
        padded = (1,) * (len(full) - len(narrow)) + narrow
        lead, rest = padded[:axis], padded[axis + 1 :]
        shared = all(dim == 1 for dim in lead)
        if any(dim != 1 for dim in rest):
            return None
        if not shared and (lead != full[:axis] or narrow == full or len(narrow) < len(full)):
            return None
        with self._op.placing(before=node):
            rows = source
            if shared:
                rows = self._op.Reshape(rows, [-1])
            elif rest:
                rows = self._op.Squeeze(rows, list(range(axis + 1, len(full))))
        rows.shape = ir.Shape([padded[axis]] if shared else padded[: axis + 1])
        rows.type = indices.type
        return self._as_int64(node, rows), axis, 0 if shared else axis


def _transposed_scatter(node: ir.Node, index_axes: int) -> tuple[int, ir.Node, ir.Value | None]:
    """Finds the Transposes around a ScatterND along axis 0 that make it one along another axis.

    Args:
        node: the ScatterND.
        index_axes: number of axes of its row indices.

    Returns:
        The axis, the Transpose of the result, and the updates before their Transpose; (0, `node`, None) if the result
        or the updates are not transposed in this way.
    """
    updates, last = node.inputs[2], sole_transpose(node)
    first = None if updates is None else updates.producer()
    none = 0, node, None
    if last is None or first is None or (first.op_type, first.domain) != ("Transpose", ""):
        return none
    order = permutation(last)
    axis = order.index(0) if 0 in order else 0
    lead, rest = list(range(axis)), list(range(axis + index_axes, len(order) - 1 + index_axes))
    if axis == 0 or order != [*range(1, axis + 1), 0, *range(axis + 1, len(order))]:
        return none
    if permutation(first) != [*range(axis, axis + index_axes), *lead, *rest]:
        return none
    return axis, last, first.inputs[0]


def _transposed_gather(
    node: ir.Node, data: ir.Value, index_axes: int
) -> tuple[int, ir.Node, ir.Value | None]:
    """Finds the Transposes around a gather along axis 0 that make it one along another axis.

    Args:
        node: the gather.
        data: its table.
        index_axes: number of axes of its row indices.

    Returns:
        The axis, the Transpose of the result, and the table before its Transpose; (0, `node`, None) if the table or the
        result are not transposed in this way.
    """
    first, last = data.producer(), sole_transpose(node)
    if last is None or first is None or (first.op_type, first.domain) != ("Transpose", ""):
        return 0, node, None
    order = permutation(first)
    axis = order[0]
    rest = list(range(axis + 1, len(order)))
    if order != [axis, *range(axis), *rest]:
        return 0, node, None
    back = [
        *range(index_axes, index_axes + axis),
        *range(index_axes),
        *range(index_axes + axis, index_axes + len(order) - 1),
    ]
    return (axis, last, first.inputs[0]) if permutation(last) == back else (0, node, None)


def _axis(node: ir.Node, default: int, data: ir.Value) -> int | None:
    """Returns the attribute `axis` of a node as a non-negative number; None if the rank of `data` is unknown."""
    axis = node.attributes.get_int("axis", default)
    if data.shape is None:
        return None
    return axis + len(data.shape) if axis < 0 else axis


def _count(dims: Sequence[int | None]) -> int | None:
    """Returns the product of sizes; None if one is unknown."""
    known = [dim for dim in dims if dim is not None]
    return math.prod(known) if len(known) == len(dims) else None
