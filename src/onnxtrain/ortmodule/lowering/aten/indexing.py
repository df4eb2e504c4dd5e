"""Lowers indexing, gather, scatter and masks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule.lowering._table import DTYPES, Lowering, lower, same_sizes
from onnxtrain.ortmodule.lowering.aten.shape import axis_of, transposed
from onnxtrain.passes import expand_source

INT64, FLOAT = ir.DataType.INT64, ir.DataType.FLOAT


def _one_hot(classes: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Replaces `one_hot` with a scatter, which raises an error for classes that are out of range."""
    if isinstance(num_classes, int) and num_classes <= 0:
        return _torch.one_hot(classes, num_classes)
    zeros = torch.zeros((*classes.shape, num_classes), dtype=torch.int64, device=classes.device)
    return zeros.scatter(-1, classes.unsqueeze(-1), 1)


INDEXING: dict[Any, Callable[..., Any]] = {
    _torch.one_hot: _one_hot,
    torch.nn.functional.one_hot: _one_hot,
}
"""Replacements for indexing functions when a Dynamo graph is traced."""


class _AdvancedIndex:
    """Index tensors for some axes of a tensor, in the form that GatherND and ScatterND need.

    These ops index the first axes of a tensor, so the indexed axes are moved to the front.

    Attributes:
        axes: the indexed axes, e.g. [0, 2] for `x[i, :, j]`.
        others: the other axes, e.g. [1].
        indices: int64 [*b, number of indexed axes], where b is the shape to which the index tensors broadcast.
        rank: the rank of b.
        at: position of the axes of b in the result of `x[...]`: the first indexed axis if the indexed axes are
            adjacent, else 0.
    """

    def __init__(self, low: Lowering, data_rank: int, indices: Sequence[ir.Value | None], fakes: Any) -> None:
        op = low.op
        indices, fakes = _without_masks(low, indices, fakes)
        self.axes = [axis for axis, index in enumerate(indices) if index is not None]
        self.data_rank = data_rank
        values = [low.tensor(indices[axis], INT64) for axis in self.axes]
        shapes = [tuple(map(str, fakes[axis])) for axis in self.axes]
        self.rank = max(map(len, shapes))
        # The sum of the index tensors has the shape that they broadcast to.
        if len(set(shapes)) > 1:
            common = values[0]
            for value in values[1:]:
                common = op.Add(common, value)
            values = [op.Expand(value, op.Shape(common)) for value in values]
        columns = [op.Unsqueeze(value, [self.rank]) for value in values]
        self.indices: ir.Value = op.Concat(*columns, axis=self.rank) if len(columns) > 1 else columns[0]
        self.others = [axis for axis in range(data_rank) if axis not in self.axes]
        adjacent = self.axes == list(range(self.axes[0], self.axes[0] + len(self.axes)))
        self.at = self.axes[0] if adjacent else 0

    def to_front(self, low: Lowering, data: ir.Value) -> ir.Value:
        """Returns `data` with the indexed axes first."""
        return transposed(low, data, [*self.axes, *self.others])

    def from_front(self, low: Lowering, data: ir.Value) -> ir.Value:
        """Returns `data` with its axes in the original order: undoes `to_front`."""
        order = [*self.axes, *self.others]
        return transposed(low, data, [order.index(axis) for axis in range(len(order))])

    def order(self) -> list[int]:
        """Returns the permutation from the axes of GatherND's result, (*b, *others), to the axes of `x[...]`."""
        others = [self.rank + i for i in range(len(self.others))]
        return [*others[: self.at], *range(self.rank), *others[self.at :]]


def _without_masks(
    low: Lowering, indices: Sequence[ir.Value | None], fakes: Any
) -> tuple[list[ir.Value | None], list[Any]]:
    """Replaces each mask in a list of index tensors with one index tensor per axis of the mask.

    Args:
        low: the lowering.
        indices: index tensors and masks, with None for axes that are not indexed.
        fakes: the fake tensors of `indices`.

    Returns:
        The index tensors and their shapes, with None for axes that are not indexed.
    """
    values: list[ir.Value | None] = []
    shapes: list[Any] = []
    for value, fake in zip(indices, fakes, strict=True):
        if value is None or fake.dtype not in (torch.bool, torch.uint8):
            values.append(value)
            shapes.append(None if fake is None else fake.shape)
            continue
        rank = len(fake.shape)
        if rank == 0:
            raise low.unsupported("a mask that is a scalar")
        nonzero = low.op.NonZero(low.tensor(value, ir.DataType.BOOL))  # [rank, count]
        rows = low.op.Split(nonzero, axis=0, num_outputs=rank, _outputs=rank) if rank > 1 else (nonzero,)
        values += [low.op.Squeeze(row, [0]) for row in rows]
        shapes += [(f"true in {value.name}",)] * rank
    return values, shapes


def _fakes(low: Lowering, argument: int) -> list[Any]:
    """Returns the fake tensors of an argument that is a list of optional tensors."""
    nodes: Any = low.node.args[argument]
    return [None if node is None else node.meta["val"] for node in nodes]


_NON_NEGATIVE = ("arange", "argmax", "argmin", "argsort", "max", "min", "sort", "topk")
"""PyTorch functions that return non-negative indices."""


def checked_indices(low: Lowering, argument: int, index: ir.Value, ignored: int | None = None) -> ir.Value:
    """Replaces negative indices with an out-of-range index, so that ONNX Runtime raises an error.

    Needed if the op raises an error for negative indices in PyTorch, but ONNX counts negative indices from the end.

    Args:
        low: the lowering of the node that uses the index tensor.
        argument: position of the index tensor among the node's arguments.
        index: the ONNX value of the index tensor.
        ignored: a value to leave unchanged even if it is negative, e.g. the ignore_index of a loss.
    """
    source: Any = low.node.args[argument]
    # No check if the indices were computed by a function that returns none below 0.
    while isinstance(source, fx.Node) and source.target in (operator.getitem, torch.ops.aten.view.default):
        source = source.args[0]
    packet = getattr(getattr(source, "target", None), "overloadpacket", None)
    dtype = low.fake(argument).dtype
    if not dtype.is_signed or getattr(packet, "__name__", "") in _NON_NEGATIVE:
        return index
    # One index per row, before it was expanded, takes less time to check.
    views: list[ir.Node] = []
    view = index.producer()
    while view is not None and view.op_type in ("Expand", "Unsqueeze") and view.inputs[0] is not None:
        views.append(view)
        view = view.inputs[0].producer()
    unchecked = views[-1].inputs[0] if views else index
    assert unchecked is not None
    negative = low.op.Less(unchecked, low.tensor(0, DTYPES[dtype]))
    if ignored is not None and ignored < 0:
        is_ignored = low.op.Equal(unchecked, low.tensor(ignored, DTYPES[dtype]))
        negative = low.op.And(negative, low.op.Not(is_ignored))
    result: ir.Value = low.op.Where(negative, low.tensor(torch.iinfo(dtype).max, DTYPES[dtype]), unchecked)
    result.shape = unchecked.shape
    for view in reversed(views):
        result = low.op.emit(view.op_type, result, view.inputs[1])
        result.shape = view.outputs[0].shape
    return result


@lower("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(low: Lowering, x: ir.Value, indices: Sequence[ir.Value | None]) -> ir.Value:
    fakes = _fakes(low, 1)
    used = [axis for axis, value in enumerate(indices) if value is not None]
    # Gather indexes any axis; GatherND would need a Transpose.
    if len(used) == 1 and fakes[used[0]].dtype not in (torch.bool, torch.uint8):
        return low.op.Gather(x, indices[used[0]], axis=used[0])
    advanced = _AdvancedIndex(low, len(low.fake(0).shape), indices, fakes)
    entries = low.op.GatherND(advanced.to_front(low, x), advanced.indices)
    return transposed(low, entries, advanced.order())


@lower("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(
    low: Lowering, x: ir.Value, indices: Sequence[ir.Value | None], values: ir.Value, accumulate: bool = False
) -> ir.Value:
    op = low.op
    fakes = _fakes(low, 1)
    one_value = all(isinstance(size, int) and size == 1 for size in low.fake(2).shape)
    # Where writes a single value by a mask, without index tensors of data-dependent size.
    if one_value and len(fakes) == 1 and fakes[0] is not None and fakes[0].dtype == torch.bool:
        return _put_by_mask(low, x, indices[0], values, accumulate)
    advanced = _AdvancedIndex(low, len(low.fake(0).shape), indices, fakes)
    data = advanced.to_front(low, x)
    values = low.tensor(values, low.dtype)
    shape = op.Shape(op.GatherND(data, advanced.indices))
    order = advanced.order()
    if order == sorted(order):
        updates = op.Expand(values, shape)
    else:
        updates = op.Expand(values, op.Gather(shape, order))
        updates = transposed(low, updates, [order.index(axis) for axis in range(len(order))])
    reduction = "add" if accumulate else "none"
    return advanced.from_front(low, op.ScatterND(data, advanced.indices, updates, reduction=reduction))


def _put_by_mask(low: Lowering, x: ir.Value, mask: Any, values: ir.Value, accumulate: bool) -> ir.Value:
    """Lowers `x[mask] = value`, or `x[mask] += value` if `accumulate`, for a single value.

    Args:
        low: the lowering of the `index_put` node.
        x: the tensor.
        mask: bool. May have fewer axes than `x`: it masks the first axes.
        values: the value, a tensor of one element.
        accumulate: True to add the value.
    """
    op = low.op
    rank = len(low.fake(0).shape)
    value = op.Reshape(low.tensor(values, low.dtype), op.const([1] * rank) if rank else [])
    # The mask may have fewer axes than `x`.
    missing = list(range(len(_fakes(low, 1)[0].shape), rank))
    mask = op.Unsqueeze(mask, missing) if missing else mask
    written = op.Add(x, value) if accumulate else value
    return op.Where(mask, written, x)


@lower("aten.nonzero.default")
def nonzero(low: Lowering, x: ir.Value) -> ir.Value:
    # For a scalar, ONNX Runtime returns indices with one axis, PyTorch with none.
    if not low.fake(0).shape:
        raise low.unsupported("a scalar")
    return transposed(low, low.op.NonZero(low.tensor(x, ir.DataType.BOOL)), [1, 0])


@lower("aten.masked_select.default")
def masked_select(low: Lowering, x: ir.Value, mask: ir.Value) -> ir.Value:
    x, mask = _broadcast(low, x, mask)
    return low.op.GatherND(x, low.op.Transpose(low.op.NonZero(mask), perm=[1, 0]))


@lower("aten.masked_scatter.default")
def masked_scatter(low: Lowering, x: ir.Value, mask: ir.Value, source: ir.Value) -> ir.Value:
    x, mask = _broadcast(low, x, mask)
    # The n-th true element of the mask takes the n-th element of the source.
    positions = low.op.Transpose(low.op.NonZero(mask), perm=[1, 0])
    count = low.op.Shape(positions, start=0, end=1)
    updates = low.op.Slice(low.op.Reshape(source, [-1]), [0], count, [0])
    filled = low.op.ScatterND(x, positions, updates)
    return filled if low.result.shape else low.op.Reshape(filled, low.op.const(np.array([], np.int64)))


def _broadcast(low: Lowering, x: ir.Value, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Broadcasts `x` and `mask` to a common shape. Scalars become [1], because GatherND and ScatterND need an axis."""
    first, second = low.fake(0), low.fake(1)
    if not same_sizes(first, second):
        shape = low.op.Shape(low.op.Where(mask, x, x))
        x, mask = low.op.Expand(x, shape), low.op.Expand(mask, shape)
    if not (first.shape or second.shape):
        x, mask = low.op.Reshape(x, [1]), low.op.Reshape(mask, [1])
    return x, mask


@lower("aten.index_select.default")
def index_select(low: Lowering, x: ir.Value, dim: int, index: ir.Value) -> ir.Value:
    if not low.fake(0).shape:
        return x
    index = checked_indices(low, 2, index)
    # With a scalar index, PyTorch keeps the axis; Gather would drop it.
    flat = index if len(low.fake(2).shape) == 1 else low.op.Reshape(index, [1])
    return low.op.Gather(x, flat, axis=axis_of(low, dim))


@lower("aten.gather.default")
def gather(low: Lowering, x: ir.Value, dim: int, index: ir.Value, *, sparse_grad: bool = False) -> ir.Value:
    if not low.fake(0).shape:
        # GatherElements does not support scalars. All indices are 0.
        return low.op.Expand(x, low.op.Shape(index))
    index = checked_indices(low, 2, index)
    if not low.fake(2).shape:
        return low.op.Gather(low.op.Reshape(x, [-1]), index)
    return low.op.GatherElements(x, index, axis=axis_of(low, dim))


def _scatter(low: Lowering, x: ir.Value, dim: int, index: ir.Value, source: Any, reduction: str) -> ir.Value:
    """Emits a ScatterElements that writes `source` to the elements of `x` at `index` along an axis.

    Args:
        low: the lowering.
        x: the tensor.
        dim: the axis.
        index: the indices along the axis.
        source: a number, or a tensor at least as large as `index` on each axis.
        reduction: ONNX's attribute, e.g. "add", or "none" to replace the elements.
    """
    return _reduce_into(low, x, dim, _scatter_indices(low, index), source, reduction)


def _scatter_indices(low: Lowering, index: ir.Value) -> ir.Value:
    """Returns the index tensor of a scatter, with a check that it has no negative indices."""
    if not low.fake(0).shape or not low.fake(2).shape:
        raise low.unsupported("scalars")
    return checked_indices(low, 2, index)


def _reduce_into(
    low: Lowering, x: ir.Value, dim: int, index: ir.Value, source: Any, reduction: str
) -> ir.Value:
    """Emits the ScatterElements of :func:`_scatter` for indices that have been checked."""
    op = low.op
    if not isinstance(source, ir.Value) or not isinstance(low.fake(3), torch.Tensor):
        source = op.Expand(low.tensor(source, low.dtype), op.shape_of(index))
    elif not same_sizes(low.fake(3), low.fake(2)):
        rank = len(low.fake(2).shape)
        # PyTorch uses `source[: index.shape[0], : index.shape[1], ...]`. ONNX requires equal shapes.
        source = op.Slice(source, [0] * rank, op.shape_of(index), list(range(rank)))
    return op.ScatterElements(x, index, source, axis=axis_of(low, dim), reduction=reduction)


@lower("aten.scatter.src", "aten.scatter.value")
def scatter(low: Lowering, x: ir.Value, dim: int, index: ir.Value, source: Any) -> ir.Value:
    return _scatter(low, x, dim, index, source, "none")


@lower("aten.scatter_add.default")
def scatter_add(low: Lowering, x: ir.Value, dim: int, index: ir.Value, source: ir.Value) -> ir.Value:
    return _scatter(low, x, dim, index, source, "add")


@lower("aten.scatter.reduce", "aten.scatter.value_reduce")
def scatter_with(
    low: Lowering, x: ir.Value, dim: int, index: ir.Value, source: Any, *, reduce: str
) -> ir.Value:
    return _scatter(low, x, dim, index, source, {"add": "add", "multiply": "mul"}[reduce])


_NEUTRAL_ELEMENTS: dict[str, float] = {
    "sum": 0.0,
    "mean": 0.0,
    "prod": 1.0,
    "amax": -math.inf,
    "amin": math.inf,
}
"""Maps each reduction of `scatter_reduce` to its neutral element."""

_REDUCTIONS = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


@lower("aten.scatter_reduce.two")
def scatter_reduce(
    low: Lowering,
    x: ir.Value,
    dim: int,
    index: ir.Value,
    source: ir.Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> ir.Value:
    op = low.op
    neutral_number = _NEUTRAL_ELEMENTS[reduce]
    if not low.dtype.is_floating_point():
        if low.dtype not in (INT64, ir.DataType.INT32) or reduce == "mean":
            raise low.unsupported(f"{reduce} of {low.dtype}")
        bounds = np.iinfo(low.dtype.numpy())
        neutral_number = int(min(max(neutral_number, bounds.min), bounds.max))
    index = _scatter_indices(low, index)
    count = (
        _updates_per_element(low, x, axis_of(low, dim), index)
        if not include_self or reduce == "mean"
        else None
    )
    if not include_self and count is not None:
        # ONNX always includes the old elements of `x`, so they are replaced by the neutral element first.
        x = op.Where(op.Greater(count, op.const(0, low.dtype)), low.tensor(neutral_number, low.dtype), x)
    total = _reduce_into(low, x, dim, index, source, _REDUCTIONS[reduce])
    if reduce in ("amax", "amin") and low.dtype.is_floating_point():
        # ONNX Runtime's maximum and minimum lose NaN.
        nans = op.Cast(op.IsNaN(source), to=ir.DataType.FLOAT)
        old = op.Expand(op.const(0.0), op.shape_of(x))
        nan_count = _reduce_into(low, old, dim, index, nans, "add")
        return op.Mul(
            total, op.Where(op.Greater(nan_count, 0.0), op.const(math.nan, like=x), op.const(1.0, like=x))
        )
    if reduce != "mean" or count is None:
        return total
    # ScatterElements has no mean: divides the sum by the number of terms.
    return op.Div(total, op.Add(count, 1.0) if include_self else op.Max(count, 1.0))


def _updates_per_element(low: Lowering, x: ir.Value, axis: int, index: ir.Value) -> ir.Value:
    """Returns how many updates a scatter along `axis` writes to each element of `x`, in a shape that broadcasts to it.

    An index that was expanded to whole rows is counted once per row.
    """
    op = low.op
    rows, rank = expand_source(index), len(low.fake(0).shape)
    others = [i for i in range(rank) if i != axis]
    whole = all(str(low.fake(0).shape[i]) == str(low.fake(2).shape[i]) for i in others)
    sizes = op.shape_of(x)
    if rows is not None and rows.shape is not None and len(rows.shape) == rank and whole:
        index, shape = rows, op.Shape(rows)
        sizes = op.Concat(
            op.Slice(shape, [0], [axis]), op.dim(x, axis), op.Slice(shape, [axis + 1], [rank]), axis=0
        )
    ones = op.Expand(op.const(1, low.dtype), op.shape_of(index))
    return op.ScatterElements(
        op.Expand(op.const(0, low.dtype), sizes), index, ones, axis=axis, reduction="add"
    )
