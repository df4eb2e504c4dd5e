"""Lowers views, and ops that rearrange, concatenate, repeat or pad elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxtrain.ortmodule.lowering._table import Lowering, lower, same_sizes

INT64_MAX = int(np.iinfo(np.int64).max)
INT64_MIN = int(np.iinfo(np.int64).min)


def axis_of(low: Lowering, axis: int) -> int:
    """Returns the non-negative index of an axis of the first argument, e.g. 2 for axis -1 of a rank-3 tensor."""
    rank = len(low.fake(0).shape)
    if not -max(rank, 1) <= axis < max(rank, 1):
        raise low.unsupported(f"axis {axis} of a tensor with {rank} axes")
    return axis % rank if rank else 0


def result_shape(low: Lowering, sizes: Any) -> ir.Value:
    """Returns the shape of the result as an input of Reshape.

    The shape is a constant if at most one size is symbolic; this size becomes -1.

    Args:
        low: the lowering of an op with one result.
        sizes: the op's argument with the sizes, which may be symbolic.
    """
    static = [size if isinstance(size, int) else -1 for size in low.result.shape]
    # Reshape cannot infer a size of -1 if another size is 0.
    if static.count(-1) == 0 or (static.count(-1) == 1 and 0 not in static):
        return low.op.const(np.array(static, np.int64))
    return low.ints(sizes)


def to_result_shape(low: Lowering, x: ir.Value, sizes: Any) -> ir.Value:
    """Reshapes `x` to the shape of the result. For `sizes`, see `result_shape`."""
    # Without allowzero, 0 would mean the size of the input's axis.
    return low.op.Reshape(x, result_shape(low, sizes), allowzero=1)


def transposed(low: Lowering, x: ir.Value, order: Sequence[int]) -> ir.Value:
    """Returns `x` with its axes permuted by `order`. Adds no Transpose for the identity permutation."""
    order = list(order)
    return x if order == sorted(order) else low.op.Transpose(x, perm=order)


@lower(
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten._reshape_alias.default"
)
def view(low: Lowering, x: ir.Value, size: Any, *_: Any) -> ir.Value:
    return to_result_shape(low, x, size)


@lower("aten.t.default")
def t(low: Lowering, x: ir.Value) -> ir.Value:
    return low.op.Transpose(x, perm=[1, 0]) if len(low.fake(0).shape) == 2 else x


@lower("aten.permute.default")
def permute(low: Lowering, x: ir.Value, dims: Sequence[int]) -> ir.Value:
    return transposed(low, x, [axis_of(low, dim) for dim in dims])


@lower("aten.transpose.int")
def transpose(low: Lowering, x: ir.Value, dim0: int, dim1: int) -> ir.Value:
    order = list(range(len(low.fake(0).shape)))
    if order:
        first, second = axis_of(low, dim0), axis_of(low, dim1)
        order[first], order[second] = second, first
    return transposed(low, x, order)


@lower("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def squeeze(low: Lowering, x: ir.Value, dim: Any = None) -> ir.Value:
    sizes = low.fake(0).shape
    dims = range(len(sizes)) if dim is None else dim if isinstance(dim, list | tuple) else [dim]
    axes = [
        axis for d in dims if sizes and isinstance(sizes[axis := axis_of(low, d)], int) and sizes[axis] == 1
    ]
    return low.op.Squeeze(x, sorted(axes)) if axes else x


@lower("aten.unsqueeze.default")
def unsqueeze(low: Lowering, x: ir.Value, dim: int) -> ir.Value:
    return low.op.Unsqueeze(x, [dim % len(low.result.shape)])


@lower("aten.expand.default")
def expand(low: Lowering, x: ir.Value, size: Any, *, implicit: bool = False) -> ir.Value:
    if same_sizes(low.fake(0), low.result):
        return x
    # PyTorch's -1, which keeps the size of an axis, is 1 in ONNX's Expand.
    kept = [1 if isinstance(s, int) and s == -1 else s for s in size]
    return low.op.Expand(x, low.ints(kept))


@lower("aten.repeat.default")
def repeat(low: Lowering, x: ir.Value, repeats: Any) -> ir.Value:
    new = len(repeats) - len(low.fake(0).shape)
    if new:
        x = low.op.Unsqueeze(x, list(range(new)))
    if all(isinstance(count, int) and count == 1 for count in repeats):
        return x
    return low.op.Tile(x, low.ints(repeats))


@lower("aten.cat.default")
def cat(low: Lowering, tensors: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    # PyTorch accepts 1-d tensors without elements among tensors of any rank. They are reshaped, or dropped if sizes are
    # symbolic.
    shape = list(low.result.shape)
    rank = len(shape)
    shape[dim] = 0
    is_static = all(isinstance(size, int) for size in shape)
    fakes = [node.meta["val"] for node in low.node.args[0]]  # type: ignore[union-attr]
    parts: list[ir.Value] = []
    for part, fake in zip(tensors, fakes, strict=True):
        if rank == 1 or len(fake.shape) == rank:
            parts.append(part)
        elif is_static:
            parts.append(low.op.Reshape(part, low.op.const(shape), allowzero=1))
    parts = list(low.tensors(*parts))
    return low.op.Concat(*parts, axis=dim) if len(parts) > 1 else parts[0]


@lower("aten.stack.default")
def stack(low: Lowering, tensors: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    axis = dim % len(low.result.shape)
    return low.op.Concat(*(low.op.Unsqueeze(x, [axis]) for x in low.tensors(*tensors)), axis=axis)


@lower("aten.split.Tensor", "aten.unsafe_split.Tensor")
def split(low: Lowering, x: ir.Value, size: Any, dim: int = 0) -> Any:
    axis, count = axis_of(low, dim), len(low.result)
    sizes = [part.shape[axis] for part in low.result]
    if count == 1:
        return (x,)
    if all(isinstance(s, int) for s in sizes):
        lengths = low.op.const(sizes)
    else:
        # The last part may be shorter.
        all_but_last = low.ints([size] * (count - 1))
        last = low.op.Sub(low.op.dim(x, axis), low.op.ReduceSum(all_but_last, keepdims=1))
        lengths = low.op.Concat(all_but_last, last, axis=0)
    return low.op.Split(x, lengths, axis=axis, _outputs=count)


@lower("aten.split_with_sizes.default", "aten.unsafe_split_with_sizes.default")
def split_with_sizes(low: Lowering, x: ir.Value, sizes: Any, dim: int = 0) -> Any:
    if len(sizes) == 1:
        return (x,)
    return low.op.Split(x, low.ints(sizes), axis=axis_of(low, dim), _outputs=len(sizes))


@lower("aten.unbind.int")
def unbind(low: Lowering, x: ir.Value, dim: int = 0) -> Any:
    axis, count = axis_of(low, dim), len(low.result)
    used = {user.args[1] for user in low.node.users}
    parts = low.op.Split(x, axis=axis, num_outputs=count, _outputs=count) if count > 1 else (x,)
    return tuple(low.op.Squeeze(part, [axis]) if i in used else None for i, part in enumerate(parts))


def sliced(low: Lowering, x: ir.Value, axis: int, start: Any, end: Any, step: int = 1) -> ir.Value:
    """Returns `x[start:end:step]` along an axis. The bounds may be symbolic or None."""
    start, end = 0 if start is None else start, INT64_MAX if end is None else end
    steps = low.ints([step]) if step != 1 else None
    return low.op.Slice(x, low.ints([start]), low.ints([end]), [axis], steps)


@lower("aten.slice.Tensor")
def slice_(
    low: Lowering, x: ir.Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> ir.Value:
    axis = axis_of(low, dim)
    if step == 1 and str(low.fake(0).shape[axis]) == str(low.result.shape[axis]):
        return x
    return sliced(low, x, axis, start, end, step)


@lower("aten.select.int")
def select(low: Lowering, x: ir.Value, dim: int, index: Any) -> ir.Value:
    return low.op.Gather(x, low.int_scalar(index), axis=axis_of(low, dim))


@lower("aten.flip.default")
def flip(low: Lowering, x: ir.Value, dims: Sequence[int]) -> ir.Value:
    count = len(dims)
    if not count or not low.fake(0).shape:
        return x
    axes = [axis_of(low, dim) for dim in dims]
    # INT64_MIN means one before the first element.
    return low.op.Slice(x, [-1] * count, [INT64_MIN] * count, axes, [-1] * count)


@lower("aten.roll.default")
def roll(low: Lowering, x: ir.Value, shifts: Sequence[Any], dims: Sequence[int] = ()) -> ir.Value:
    op = low.op
    if not dims:
        flat = _rolled(low, op.Reshape(x, [-1]), 0, shifts[0], low.fake(0).numel())
        return op.reshape_like(flat, x)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = axis_of(low, dim)
        x = _rolled(low, x, axis, shift, low.fake(0).shape[axis])
    return x


def _rolled(low: Lowering, x: ir.Value, axis: int, shift: Any, size: Any) -> ir.Value:
    """Rolls `x` along an axis. `shift` and `size`, the size of the axis, may be symbolic."""
    op = low.op
    first: Any
    if isinstance(shift, int) and isinstance(size, int):
        first = -shift % size if size else 0
        if first == 0:
            return x
    else:
        length = op.Shape(x, start=axis, end=axis + 1)
        first = op.Mod(op.Neg(low.ints([shift])), length)
    return op.Concat(sliced(low, x, axis, first, None), sliced(low, x, axis, 0, first), axis=axis)


@lower("aten.tril.default", "aten.triu.default")
def triangle(low: Lowering, x: ir.Value, diagonal: Any = 0) -> ir.Value:
    # ONNX Runtime's Trilu kernel supports these dtypes only.
    supported = (
        ir.DataType.BOOL,
        ir.DataType.FLOAT,
        ir.DataType.DOUBLE,
        ir.DataType.INT64,
        ir.DataType.INT32,
    )
    if x.dtype not in supported and not low.dtype.is_floating_point():
        x = low.tensor(x, ir.DataType.INT32)
    upper = int("triu" in str(low.node.target))
    offset = None if isinstance(diagonal, int) and diagonal == 0 else low.int_scalar(diagonal)
    return low.op.Trilu(x, offset, upper=upper)


def arange(low: Lowering, count: Any) -> ir.Value:
    """Returns [0, 1, ..., count - 1] as int64 [count]. `count` is an int or an int64 [1] value."""
    if isinstance(count, int):
        return low.op.const(np.arange(count, dtype=np.int64))
    return low.op.Range(0, low.op.Squeeze(count, [0]), 1)


@lower("aten.diagonal.default")
def diagonal(low: Lowering, x: ir.Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ir.Value:
    """Lowers to a Gather from flattened n x m matrices, in which elements of a diagonal are m + 1 positions apart."""
    op = low.op
    shape = low.fake(0).shape
    axes = [axis_of(low, dim1), axis_of(low, dim2)]
    x = transposed(low, x, [*(i for i in range(len(shape)) if i not in axes), *axes])
    rows, columns = (shape[axis] for axis in axes)
    if isinstance(rows, int) and isinstance(columns, int):
        count = max(min(rows + min(offset, 0), columns - max(offset, 0)), 0)
        first = offset if offset >= 0 else -offset * columns
        indices = op.const(np.arange(count, dtype=np.int64) * (columns + 1) + first)
    else:
        one, width = op.const([1]), op.Shape(x, start=-1)
        height = op.Shape(x, start=-2, end=-1)
        length = op.Min(op.Add(height, [min(offset, 0)]), op.Sub(width, [max(offset, 0)]))
        steps = op.Mul(arange(low, op.Max(length, [0])), op.Add(width, one))
        indices = op.Add(steps, [offset]) if offset >= 0 else op.Add(steps, op.Mul(width, [-offset]))
    flat = op.Reshape(x, [0] * (len(shape) - 2) + [-1])
    return op.Gather(flat, indices, axis=len(shape) - 2)


@lower("aten.unfold.default")
def unfold(low: Lowering, x: ir.Value, dim: int, size: int, step: int) -> ir.Value:
    """Lowers `x.unfold(dim, size, step)`: sliding windows along an axis; each window is a row along the last axis."""
    op = low.op
    rank = len(low.fake(0).shape)
    if rank == 0:
        return op.Reshape(x, [1])
    axis = axis_of(low, dim)
    count: Any = low.result.shape[axis]
    if not isinstance(count, int):
        count = op.Add(op.Div(op.Sub(op.dim(x, axis), [size]), [step]), [1])
    starts = op.Mul(op.Unsqueeze(arange(low, count), [1]), [step])
    windows = op.Gather(x, op.Add(starts, op.const([list(range(size))])), axis=axis)
    order = [*(i for i in range(rank + 1) if i != axis + 1), axis + 1]
    return transposed(low, windows, order)


@lower("aten.as_strided.default")
def as_strided(low: Lowering, x: ir.Value, size: Any, stride: Any, storage_offset: Any = None) -> ir.Value:
    """Lowers to a Gather from the flattened, contiguous tensor, or to a Reshape if only the shape changes."""
    op = low.op
    source, result = low.fake(0), low.result
    if not source.is_contiguous() or source.storage_offset() != 0:
        raise low.unsupported("a view or a non-contiguous tensor, since ONNX has no strides")
    of_input = _is_view_of_input(low.node.args[0])
    if of_input and storage_offset is not None:
        raise low.unsupported(
            "an offset into the memory of an input, because ONNX Runtime receives only the input itself"
        )
    only_reshapes = (
        not storage_offset and result.is_contiguous() and str(source.numel()) == str(result.numel())
    )
    if not only_reshapes and not _is_in_bounds(source, size, stride, storage_offset or 0, of_input):
        raise low.unsupported("elements past the end of a view, since ONNX has no strides")
    if not only_reshapes:
        indices = low.int_scalar(storage_offset or 0)
        for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
            steps = op.Mul(op.Range(0, low.int_scalar(count), 1), low.int_scalar(step))
            later_axes = list(range(1, len(size) - axis))
            indices = op.Add(indices, op.Unsqueeze(steps, later_axes) if later_axes else steps)
        return op.Gather(op.Reshape(x, [-1]), indices)
    return to_result_shape(low, x, size)


def _is_view_of_input(node: Any) -> bool:
    """True if a node is a graph input or a view of one.

    The storage of such a tensor may be larger than the tensor, and may differ between calls.
    """
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        node = node.args[0]
    return bool(node.op == "placeholder")


def _is_in_bounds(
    source: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any, of_input: bool
) -> bool:
    """True if `as_strided` provably reads no elements of the storage outside of `source`.

    Args:
        source: the fake tensor that is viewed.
        size: sizes of the view, possibly symbolic.
        stride: strides of the view.
        offset: storage offset of the view.
        of_input: True if `source` is a graph input or a view of one, whose storage may be larger than `source`.
    """
    storage = source.untyped_storage().nbytes()
    # If `source` fills its storage, PyTorch has already checked the bounds. With symbolic sizes, `nbytes` is an
    # expression such as 4*b*(a - 1) + 4*b, which is not equal to 4*a*b by `==`.
    if not of_input and statically_known_true(storage == source.numel() * source.element_size()):
        return True
    numbers = [source.numel(), offset, *size, *stride]
    if not all(isinstance(number, int) for number in numbers):
        return False
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    return 0 in size or last < source.numel()


def _pads(low: Lowering, pad: Sequence[Any]) -> tuple[ir.Value, list[int]]:
    """Converts PyTorch's padding, pairs (begin, end) starting at the last axis, to the pads and axes of ONNX's Pad."""
    rank = len(low.fake(0).shape)
    count = len(pad) // 2
    return low.ints([*pad[0::2], *pad[1::2]]), [rank - 1 - i for i in range(count)]


@lower("aten.constant_pad_nd.default")
def constant_pad(low: Lowering, x: ir.Value, pad: Sequence[Any], value: Any = 0) -> ir.Value:
    if low.dtype == ir.DataType.INT16:
        raise low.unsupported("int16, for which ONNX Runtime has no Pad kernel")
    if all(isinstance(p, int) and p == 0 for p in pad):
        return x
    pads, axes = _pads(low, pad)
    is_default = isinstance(value, int | float | bool) and not value
    fill = None if is_default else low.tensor(value, low.dtype)
    return low.op.pad(x, pads, axes, len(low.fake(0).shape), fill)


@lower(*(f"aten.{kind}_pad{n}d.default" for kind in ("reflection", "replication") for n in (1, 2, 3)))
def border_pad(low: Lowering, x: ir.Value, padding: Sequence[Any]) -> ir.Value:
    op, rank = low.op, len(low.fake(0).shape)
    pads, axes = _pads(low, [_clamp_to_zero(low, p) for p in padding])
    mode = "reflect" if "reflection" in str(low.node.target) else "edge"
    padded = op.pad(x, pads, axes, rank, mode=mode)
    if all(isinstance(p, int) and p >= 0 for p in padding):
        return padded
    # Negative padding crops the padded tensor.
    crops = [_clamp_to_zero(low, op.Neg(p) if isinstance(p, ir.Value) else -p) for p in padding]
    ends = op.Sub(op.Gather(op.Shape(padded), axes), low.ints(crops[1::2]))
    return op.Slice(padded, low.ints(crops[0::2]), ends, axes)


def _clamp_to_zero(low: Lowering, number: Any) -> Any:
    """Returns max(number, 0) for an int or an int64 value."""
    return low.op.Max(number, low.op.const(0)) if isinstance(number, ir.Value) else max(number, 0)
