"""Differentiates Conv and ConvTranspose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.autodiff.rules._windows import (
    Windows,
    pad,
    scatter_windows,
    sizes_without_batch,
    spatial_sizes,
    tap_slices,
    windows_of,
)
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import SpecializedOp

_Body = Callable[[Emitter, ir.Value, ir.Value, ir.Value], ir.Value]
"""Writes the cotangent of one input: `(op, ct, x, weight)` -> cotangent."""

_FEW_CHANNELS = 16
"""Below this many channels per group, one product over all taps beats one per tap (measured on CPU)."""

_MANY_TAPS = 16
"""From this many taps on, a Conv over swapped axes beats products of strided slices (measured on CPU, CUDA)."""

_LARGE_PLANE = 64 * 64
"""Above this many windows, cuDNN computes a Conv that has them as its kernel slower than the products."""

_FEW_COLUMNS = 32
"""Up to this many windows in a row, products of rows beat products of taps in depthwise convolution (measured)."""


@vjp("Conv", wrt=("X", "W", "B"))
def conv(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """Y[o] = sum_t W[t] X[o * stride + t * dilation - pad] + B: linear in X, W and B."""
    # The number of taps decides how many nodes are written, so the weight's size must be known.
    shape = n.static(n.W)
    w = windows_of(op, n, n.X, shape[2:], n.out.Y)
    group = n.attr("group")
    bodies: dict[str, _Body] = {
        "X": lambda op, ct, x, weight: scatter_windows(op, ct, weight, w, x, group),
        "W": lambda op, ct, x, weight: _kernel_cotangent(op, ct, x, w, shape, group),
    }
    return _cotangents(op, n, ct, w, "Convolution", bodies)


def _cotangents(
    op: Emitter, n: NodeView, ct: ir.Value, w: Windows, function: str, bodies: dict[str, _Body]
) -> Cotangents:
    """Returns the cotangents of X, W and B, as results of a function if native kernels may know the gradient.

    Args:
        op: emitter.
        n: a Conv or ConvTranspose.
        ct: cotangent of its result.
        w: its windows.
        function: begins the names of the functions, e.g. "Convolution" for "ConvolutionWeightGradient".
        bodies: write the cotangents of X and W.
    """
    if w.pads is not None and _has_kernel(op, n, w, ct) and (n.needs("X") or n.needs("W")):
        return _in_functions(op, n, ct, w, function, bodies)
    grads: dict[str, ir.Value | None] = {
        name: body(op, ct, n.X, n.W) for name, body in bodies.items() if n.needs(name)
    }
    return grads | ({"B": _sum_over_positions(op, n, ct)} if n.needs("B") else {})


def _has_kernel(op: Emitter, n: NodeView, w: Windows, ct: ir.Value) -> bool:
    """Says if native kernels know the gradient as a function."""
    # Half precision is included, as a later pass can have these products computed in float32.
    return (
        op.can_call
        and 0 not in spatial_sizes(ct)
        and 0 not in spatial_sizes(n.X)
        and ct.dtype in (ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.FLOAT16)
        and 1 <= len(w.kernel) <= 3
    )


def _in_functions(
    op: Emitter, n: NodeView, ct: ir.Value, w: Windows, name: str, bodies: dict[str, _Body]
) -> dict[str, ir.Value | None]:
    """Returns the cotangents as results of one function, in whose place a native kernel can run."""
    shape, group = n.static(n.W), n.attr("group")
    wanted = [name for name in ("X", "W", "B") if n.needs(name)]
    grads: dict[str, ir.Value | None] = {}
    # There is no kernel of input and bias without the weight: the bias is a sum by itself then.
    if "W" not in wanted and "B" in wanted:
        grads["B"] = _sum_over_positions(op, n, ct)
        wanted.remove("B")

    def body(
        inner: Emitter, ct: ir.Value, x: ir.Value, weight: ir.Value, **_: object
    ) -> tuple[ir.Value, ...]:
        axes = [0, *range(2, len(shape))]
        return tuple(
            inner.ReduceSum(ct, axes, keepdims=0) if wrt == "B" else bodies[wrt](inner, ct, x, weight)
            for wrt in wanted
        )

    attributes = {"strides": w.strides, "dilations": w.dilations, "pads": w.pads, "group": group}
    shapes = {"ct": sizes_without_batch(ct), "x": sizes_without_batch(n.X), "w": ir.Shape(shape)}
    kind = {"X": "InputGradient", "W": "WeightGradient"}.get("".join(wanted).removesuffix("B"), "Gradient")
    op_of = SpecializedOp(
        name + kind,
        shapes,
        {name: ir.AttributeType.INT if name == "group" else ir.AttributeType.INTS for name in attributes},
        len(wanted),
        f"{wanted} {attributes} {shapes}",
        body,
    )
    # Equal convolutions of a model share one function: its key is all that the body depends on.
    results = op.call(op_of, ct, n.X, n.W, **attributes, _outputs=len(wanted))
    # Rules of the nodes before this one write less where sizes are known.
    for wrt, result in zip(wanted, results, strict=True):
        primal = {"X": n.X, "W": n.W}.get(wrt)
        result.shape = None if primal is None else primal.shape
    return grads | dict(zip(wanted, results, strict=True))


@vjp("ConvTranspose", wrt=("X", "W", "B"))
def conv_transpose(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """ConvTranspose is the adjoint of Conv in X: ct_X is a Conv of ct, and ct_W that of Conv with X and Y swapped."""
    shape = n.static(n.W)
    w = _transposed_windows(n, shape[2:])
    group = n.attr("group")
    # As many windows as X has positions: runtimes refuse output_padding of a stride or more.
    attributes = {"strides": w.strides, "dilations": w.dilations, "group": group, "kernel_shape": w.kernel}
    bodies: dict[str, _Body] = {
        "X": lambda op, ct, x, weight: op.Conv(pad(op, ct, w), weight, **attributes),
        "W": lambda op, ct, x, weight: _kernel_cotangent(op, x, ct, w, shape, group),
    }
    return _cotangents(op, n, ct, w, "ConvolutionTranspose", bodies)


def _transposed_windows(n: NodeView, kernel: Sequence[int]) -> Windows:
    """Returns the windows of a ConvTranspose, which slide over its output, with the padding that the schema derives."""
    rank = len(kernel)
    strides = tuple(n.attr("strides") or [1] * rank)
    dilations = tuple(n.attr("dilations") or [1] * rank)
    extra = n.attr("output_padding") or [0] * rank
    wanted = n.attr("output_shape")
    pads = tuple(n.attr("pads") or [0] * 2 * rank)
    same = n.attr("auto_pad") in ("SAME_UPPER", "SAME_LOWER")
    w = Windows(tuple(kernel), strides, dilations, pads[:rank], pads[rank:])
    if wanted is None and not same:
        return w
    # auto_pad SAME: the output has input * stride positions. With output_shape the sizes are given.
    if wanted is None:
        totals = [p + e - s for p, e, s in zip(extra, w.extents, strides, strict=True)]
    else:
        sizes = n.static(n.X, range(2, 2 + rank))
        totals = [
            s * (size - 1) + p + e - out
            for s, size, p, e, out in zip(strides, sizes, extra, w.extents, wanted[-rank:], strict=True)
        ]
    small = tuple(max(t, 0) // 2 for t in totals)
    large = tuple(max(t, 0) - s for t, s in zip(totals, small, strict=True))
    # As the schema splits the total: the smaller half before for SAME_UPPER, after it otherwise.
    begins, ends = (small, large) if n.attr("auto_pad") == "SAME_UPPER" else (large, small)
    return Windows(w.kernel, strides, dilations, begins, ends)


def _kernel_cotangent(
    op: Emitter, windowed: ir.Value, value: ir.Value, w: Windows, shape: Sequence[int], group: int
) -> ir.Value:
    """Returns dW[m, c, t] = sum_(batch, o) windowed[m, o] * value[c, o * stride + t * dilation - pad].

    Written as matrix products over slices of the padded value, which ONNX Runtime's CPU runs faster than a Conv of
    transposed operands, but for kernels of many taps that are some positions apart.

    Args:
        op: emitter.
        windowed: `[batch, M, *counts]`.
        value: `[batch, C, *spatial]`, without padding.
        w: the windows.
        shape: of the result, `[M, C / group, *kernel]`.
        group: number of groups of channels; row m sees the channels of its group only.
    """
    rows, columns, taps = shape[0] // group, shape[1], w.kernel
    # Depthwise: products of one row and one column per channel would be all overhead.
    if rows == columns == 1:
        result = _depthwise_by_rows(op, windowed, value, w, group)
        if result is None:
            result = _depthwise_by_taps(op, windowed, pad(op, value, w), w, group)
        return op.Reshape(result, list(shape))
    if group == 1 and _is_many_strided_taps(spatial_sizes(windowed), w):
        return _dense_by_convolution(op, windowed, value, w, shape)
    if group == 1 and _is_small(spatial_sizes(windowed), shape):
        return _dense_of_whole_batch(op, windowed, value, w, shape)
    padded = pad(op, value, w)
    flat = _flat_shape(op, windowed)
    left = op.Reshape(_split_groups(op, windowed, rows, group), flat)
    slices = tap_slices(op, _split_groups(op, padded, columns, group), w)
    if columns < _FEW_CHANNELS:
        blocks = [op.Reshape(_concat(op, list(slices), 1), flat)]
    else:
        blocks = [op.Reshape(x, flat) for x in slices]
    products = _concat(op, [op.MatMul(left, op.Transpose(b, perm=[0, 2, 1])) for b in blocks], 2)
    result = op.ReduceSum(op.Reshape(products, [-1, shape[0], math.prod(taps) * columns]), [0], keepdims=0)
    result = op.Reshape(result, [shape[0], *taps, columns])
    rank = len(shape)
    return op.Transpose(result, perm=[0, rank - 1, *range(1, rank - 1)])


def _is_many_strided_taps(counts: Sequence[int | None], w: Windows) -> bool:
    """Says if slices, one per tap and of elements that lie apart, would take longer than one Conv."""
    if not counts or None in counts or math.prod(count or 0 for count in counts) > _LARGE_PLANE:
        return False
    # Slices can be of a value that negative padding makes smaller, a Conv cannot.
    fits = w.pads is not None and min(w.pads) >= 0
    return fits and min(w.strides) > 1 and math.prod(w.kernel) >= _MANY_TAPS


def _dense_by_convolution(
    op: Emitter, windowed: ir.Value, value: ir.Value, w: Windows, shape: Sequence[int]
) -> ir.Value:
    """As `_kernel_cotangent` for one group: a Conv whose batch are the channels, and whose channels are the samples.

    Its kernel are the windows, `stride` apart, and it slides over the taps, `dilation` apart.
    """
    rank = len(shape)
    swap = [1, 0, *range(2, rank)]
    sums = op.Conv(
        op.Transpose(value, perm=swap),
        op.Transpose(windowed, perm=swap),
        dilations=w.strides,
        strides=w.dilations,
        pads=w.pads,
    )
    # The end of an axis that no window reaches looks like more taps.
    sums = op.Slice(sums, [0] * (rank - 2), list(w.kernel), list(range(2, rank)))
    return op.Reshape(_zero_if_empty(op, op.Transpose(sums, perm=swap), windowed), list(shape))


def _is_small(counts: Sequence[int | None], shape: Sequence[int]) -> bool:
    """Says if samples have so few windows that one product over the whole batch beats the sum of one per sample."""
    # The products [M, C * taps] that are added up would be more than twice as large as their operands.
    if not counts or None in counts:
        return False
    products, operands = math.prod(shape), math.prod(count or 0 for count in counts) * (shape[0] + shape[1])
    return products > 2 * operands


def _dense_of_whole_batch(
    op: Emitter, windowed: ir.Value, value: ir.Value, w: Windows, shape: Sequence[int]
) -> ir.Value:
    """As `_kernel_cotangent` for one group: one product over all samples and taps, of operands with channels first."""
    rank = len(shape)
    swap = [1, 0, *range(2, rank)]
    left = op.Reshape(op.Transpose(windowed, perm=swap), [shape[0], -1])
    slices = list(tap_slices(op, op.Transpose(pad(op, value, w), perm=swap), w))
    right = op.Reshape(_concat(op, slices, 0), [math.prod(w.kernel) * shape[1], -1])
    result = _zero_if_empty(op, op.MatMul(left, op.Transpose(right, perm=[1, 0])), windowed)
    return op.Transpose(
        op.Reshape(result, [shape[0], *w.kernel, shape[1]]), perm=[0, rank - 1, *range(1, rank - 1)]
    )


def _depthwise_by_taps(
    op: Emitter, windowed: ir.Value, padded: ir.Value, w: Windows, channels: int
) -> ir.Value:
    """Returns dW of a depthwise convolution, `[channels, taps]`: an elementwise product and a sum per tap."""
    axes = [0, *range(2, 2 + len(w.kernel))]
    sums = [op.ReduceSum(op.Mul(windowed, x), axes, keepdims=0) for x in tap_slices(op, padded, w)]
    return op.Transpose(op.Reshape(_concat(op, sums, 0), [-1, channels]), perm=[1, 0])


def _depthwise_by_rows(
    op: Emitter, windowed: ir.Value, value: ir.Value, w: Windows, channels: int
) -> ir.Value | None:
    """Returns dW of a depthwise convolution, `[channels, taps]`: a matrix product per row of taps.

    For the taps t of all axes but the last, G[c, o, i] = sum windowed[c, ..., o] * value_t[c, ..., i] over batch
    and the other axes. Tap j of the last axis has read i = o * stride + j * dilation for window o, so its gradient
    is the sum of a diagonal of G: a column, once the rows of G are `stride` longer and wrapped around. Padding of
    the last axis is that of G, which is far smaller than the value.

    Only one entry of G in `size / taps` is needed, and still this takes half the time for short rows. Returns None for
    rows that are long or of symbolic length.
    """
    count, size = (sizes[-1] if (sizes := spatial_sizes(v)) else None for v in (windowed, value))
    if count is None or size is None or count > _FEW_COLUMNS:
        return None
    # Padding of run time would make the sizes of G symbolic.
    if not isinstance(w.begins, tuple) or not isinstance(w.ends, tuple):
        return None
    pads, stride, extent = [w.begins[-1], w.ends[-1]], w.strides[-1], w.extents[-1]
    width = size + sum(pads)
    # Windows over all axes but the last, which the product covers. `pad` wants an entry for each axis: 0 for the last.
    others = Windows(w.kernel[:-1], w.strides[:-1], w.dilations[:-1], (*w.begins[:-1], 0), (*w.ends[:-1], 0))
    swap = [1, 0, *range(2, 2 + len(w.kernel))]
    left = op.Transpose(op.Reshape(op.Transpose(windowed, perm=swap), [channels, -1, count]), perm=[0, 2, 1])
    rows = []
    for x in tap_slices(op, pad(op, op.Transpose(value, perm=swap), others), others):
        product = op.MatMul(left, op.Reshape(x, [channels, -1, size]))
        padded = op.Pad(product, pads, None, [2]) if any(pads) else product
        wrapped = op.Pad(op.Reshape(padded, [channels, count * width]), [0, count * stride], None, [1])
        skewed = op.Reshape(wrapped, [channels, count, width + stride])
        diagonals = op.Slice(skewed, [0], [extent], [2], [w.dilations[-1]])
        rows.append(op.ReduceSum(diagonals, [1], keepdims=0))
    return _zero_if_empty(op, _concat(op, rows, 1), windowed)


def _split_groups(op: Emitter, value: ir.Value, channels: int, group: int) -> ir.Value:
    """Returns `[batch, group * channels, *spatial]` as `[batch * group, channels, *spatial]`."""
    if group == 1:
        return value
    shape = op.Concat(op.Mul(op.dim(value, 0), [group]), [channels], op.Shape(value, start=2), axis=0)
    return op.Reshape(value, shape, allowzero=1)


def _flat_shape(op: Emitter, value: ir.Value) -> list[int] | ir.Value:
    """Returns the shape `[batch, channels, positions]` for a Reshape that joins the spatial axes."""
    # Not -1: for a batch of no samples it has no value.
    sizes = spatial_sizes(value)
    if sizes and None not in sizes:
        return [0, 0, math.prod(size or 0 for size in sizes)]
    return op.Concat([0, 0], op.Shape(op.Flatten(value, axis=2), start=1), axis=0)


def _zero_if_empty(op: Emitter, result: ir.Value, factor: ir.Value) -> ir.Value:
    """Returns `result`, or zeros if `factor` has no elements."""
    # ONNX Runtime (1.31.1) leaves the result of a batch of products unset if one factor is transposed and the axis that
    # is summed over has size 0.
    if all(static_dims(factor) or [0]):
        return result
    return op.Where(op.Cast(op.Size(factor), to=ir.DataType.BOOL), result, 0.0)


def _concat(op: Emitter, values: list[ir.Value], axis: int) -> ir.Value:
    return op.Concat(*values, axis=axis) if len(values) > 1 else values[0]


def _sum_over_positions(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """Sums over every axis but the channels."""
    return op.ReduceSum(ct, [0, *range(2, n.rank(n.X))], keepdims=0)
