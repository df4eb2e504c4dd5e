"""Differentiates ops that move, repeat or drop elements without changing them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, defvjp, nondifferentiable, vjp
from onnxtrain.autodiff.rules._scatter import positions, scatter_to
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.passes import inverse_permutation

defvjp("Reshape", data=lambda op, n, ct: op.reshape_like(ct, n.data))
defvjp("Flatten", input=lambda op, n, ct: op.reshape_like(ct, n.input))
defvjp("Unsqueeze", data=lambda op, n, ct: op.Squeeze(ct, n.axes))
defvjp("Squeeze", data=lambda op, n, ct: op.Unsqueeze(ct, n.axes) if n.axes else op.reshape_like(ct, n.data))
defvjp("Expand", broadcasts=True, input=lambda op, n, ct: ct)
defvjp("Trilu", input=lambda op, n, ct: op.Trilu(ct, n.k, upper=n.attr("upper")))
# Reversing the first sequence_lens[b] entries is its own inverse.
defvjp(
    "ReverseSequence",
    input=lambda op, n, ct: op.ReverseSequence(
        ct, n.sequence_lens, batch_axis=n.attr("batch_axis"), time_axis=n.attr("time_axis")
    ),
)

nondifferentiable("Shape", "Size", reason="its output depends only on the shape")
nondifferentiable("ConstantOfShape", "EyeLike", reason="its output depends only on the shape of its input")
nondifferentiable("NonZero", reason="its output consists of indices")
nondifferentiable("Constant", reason="has no inputs")

_INT64_MIN = int(np.iinfo(np.int64).min)
_INT64_MAX = int(np.iinfo(np.int64).max)


@vjp("Transpose", wrt=("data",))
def transpose(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Transpose: transposes ct by the inverse permutation."""
    # The default permutation reverses all axes, and is its own inverse.
    perm = n.attr("perm")
    return op.Transpose(ct, perm=None if perm is None else inverse_permutation(perm))


@vjp("Concat", wrt=("inputs",))
def concat(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Concat: splits ct into parts with the sizes of the inputs."""
    inputs = [value for value in n.inputs if value is not None]
    # Split rejects a single part.
    if len(inputs) == 1:
        return [ct]
    axis = int(n.attr("axis"))
    return list(op.Split(ct, _sizes(op, inputs, axis), axis=axis, _outputs=len(inputs)))


def _sizes(op: Emitter, values: list[ir.Value], axis: int) -> ir.Value:
    """Returns the sizes of the values along an axis, int64 [len(values)]: a constant if all are static."""
    static = [dims[axis] if (dims := static_dims(value)) is not None else None for value in values]
    if None not in static:
        return op.const(np.array(static, dtype=np.int64))
    return op.Concat(*[op.dim(value, axis) for value in values], axis=0)


@vjp("Split", wrt=("input",))
def split(op: Emitter, n: NodeView, cts: tuple[ir.Value | None, ...]) -> Cotangents:
    """VJP of Split: concatenates the cotangents of the parts, with zeros for parts without a cotangent."""
    dtype = next(ct.dtype for ct in cts if ct is not None)
    parts = [ct or op.zeros_like(output, dtype) for output, ct in zip(n.outputs, cts, strict=True)]
    return op.Concat(*parts, axis=n.attr("axis"))


@vjp("Range", wrt=("start", "limit", "delta"))
def range_(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Range, output[i] = start + i * delta; the limit determines only the number of elements."""
    count = op.Cast(op.Range(0, op.Size(n.out.output), 1), to=ct.dtype) if n.needs("delta") else None
    return {
        "start": op.ReduceSum(ct, keepdims=0) if n.needs("start") else None,
        "delta": op.ReduceSum(op.Mul(ct, count), keepdims=0) if n.needs("delta") else None,
    }


@vjp("Tile", wrt=("input",))
def tile(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Tile: sums ct over the repeats. Axis i of the output is [repeats[i], size[i]], flattened."""
    # A scalar has no axes to repeat.
    if n.input.shape is not None and n.input.shape.rank() == 0:
        return ct
    repeats, dims = n.constant(n.repeats), static_dims(n.input)
    if repeats is not None and dims is not None and None not in dims:
        shape = op.const(np.stack([repeats, np.array(dims, dtype=np.int64)], axis=1).ravel())
    else:
        pairs = [op.Unsqueeze(v, [1]) for v in (n.repeats, op.shape_of(n.input))]
        shape = op.Reshape(op.Concat(*pairs, axis=1), [-1])
    split = op.Reshape(ct, shape, allowzero=1)
    if n.input.shape is None:
        axes = op.Range(0, op.Size(shape), 2)
    else:
        axes = op.const(np.arange(0, 2 * n.input.shape.rank(), 2))
    return op.ReduceSum(split, axes, keepdims=0)


@vjp("Slice", wrt=("data",))
def slice_(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Slice: ct at the positions that were read, zeros elsewhere.

    If axes and steps are constant: flips the axes that were read backwards, inserts |step| - 1 zeros between neighbors,
    and pads to the shape of the data. Otherwise, slices the flat indices of all elements and scatters ct to them.
    """
    # Pads instead of a scatter, because the driver can concatenate padded slices that tile the whole value
    # (`_accumulate`).
    data, output = n.data, n.out.output
    axes, steps = _axes_and_steps(n) if data.shape is not None else (None, None)
    if axes is None or steps is None or data.shape is None or output.shape is None:
        where = op.Slice(positions(op, data), n.starts, n.ends, n.axes, n.steps)
        return scatter_to(op, ct, where, data)
    backward = [axis for axis, step in zip(axes, steps, strict=True) if step < 0]
    if backward:
        count = len(backward)
        ct = op.Slice(ct, [-1] * count, [_INT64_MIN] * count, backward, [-1] * count)
    strides = {axis: abs(step) for axis, step in zip(axes, steps, strict=True) if abs(step) > 1}
    if strides:
        ct = _insert_zeros(op, ct, output, strides)
    return op.pad(ct, _slice_pads(op, n, axes, steps), axes, data.shape.rank())


def _axes_and_steps(n: NodeView) -> tuple[list[int] | None, list[int] | None]:
    """Returns the sliced axes, non-negative, and their steps. Either is None if it is only known at run time."""
    axes: list[int] | None = None
    if n.axes is not None:
        constant = n.constant(n.axes)
        axes = None if constant is None else [n.axis(n.data, int(axis)) for axis in constant]
    elif n.starts.shape is not None and isinstance(n.starts.shape[0], int):
        axes = list(range(n.starts.shape[0]))
    # Without the input `steps`, all steps are 1.
    if n.steps is None:
        return axes, None if axes is None else [1] * len(axes)
    constant = n.constant(n.steps)
    return axes, None if constant is None else [int(step) for step in constant]


def _insert_zeros(op: Emitter, ct: ir.Value, output: ir.Value, strides: dict[int, int]) -> ir.Value:
    """Inserts stride - 1 zeros between neighbors along some axes of `ct`, which has the shape of `output`."""
    axes = sorted(strides)
    inner = [axis + 1 + i for i, axis in enumerate(axes)]
    zeros = [strides[axis] - 1 for axis in axes]
    assert output.shape is not None
    factors = [strides.get(axis, 1) for axis in range(output.shape.rank())]
    rank = output.shape.rank() + len(inner)
    padded = op.pad(op.Unsqueeze(ct, inner), [0] * len(axes) + zeros, inner, rank)
    merged = op.Reshape(padded, op.Mul(op.shape_of(output), factors), allowzero=1)
    # The zeros after the last element may extend beyond the data.
    return op.Slice(merged, [0] * len(axes), [-count for count in zeros], axes)


def _slice_pads(op: Emitter, n: NodeView, axes: list[int], steps: list[int]) -> ir.Value:
    """Returns the numbers of unread elements before and after the slice along each axis, int64 [2 * len(axes)].

    The first element read is at `start`, which counts from the end if negative, and is clamped to [0, size], or to [0,
    size - 1] for a negative step. `count` elements span (count - 1) * |step| + 1 positions, or none if `count` is zero.
    """
    data, output, starts = n.data, n.out.output, n.constant(n.starts)
    dims, counts = ([(static_dims(value) or ())[axis] for axis in axes] for value in (data, output))
    step = np.array(steps, dtype=np.int64)
    back = (step < 0).astype(np.int64)
    if starts is not None and None not in dims and None not in counts:
        sizes, lengths = np.array(dims, dtype=np.int64), np.array(counts, dtype=np.int64)
        begin = np.clip(np.where(starts < 0, starts + sizes, starts), 0, sizes - back)
        before = np.minimum(begin + (lengths - 1) * np.minimum(step, 0), sizes)
        after = sizes - before - np.maximum((lengths - 1) * abs(step) + 1, 0)
        return op.const(np.concatenate([before, after]))
    size, count = (op.Gather(op.shape_of(value), axes) for value in (data, output))
    # Starts such as -2**63 mean "from the end": clamp first, so that no sum overflows.
    start = op.Max(op.Min(op.Cast(n.starts, to=ir.DataType.INT64), size), op.Neg(size))
    start = op.Where(op.Less(start, op.const(0)), op.Add(start, size), start)
    first = op.Max(op.Min(start, op.Sub(size, back)), op.const(0))
    gaps = op.Sub(count, op.const(1))
    lowest = op.Min(op.Add(first, op.Mul(gaps, np.minimum(step, 0))), size)
    span = op.Max(op.Add(op.Mul(gaps, abs(step)), op.const(1)), op.const(0))
    return op.Concat(lowest, op.Sub(op.Sub(size, lowest), span), axis=0)


@vjp("Pad", wrt=("data", "constant_value"))
def pad(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Pad: slices off the padding; elements that were cropped by negative pads get zeros.

    In the modes reflect, edge and wrap, the cotangents of copies are added to the original element's cotangent.
    """
    data = n.data
    mode = n.attr("mode")
    if mode != "constant":
        where = op.Pad(positions(op, data), n.pads, None, n.axes, mode=mode)
        return {"data": scatter_to(op, ct, where, data)}
    return {
        "data": _unpad(op, n, ct) if n.needs("data") else None,
        "constant_value": _padding_total(op, n, ct) if n.needs("constant_value") else None,
    }


def _unpad(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """Removes the padding from `ct`, and inserts zeros for elements that negative pads cropped."""
    pads = n.constant(n.pads)
    axes = _padded_axes(op, n)
    if pads is not None:
        begin, end = np.split(pads.astype(np.int64), 2)
        # Positive padding is sliced off first: negative padding is relative to what remains.
        if (pads > 0).any():
            ends = np.where(end > 0, -end, _INT64_MAX)
            ct = op.Slice(ct, np.maximum(begin, 0), ends, axes)
        return op.Pad(ct, np.maximum(-pads, 0), None, axes) if (pads < 0).any() else ct
    before, after = op.Split(n.pads, axis=0, num_outputs=2, _outputs=2)
    zero = op.const(0)
    size = op.Gather(op.Shape(ct), axes)
    ct = op.Slice(ct, op.Max(before, zero), op.Sub(size, op.Max(after, zero)), axes)
    return op.Pad(ct, op.Max(op.Neg(n.pads), zero), None, axes)


def _padded_axes(op: Emitter, n: NodeView) -> ir.Value:
    """Returns the padded axes, int64."""
    if n.axes is not None:
        return op.Cast(n.axes, to=ir.DataType.INT64)
    if n.data.shape is None:
        return op.Range(0, op.Size(op.Shape(n.data)), 1)
    return op.const(np.arange(n.data.shape.rank()))


def _padding_total(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """Returns the cotangent of Pad's constant_value: the sum of `ct` over the padding."""
    # Ones, padded with zeros like the data with the constant, mark the elements that are data.
    inside = op.Pad(op.ones_like(n.data), n.pads, None, n.axes)
    return op.reshape_like(
        op.ReduceSum(op.Where(op.Greater(inside, 0.0), 0.0, ct), keepdims=0), n.constant_value
    )
