"""Differentiates pooling ops."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import vjp
from onnxtrain.autodiff.rules._count import counting_dtype, divide_by_count
from onnxtrain.autodiff.rules._scatter import positions, scatter_nd, scatter_to
from onnxtrain.autodiff.rules._windows import (
    Sizes,
    Windows,
    scatter_windows,
    sizes_without_batch,
    spatial_sizes,
    windows_of,
)
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import SpecializedOp

# float32 represents all integers below 2^24 exactly; larger positions are moved as two such digits.
_DIGIT = 2**24
_INT64_MAX = 2**63 - 1


@vjp("MaxPool", wrt=("X",), saves=("Indices",))
def max_pool(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of MaxPool: each window passes its cotangent to its maximum, the first one in case of ties, as in PyTorch."""
    w = windows_of(op, n, n.X, n.attr("kernel_shape"), n.out.Y)
    pads = {"pads": n.attr("pads"), "auto_pad": n.attr("auto_pad")}
    indices = n.out.Indices
    # With storage_order=1, the saved indices are column-major: rerun the op for row-major indices.
    if n.attr("storage_order"):
        _, indices = op.MaxPool(
            n.X,
            kernel_shape=w.kernel,
            strides=w.strides,
            dilations=w.dilations,
            ceil_mode=n.attr("ceil_mode"),
            _outputs=2,
            **pads,
        )
    if (w.padded or n.attr("ceil_mode")) and any(dilation > 1 for dilation in w.dilations):
        # All taps of a dilated window may lie in the padding. The maximum is then the lowest float, and its index
        # undefined.
        some = op.Greater(n.out.Y, op.const(float((n.X.dtype or ir.DataType.FLOAT).min), like=n.X))
        ct, indices = op.Where(some, ct, 0.0), op.Where(some, indices, op.const(0))
        return scatter_to(op, ct, indices, n.X)
    # MaxUnpool writes instead of adding, which is faster, and correct if no two windows share a maximum. ONNX Runtime's
    # CPU provider has it only for float32. With output_shape, MaxUnpool's own windows don't matter; windows of size one
    # are compatible with any padding.
    if w.disjoint and ct.dtype == ir.DataType.FLOAT:
        unit = [1] * len(w.kernel)
        return op.MaxUnpool(ct, indices, op.shape_of(n.X), kernel_shape=unit, strides=unit)
    return scatter_to(op, ct, indices, n.X)


@vjp("AveragePool", wrt=("X",))
def average_pool(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of AveragePool: each window distributes its cotangent evenly over the positions that it averaged."""
    w = windows_of(op, n, n.X, n.attr("kernel_shape"), n.out.Y)
    return _spread(op, n.X, _divide_by_window_size(op, n, ct, w), w)


@vjp("LpPool", wrt=("X",))
def lp_pool(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of Y = (sum |x|^p)^(1/p): ct_x = sign(x) |x|^(p-1) * sum over windows of ct Y^(1-p); zero where Y is zero."""
    w = windows_of(op, n, n.X, n.attr("kernel_shape"), n.out.Y)
    p = n.attr("p")
    return op.Mul(_power_slope(op, n.X, p), _spread(op, n.X, _over_norm(op, ct, n.out.Y, p), w))


@vjp("GlobalAveragePool", wrt=("X",))
def global_average_pool(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of GlobalAveragePool: distributes the cotangent of a channel evenly over its positions."""
    sizes = spatial_sizes(n.X)
    if sizes and None not in sizes:
        share = divide_by_count(op, ct, math.prod(int(size or 0) for size in sizes))
    else:
        count = op.ReduceProd(op.Shape(n.X, start=2), keepdims=0)
        share = divide_by_count(op, ct, op.Cast(count, to=counting_dtype(ct)))
    return op.Expand(share, op.shape_of(n.X))


@vjp("GlobalMaxPool", wrt=("X",))
def global_max_pool(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of GlobalMaxPool: passes the cotangent of a channel to its first maximum, like PyTorch's adaptive pooling."""
    # Located with a cumulative count, because ArgMax rejects channels without positions.
    highest, ct = (op.Reshape(value, [0, 0, 1]) for value in (n.out.Y, ct))
    reached = op.Equal(op.merge_from(n.X, 2), highest)
    count = op.CumSum(op.Cast(reached, to=ir.DataType.INT32), 2)
    first = op.And(reached, op.Equal(count, op.const(1, ir.DataType.INT32)))
    return op.reshape_like(op.Where(first, ct, 0.0), n.X)


@vjp("GlobalLpPool", wrt=("X",))
def global_lp_pool(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of GlobalLpPool, computed as LpPool with a single window."""
    p = n.attr("p")
    return op.Mul(_power_slope(op, n.X, p), _over_norm(op, ct, n.out.Y, p))


@vjp("MaxUnpool", wrt=("X",))
def max_unpool(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of MaxUnpool, Y.flat[I] = X: gathers the cotangent from the positions to which X was written.

    If several elements are written to the same position, the one that remains gets the cotangent.
    """
    # With output_shape, positions count in the output before it is padded to that shape according to the standard, but
    # in the padded output in ONNX Runtime (1.32). To support both, the op itself moves the elements' numbers, from 1
    # on: 0 marks positions that nothing was written to.
    if n.output_shape is None or _indexes_result(n):
        return op.Gather(op.Reshape(ct, [-1]), n.I)
    number = op.Add(positions(op, n.X), 1)
    high, low = (_unpooled(op, n, digit) for digit in (op.Div(number, _DIGIT), op.Mod(number, _DIGIT)))
    source = op.Reshape(op.Add(op.Mul(high, _DIGIT), low), [-1, 1])
    count = op.Add(op.Reshape(op.Size(n.X), [1]), 1)
    total = scatter_nd(op, count, source, op.Reshape(ct, [-1]))
    return op.reshape_like(op.Slice(total, [1], [_INT64_MAX], [0]), n.X)


def _unpooled(op: Emitter, n: NodeView, numbers: ir.Value) -> ir.Value:
    """Moves `numbers`, one per element of X, to the positions to which MaxUnpool writes these elements; 0 elsewhere.

    The result shows which element of X each position of Y comes from. The numbers are integers below 2²⁴, which float32
    represents exactly; the result is int64.
    """
    # In float32, the only dtype for which ONNX Runtime's CPU provider has MaxUnpool.
    attributes = {name: n.attr(name) for name in ("kernel_shape", "pads", "strides")}
    moved = op.MaxUnpool(op.Cast(numbers, to=ir.DataType.FLOAT), n.I, n.output_shape, **attributes)
    return op.Cast(moved, to=ir.DataType.INT64)


def _indexes_result(n: NodeView) -> bool:
    """True if the MaxUnpool's input I is known to hold flat positions in Y.

    This is so if a MaxPool computed I, and all kernel sizes and strides of the MaxUnpool are 1.
    """
    source, strides = n.I.producer(), n.attr("strides") or [1]
    return source is not None and source.op_type == "MaxPool" and {*n.attr("kernel_shape"), *strides} == {1}


def _spread(op: Emitter, x: ir.Value, ct: ir.Value, w: Windows) -> ir.Value:
    """Adds each window's cotangent to all positions of the window; a native kernel may replace the emitted function."""
    if w.pads is None or not op.can_call or not 1 <= len(w.kernel) <= 3 or ct.dtype == ir.DataType.DOUBLE:
        return _spread_by_convolution(op, x, ct, w)
    attributes = {
        "kernel_shape": w.kernel,
        "strides": w.strides,
        "dilations": w.dilations,
        "pads": w.pads,
    }
    shapes = {"ct": sizes_without_batch(ct), "x": sizes_without_batch(x)}
    # The body depends on these sizes, so each distinct pooling gets its own function.
    op_of = SpecializedOp(
        "WindowSpread",
        shapes,
        dict.fromkeys(attributes, ir.AttributeType.INTS),
        1,
        f"{attributes} {shapes}",
        lambda inner, ct, x, **_: _spread_by_convolution(inner, x, ct, w),
    )
    result: ir.Value = op.call(op_of, ct, x, **attributes)
    return result


def _spread_by_convolution(op: Emitter, x: ir.Value, ct: ir.Value, w: Windows) -> ir.Value:
    """Adds each window's cotangent to all positions of the window, with a transposed convolution with ones."""
    channels = (static_dims(x) or (None, None))[1]
    if channels is not None:
        ones = op.Expand(op.const(1, like=ct), [channels, 1, *w.kernel])
        return scatter_windows(op, ct, ones, w, x, channels, maybe_none=True)
    # If the number of channels is unknown, each plane becomes a sample with one channel: Conv needs a static weight.
    planes = op.Shape(op.Flatten(ct, axis=2), end=1)
    folded = op.Reshape(ct, op.Concat(planes, [1], op.Shape(ct, start=2), axis=0), allowzero=1)
    counts = [None] * len(w.kernel) if ct.shape is None else list(ct.shape)[2:]
    folded.shape = ir.Shape([None, 1, *counts])
    ones = op.Expand(op.const(1, like=ct), [1, 1, *w.kernel])
    return op.reshape_like(scatter_windows(op, folded, ones, w, x, maybe_none=True), x)


def _divide_by_window_size(op: Emitter, n: NodeView, ct: ir.Value, w: Windows) -> ir.Value:
    """Divides each window's cotangent by the number of positions that the window averaged.

    Positions in the padding count only with count_include_pad.
    """
    include = bool(n.attr("count_include_pad"))
    # If padding counts or there is none, all windows have the same size, except with ceil_mode, where the last window
    # may extend beyond the end.
    if (include or not w.padded) and not n.attr("ceil_mode"):
        return divide_by_count(op, ct, math.prod(w.kernel))
    # The number of positions inside is the product, over the axes, of the number of taps inside along each axis.
    rank = len(w.kernel)
    count = None
    for axis in range(rank):
        windows = op.Range(0, op.Squeeze(op.dim(ct, 2 + axis)), 1)
        first = op.Sub(op.Mul(windows, w.strides[axis]), _entry(op, w.begins, axis))
        taps = [[tap * w.dilations[axis]] for tap in range(w.kernel[axis])]
        positions = op.Add(first, taps)
        size = op.dim(n.X, 2 + axis)
        inside = op.Less(positions, op.Add(size, _entry(op, w.ends, axis)) if include else size)
        if not include:
            inside = op.And(inside, op.GreaterOrEqual(positions, 0))
        along = op.Reshape(
            op.ReduceSum(op.Cast(inside, to=counting_dtype(ct)), [0], keepdims=0),
            [-1] + [1] * (rank - 1 - axis),
        )
        count = along if count is None else op.Mul(count, along)
    assert count is not None
    return divide_by_count(op, ct, count)


def _entry(op: Emitter, sizes: Sizes, axis: int) -> ir.Value:
    """Returns the entry of `sizes` for one spatial axis, as int64 [1]."""
    return op.const([sizes[axis]]) if isinstance(sizes, tuple) else op.Gather(sizes, [axis])


def _power_slope(op: Emitter, x: ir.Value, p: int) -> ir.Value:
    """Returns sign(x) |x|^(p-1), the derivative of |x|^p / p."""
    # The common norms don't need Pow.
    if p == 2:
        return x
    if p == 1:
        return op.Sign(x)
    return op.Mul(op.Sign(x), op.Pow(op.Abs(x), op.const(float(p - 1), like=x)))


def _over_norm(op: Emitter, ct: ir.Value, norm: ir.Value, p: int) -> ir.Value:
    """Returns ct * norm^(1-p), or zero where the norm is zero."""
    if p == 1:
        return ct
    positive = op.Greater(norm, 0.0)
    safe = op.Where(positive, norm, 1.0)
    return op.Where(positive, op.Mul(ct, op.Pow(safe, op.const(float(1 - p), like=ct))), 0.0)
