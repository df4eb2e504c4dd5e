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
from onnxtrain.functions import DepthwisePlanes, SpecializedOp

_Body = Callable[[Emitter, ir.Value, ir.Value, ir.Value], ir.Value]
"""Emits the cotangent of one input: `(op, ct, x, weight)` -> cotangent."""

_FEW_CHANNELS = 16
"""Below this many channels per group, one matrix product over all taps is faster than one per tap (measured on CPU)."""

_MANY_TAPS = 16
"""From this many taps on, a Conv over swapped axes beats products of strided slices (measured on CPU, CUDA)."""

_LARGE_PLANE = 64 * 64
"""Above this many windows, cuDNN's Conv with the windows as kernel is slower than the matrix products."""

_FEW_COLUMNS = 32
"""Up to this many windows in a row, a depthwise weight gradient is faster with a product per row of taps (measured)."""


@vjp("Conv", wrt=("X", "W", "B"))
def conv(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Y[o] = sum_t W[t] X[o * stride + t * dilation - pad] + B, which is linear in X, W and B."""
    # The weight's size must be static, because the number of taps determines the number of nodes.
    shape = n.static(n.W)
    w = windows_of(op, n, n.X, shape[2:], n.out.Y)
    group = n.attr("group")
    bodies: dict[str, _Body] = {
        "X": lambda op, ct, x, weight: _input_cotangent(op, ct, x, weight, w, shape, group),
        "W": lambda op, ct, x, weight: _kernel_cotangent(op, ct, x, w, shape, group),
    }
    return _cotangents(op, n, ct, w, "Convolution", bodies)


def _input_cotangent(
    op: Emitter, ct: ir.Value, x: ir.Value, weight: ir.Value, w: Windows, shape: Sequence[int], group: int
) -> ir.Value:
    """Returns the cotangent of a Conv's input."""
    planes = _small_planes(x, ct, w, shape, group)
    if planes is not None:
        return planes.input_cotangent(op, ct, weight)
    return scatter_windows(op, ct, weight, w, x, group)


def _small_planes(
    value: ir.Value, windowed: ir.Value, w: Windows, shape: Sequence[int], group: int
) -> DepthwisePlanes | None:
    """Returns the geometry if the windows are those of a depthwise convolution that matrix products compute faster."""
    if w.pads is None:
        return None
    geometry = {"strides": w.strides, "dilations": w.dilations, "pads": w.pads, "group": [group]}
    return DepthwisePlanes.of(value, windowed, shape, geometry)


def _cotangents(
    op: Emitter, n: NodeView, ct: ir.Value, w: Windows, function: str, bodies: dict[str, _Body]
) -> Cotangents:
    """Returns the cotangents of X, W and B; calls a model-local function where a native kernel may exist.

    Args:
        op: emitter.
        n: a Conv or ConvTranspose node.
        ct: cotangent of the output.
        w: the windows.
        function: prefix of the functions' names, e.g. "Convolution" for "ConvolutionWeightGradient".
        bodies: functions that emit the cotangents of X and W, by input name.
    """
    if w.pads is not None and _has_kernel(op, n, w, ct) and (n.needs("X") or n.needs("W")):
        return _function_cotangents(op, n, ct, w, function, bodies)
    grads: dict[str, ir.Value | None] = {
        name: body(op, ct, n.X, n.W) for name, body in bodies.items() if n.needs(name)
    }
    return grads | ({"B": _sum_over_positions(op, n, ct)} if n.needs("B") else {})


def _has_kernel(op: Emitter, n: NodeView, w: Windows, ct: ir.Value) -> bool:
    """True if native kernels support this gradient.

    Also true for float16 and bfloat16, because a later pass can compute these gradients in float32.
    """
    return (
        op.can_call
        and 0 not in spatial_sizes(ct)
        and 0 not in spatial_sizes(n.X)
        and ct.dtype in (ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.FLOAT16)
        and 1 <= len(w.kernel) <= 3
    )


def _function_cotangents(
    op: Emitter, n: NodeView, ct: ir.Value, w: Windows, name: str, bodies: dict[str, _Body]
) -> dict[str, ir.Value | None]:
    """Returns the cotangents of X, W and B, computed by a model-local function, which a native kernel can replace.

    One call of the function returns all cotangents that are needed. If W needs none, the cotangent of B is computed
    outside of the function.

    Args:
        op: emitter.
        n: a Conv or ConvTranspose node.
        ct: cotangent of the output.
        w: the windows.
        name: prefix of the function's name, e.g. "Convolution" for "ConvolutionWeightGradient".
        bodies: functions that emit the cotangents of X and W, by input name.
    """
    shape, group = n.static(n.W), n.attr("group")
    wanted = [name for name in ("X", "W", "B") if n.needs(name)]
    grads: dict[str, ir.Value | None] = {}
    # No kernel computes only the input's and the bias's cotangent, so without W the bias is a separate sum.
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
    # Equal convolutions of a model share one function: its key contains everything that the body depends on.
    results = op.call(op_of, ct, n.X, n.W, **attributes, _outputs=len(wanted))
    # Rules of earlier nodes emit fewer nodes where sizes are known.
    for wrt, result in zip(wanted, results, strict=True):
        primal = {"X": n.X, "W": n.W}.get(wrt)
        result.shape = None if primal is None else primal.shape
    return grads | dict(zip(wanted, results, strict=True))


@vjp("ConvTranspose", wrt=("X", "W", "B"))
def conv_transpose(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of ConvTranspose, the adjoint of Conv in X: ct_X = Conv(ct, W); ct_W as for Conv, with X and Y swapped."""
    shape = n.static(n.W)
    w = _transposed_windows(n, shape[2:])
    group = n.attr("group")
    # The windows are defined by X's positions: runtimes reject an output_padding that reaches the stride.
    attributes = {"strides": w.strides, "dilations": w.dilations, "group": group, "kernel_shape": w.kernel}
    bodies: dict[str, _Body] = {
        "X": lambda op, ct, x, weight: op.Conv(pad(op, ct, w), weight, **attributes),
        "W": lambda op, ct, x, weight: _kernel_cotangent(op, x, ct, w, shape, group),
    }
    return _cotangents(op, n, ct, w, "ConvolutionTranspose", bodies)


def _transposed_windows(n: NodeView, kernel: Sequence[int]) -> Windows:
    """Returns the windows of a ConvTranspose, which slide over its output.

    Their padding is the attribute `pads`. With output_shape or auto_pad SAME_*, it is computed as the ONNX schema
    specifies.
    """
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
    # With auto_pad SAME, the output has input * stride positions. With output_shape, the sizes are given.
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
    # As in the schema, the smaller half is at the beginning for SAME_UPPER, otherwise at the end.
    begins, ends = (small, large) if n.attr("auto_pad") == "SAME_UPPER" else (large, small)
    return Windows(w.kernel, strides, dilations, begins, ends)


def _kernel_cotangent(
    op: Emitter, windowed: ir.Value, value: ir.Value, w: Windows, shape: Sequence[int], group: int
) -> ir.Value:
    """Returns dW[m, c, t] = sum_(batch, o) windowed[m, o] * value[c, o * stride + t * dilation - pad].

    Computed with matrix products over slices of the padded value, which ONNX Runtime's CPU provider runs faster than a
    Conv of transposed operands, except for kernels with many strided taps.

    Args:
        op: emitter.
        windowed: `[batch, M, *counts]`.
        value: `[batch, C, *spatial]`, without padding.
        w: the windows.
        shape: shape of the result, `[M, C / group, *kernel]`.
        group: number of channel groups; row m uses only the channels of its group.
    """
    rows, columns, taps = shape[0] // group, shape[1], w.kernel
    # Depthwise: matrix products with one row and one column per channel would be all overhead.
    planes = _small_planes(value, windowed, w, shape, group)
    if planes is not None:
        sums = planes.weight_cotangent(op, windowed, value)
        return op.Reshape(_zero_if_empty(op, sums, windowed), list(shape))
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
    """True if a Conv computes the weight's cotangent faster than matrix products with one strided slice per tap.

    Args:
        counts: number of windows along each axis; None for symbolic ones.
        w: the windows.
    """
    if not counts or None in counts or math.prod(count or 0 for count in counts) > _LARGE_PLANE:
        return False
    # Slices support negative padding, which crops the value; a Conv doesn't.
    fits = w.pads is not None and min(w.pads) >= 0
    return fits and min(w.strides) > 1 and math.prod(w.kernel) >= _MANY_TAPS


def _dense_by_convolution(
    op: Emitter, windowed: ir.Value, value: ir.Value, w: Windows, shape: Sequence[int]
) -> ir.Value:
    """Returns the weight's cotangent for one group, computed with a Conv in which batch and channels are swapped.

    The Conv's kernel is `windowed`, dilated by `stride`; it slides over `value` with stride `dilation`.
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
    # Positions at the end of an axis that no window covers would appear as additional taps.
    sums = op.Slice(sums, [0] * (rank - 2), list(w.kernel), list(range(2, rank)))
    return op.Reshape(_zero_if_empty(op, op.Transpose(sums, perm=swap), windowed), list(shape))


def _is_small(counts: Sequence[int | None], shape: Sequence[int]) -> bool:
    """True if samples have so few windows that one product over the batch is faster than one per sample.

    Args:
        counts: number of windows along each axis; None for symbolic ones.
        shape: shape of the weight.
    """
    # The summed products [M, C * taps] would be more than twice as large as their operands.
    if not counts or None in counts:
        return False
    products, operands = math.prod(shape), math.prod(count or 0 for count in counts) * (shape[0] + shape[1])
    return products > 2 * operands


def _dense_of_whole_batch(
    op: Emitter, windowed: ir.Value, value: ir.Value, w: Windows, shape: Sequence[int]
) -> ir.Value:
    """Returns the weight's cotangent for one group, computed with a single matrix product over all samples and taps."""
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
    """Returns dW of a depthwise convolution, `[channels, taps]`, with an elementwise product and a sum per tap."""
    axes = [0, *range(2, 2 + len(w.kernel))]
    sums = [op.ReduceSum(op.Mul(windowed, x), axes, keepdims=0) for x in tap_slices(op, padded, w)]
    return op.Transpose(op.Reshape(_concat(op, sums, 0), [-1, channels]), perm=[1, 0])


def _depthwise_by_rows(
    op: Emitter, windowed: ir.Value, value: ir.Value, w: Windows, channels: int
) -> ir.Value | None:
    """Returns dW of a depthwise convolution, `[channels, taps]`, with a matrix product per row of taps.

    A row consists of the taps that differ only along the last axis. Along the other axes, they all read the same
    strided slice x of `value`. The matrix product computes G[c, o, i]: the sum of windowed[c, ..., o] * x[c, ..., i]
    over the batch and the other axes. In window o, tap j of the row reads position i = o * stride + j * dilation, so
    the tap's gradient is the sum over a diagonal of G. The diagonals become columns when the flattened G is wrapped
    into rows that are `stride` longer. Padding along the last axis is applied to G, which is far smaller than `value`.

    Only a small part of G is used, but with few windows along the last axis, this is still twice as fast as
    `_depthwise_by_taps`.

    Returns:
        dW, or None if the last axis has many windows or a symbolic size, or the padding is only known at run time.
    """
    count, size = (sizes[-1] if (sizes := spatial_sizes(v)) else None for v in (windowed, value))
    if count is None or size is None or count > _FEW_COLUMNS:
        return None
    # Padding computed at run time would make the sizes of G symbolic.
    if not isinstance(w.begins, tuple) or not isinstance(w.ends, tuple):
        return None
    pads, stride, extent = [w.begins[-1], w.ends[-1]], w.strides[-1], w.extents[-1]
    width = size + sum(pads)
    # Windows over all axes but the last, which the matrix product covers. `pad` needs an entry for each axis: 0 for the
    # last.
    others = Windows(w.kernel[:-1], w.strides[:-1], w.dilations[:-1], (*w.begins[:-1], 0), (*w.ends[:-1], 0))
    swap = [1, 0, *range(2, 2 + len(w.kernel))]
    left = op.Transpose(op.Reshape(op.Transpose(windowed, perm=swap), [channels, -1, count]), perm=[0, 2, 1])
    rows = []
    for x in tap_slices(op, pad(op, op.Transpose(value, perm=swap), others), others):
        product = op.MatMul(left, op.Reshape(x, [channels, -1, size]))
        padded = op.Pad(product, [0, 0, pads[0], 0, 0, pads[1]]) if any(pads) else product
        wrapped = op.Pad(op.Reshape(padded, [channels, count * width]), [0, 0, 0, count * stride])
        skewed = op.Reshape(wrapped, [channels, count, width + stride])
        diagonals = op.Slice(skewed, [0], [extent], [2], [w.dilations[-1]])
        rows.append(op.ReduceSum(diagonals, [1], keepdims=0))
    return _zero_if_empty(op, _concat(op, rows, 1), windowed)


def _split_groups(op: Emitter, value: ir.Value, channels: int, group: int) -> ir.Value:
    """Reshapes `[batch, group * channels, *spatial]` to `[batch * group, channels, *spatial]`."""
    if group == 1:
        return value
    shape = op.Concat(op.Mul(op.dim(value, 0), [group]), [channels], op.Shape(value, start=2), axis=0)
    return op.Reshape(value, shape, allowzero=1)


def _flat_shape(op: Emitter, value: ir.Value) -> list[int] | ir.Value:
    """Returns the shape `[batch, channels, positions]` for a Reshape that flattens the spatial axes."""
    # Not -1, which is undefined for an empty batch.
    sizes = spatial_sizes(value)
    if sizes and None not in sizes:
        return [0, 0, math.prod(size or 0 for size in sizes)]
    return op.Concat([0, 0], op.Shape(op.Flatten(value, axis=2), start=1), axis=0)


def _zero_if_empty(op: Emitter, result: ir.Value, factor: ir.Value) -> ir.Value:
    """Returns `result`, a sum of products with `factor`, or zeros if `factor` is empty.

    ONNX Runtime may leave such a `result` uninitialized.
    """
    # ONNX Runtime (1.31.1) leaves the output of a batched MatMul uninitialized if one factor is transposed and the
    # summed axis has size 0.
    if all(static_dims(factor) or [0]):
        return result
    return op.Where(op.Cast(op.Size(factor), to=ir.DataType.BOOL), result, 0.0)


def _concat(op: Emitter, values: list[ir.Value], axis: int) -> ir.Value:
    return op.Concat(*values, axis=axis) if len(values) > 1 else values[0]


def _sum_over_positions(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """Sums `ct` over every axis except the channel axis."""
    return op.ReduceSum(ct, [0, *range(2, n.rank(n.X))], keepdims=0)
