"""The ONNX reference evaluator, corrected where it does not compute in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator as OnnxReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_grid_sample import GridSample as OnnxGridSample
from onnx.reference.ops.op_loop import Loop as OnnxLoop
from onnx.reference.ops.op_resize import Resize as OnnxResize
from onnx.reference.ops.op_roi_align import RoiAlign as OnnxRoiAlign

from autodiff.contrib_reference import CONTRIB


class Standard(OpRun):
    """An op of ONNX itself."""

    op_domain = ""


class Erf(Standard):
    """Erf in the dtype of its input; onnx rounds it to float32."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (torch.erf(torch.from_numpy(np.array(x))).numpy(),)


class ConvTranspose(Standard):
    """ConvTranspose tap by tap; onnx's handles neither groups nor `output_shape` without `auto_pad`."""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        b: np.ndarray | None = None,
        auto_pad: str | None = None,
        dilations: list[int] | None = None,
        group: int | None = None,
        kernel_shape: list[int] | None = None,
        output_padding: list[int] | None = None,
        output_shape: list[int] | None = None,
        pads: list[int] | None = None,
        strides: list[int] | None = None,
    ) -> tuple[np.ndarray]:
        kernel = np.array(w.shape[2:])
        rank, group = len(kernel), group or 1
        strides, dilations = np.array(strides or [1] * rank), np.array(dilations or [1] * rank)
        extra, counts = np.array(output_padding or [0] * rank), np.array(x.shape[2:])
        full = (counts - 1) * strides + (kernel - 1) * dilations + 1 + extra
        begins, ends = np.reshape(pads or [0] * 2 * rank, (2, rank))
        if output_shape or (auto_pad or "").startswith("SAME"):
            total = np.maximum(full - (output_shape or counts * strides), 0)
            halves = total // 2, total - total // 2
            begins, ends = halves if auto_pad == "SAME_UPPER" else halves[::-1]
            # No window reaches what a larger `output_shape` asks for.
            full = np.maximum(full, output_shape or full)
        grouped = w.reshape(group, -1, *w.shape[1:])
        out = np.zeros((x.shape[0], group, w.shape[1], *full), x.dtype)
        for tap in np.ndindex(*kernel):
            first = np.array(tap) * dilations
            where = tuple(map(slice, first, first + counts * strides, strides))
            out[(..., *where)] += np.einsum(
                "ngc...,gcm->ngm...", x.reshape(x.shape[0], group, -1, *counts), grouped[(..., *tap)]
            )
        out = out.reshape(x.shape[0], -1, *full)
        out = out[(..., *map(slice, begins, full - ends))]
        return (out if b is None else out + b.reshape(-1, *[1] * rank),)


def _pads(
    x: np.ndarray,
    kernel_shape: list[int],
    *,
    auto_pad: str | None = None,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
    **_: Any,
) -> np.ndarray:
    """The padding of a pooling op before and after each spatial axis, `[rank, 2]`."""
    rank = len(kernel_shape)
    if not (auto_pad or "").startswith("SAME"):
        return np.reshape(pads or [0] * 2 * rank, (2, rank)).T
    step, sizes = np.array(strides or [1] * rank), np.array(x.shape[2:])
    extents = (np.array(kernel_shape) - 1) * np.array(dilations or [1] * rank) + 1
    total = np.maximum((-(-sizes // step) - 1) * step + extents - sizes, 0)
    halves = total // 2, total - total // 2
    return np.transpose(halves if auto_pad == "SAME_UPPER" else halves[::-1])


def _read_windows(
    x: np.ndarray,
    fill: float,
    kernel_shape: list[int],
    *,
    auto_pad: str | None = None,
    ceil_mode: int | None = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> np.ndarray:
    """Return the elements in each window of a pooling op, `[taps, batch, channels, *counts]`; `fill` outside of x."""
    rank = len(kernel_shape)
    sizes, kernel = np.array(x.shape[2:]), np.array(kernel_shape)
    begins, ends = np.transpose(
        _pads(x, kernel_shape, auto_pad=auto_pad, dilations=dilations, pads=pads, strides=strides)
    )
    strides, dilations = np.array(strides or [1] * rank), np.array(dilations or [1] * rank)
    extents = (kernel - 1) * dilations + 1
    if (auto_pad or "").startswith("SAME"):
        counts = -(-sizes // strides)
    else:
        room = sizes + begins + ends - extents
        counts = (-(-room // strides) if ceil_mode else room // strides) + 1
        counts -= (counts - 1) * strides >= sizes + begins  # no window starts behind the input
    reach = np.maximum((counts - 1) * strides + extents - begins - sizes, 0)
    x = np.pad(x, [(0, 0), (0, 0), *zip(begins, reach, strict=True)], constant_values=fill)
    starts = [np.array(tap) * dilations for tap in np.ndindex(*kernel)]
    return np.stack([x[(..., *map(slice, s, s + (counts - 1) * strides + 1, strides))] for s in starts])


class MaxPool(Standard):
    """MaxPool; onnx's Indices are wrong for oblong kernels, padding and storage_order."""

    def _run(
        self, x: np.ndarray, kernel_shape: Any = None, storage_order: int | None = None, **window: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        values = _read_windows(x, -np.inf, kernel_shape, **window)
        spatial = np.arange(np.prod(x.shape[2:])).reshape(x.shape[2:], order="F" if storage_order else "C")
        planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * spatial.ndim)
        positions = _read_windows(planes * spatial.size + spatial, -1, kernel_shape, **window)
        first = values.argmax(0)[None]
        return np.take_along_axis(values, first, 0)[0], np.take_along_axis(positions, first, 0)[0]


class AveragePool(Standard):
    """AveragePool; onnx's rounds to float32."""

    def _run(
        self, x: np.ndarray, kernel_shape: Any = None, count_include_pad: int | None = None, **window: Any
    ) -> tuple[np.ndarray]:
        ones = np.ones_like(x)
        if count_include_pad:
            pads = _pads(x, kernel_shape, **window)
            window = {**window, "pads": None, "auto_pad": None}
            x, ones = (np.pad(v, [(0, 0), (0, 0), *pads], constant_values=f) for v, f in ((x, 0), (ones, 1)))
        sums, counts = (_read_windows(v, 0.0, kernel_shape, **window).sum(0) for v in (x, ones))
        return (sums / counts,)


class GatherElements(Standard):
    """GatherElements; onnx's takes at most 32 elements along the axis with numpy 1.26."""

    def _run(self, x: np.ndarray, indices: np.ndarray, axis: int | None = None) -> tuple[np.ndarray]:
        places = list(np.indices(indices.shape))
        places[axis or 0] = indices
        return (x[tuple(places)],)


class DequantizeLinear(Standard):
    """DequantizeLinear; onnx's multiplies with a scalar scale of float64 in float32 with numpy 1.26."""

    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        zero_point: np.ndarray | None = None,
        axis: int | None = None,
        block_size: int | None = None,
        output_dtype: int | None = None,
    ) -> tuple[np.ndarray]:
        axis = (1 if axis is None else axis) % max(x.ndim, 1)

        def along(values: np.ndarray) -> np.ndarray:
            if block_size:
                return np.repeat(values, block_size, axis).take(range(x.shape[axis]), axis)
            if values.size == 1:
                return values.reshape(())
            return values.reshape([-1 if i == axis else 1 for i in range(x.ndim)])

        steps = x.astype(np.float64) - (0 if zero_point is None else along(zero_point).astype(np.float64))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(output_dtype) if output_dtype else scale.dtype
        return (np.asarray(steps * along(scale).astype(np.float64)).astype(dtype),)


class LpPool(Standard):
    """LpPool; onnx's is wrong where ceil_mode lets windows reach beyond the input."""

    def _run(
        self, x: np.ndarray, kernel_shape: Any = None, p: int | None = None, **window: Any
    ) -> tuple[np.ndarray]:
        return ((np.abs(_read_windows(x, 0.0, kernel_shape, **window)) ** p).sum(0) ** (1 / p),)


class GlobalMaxPool(Standard):
    """GlobalMaxPool; onnx's takes images only."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


class GlobalLpPool(Standard):
    """GlobalLpPool, which onnx lacks."""

    def _run(self, x: np.ndarray, p: int | None = None) -> tuple[np.ndarray]:
        return ((np.abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdims=True) ** (1 / p),)


class LRN(Standard):
    """LRN; onnx's goes through the batch instead of the channels."""

    def _run(self, x: np.ndarray, alpha: Any, beta: Any, bias: Any, size: Any) -> tuple[np.ndarray]:
        ends = [(0, 0), ((size - 1) // 2, size // 2)] + [(0, 0)] * (x.ndim - 2)
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ends), size, axis=1)
        return (x / (bias + float(alpha) / size * (windows**2).sum(-1)) ** beta,)


class BatchNormalization(Standard):
    """BatchNormalization; before opset 14, where inference was all it did, onnx's takes the batch's statistics."""

    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        bias: np.ndarray,
        mean: np.ndarray,
        var: np.ndarray,
        epsilon: Any = None,
        momentum: Any = None,
        training_mode: Any = None,
    ) -> tuple[np.ndarray, ...]:
        own: tuple[np.ndarray, ...] = (mean, var)
        if training_mode:
            over = (0, *range(2, x.ndim))
            mean, var = x.mean(over), x.var(over)
            own = tuple(
                old * momentum + new * (1 - momentum) for old, new in zip(own, (mean, var), strict=True)
            )
        scale, bias, mean, var = (v.reshape(-1, *[1] * (x.ndim - 2)) for v in (scale, bias, mean, var))
        y = (x - mean) / np.sqrt(var + epsilon) * scale + bias
        return (y, *own) if training_mode else (y,)


class GroupNormalization(Standard):
    """GroupNormalization; the op's function body, which onnx evaluates, rounds to float32."""

    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        bias: np.ndarray,
        epsilon: Any,
        num_groups: Any,
        stash_type: Any,
    ) -> tuple[np.ndarray]:
        groups = x.reshape(x.shape[0], num_groups, -1)
        groups = groups - groups.mean(2, keepdims=True)
        standard = (groups / np.sqrt((groups**2).mean(2, keepdims=True) + epsilon)).reshape(x.shape)
        scale, bias = (v.reshape(-1, *[1] * (x.ndim - 2)) for v in (scale, bias))
        return (standard * scale + bias,)


class MeanVarianceNormalization(Standard):
    """MeanVarianceNormalization; the op's function body, which onnx evaluates, has float32 constants."""

    def _run(self, x: np.ndarray, axes: list[int] | None = None) -> tuple[np.ndarray]:
        over = tuple(axes or (0, 2, 3))
        return ((x - x.mean(over, keepdims=True)) / (x.std(over, keepdims=True) + 1e-9),)


class Resize(OnnxResize):
    """Resize; onnx's computes cubic weights in float32, the dtype of the attribute."""

    op_domain = ""

    def _run(self, *inputs: np.ndarray, cubic_coeff_a: Any = None, **attributes: Any) -> tuple[np.ndarray]:
        return super()._run(*inputs, cubic_coeff_a=float(cubic_coeff_a), **attributes)


class GridSample(OnnxGridSample):
    """GridSample; onnx's rounds positions to float32."""

    op_domain = ""

    def _gs_denormalize_coordinates(self, n: Any, dims: Any, align_corners: bool) -> np.ndarray:
        return np.array([self._gs_denormalize(*pair, align_corners) for pair in zip(n, dims, strict=False)])


class RoiAlign(OnnxRoiAlign):
    """RoiAlign; before opset 16 there was no half a pixel, which onnx's takes away."""

    op_domain = ""

    def _run(
        self, *inputs: np.ndarray, coordinate_transformation_mode: str | None = None, **attributes: Any
    ) -> tuple[np.ndarray]:
        if self.run_params["opsets"][""] < 16:
            coordinate_transformation_mode = "output_half_pixel"
        return super()._run(
            *inputs, coordinate_transformation_mode=coordinate_transformation_mode, **attributes
        )


class MaxRoiPool(Standard):
    """MaxRoiPool, which onnx lacks."""

    def _run(
        self, x: np.ndarray, rois: np.ndarray, pooled_shape: Any, spatial_scale: Any
    ) -> tuple[np.ndarray]:
        out = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
        for region, (batch, *corners) in enumerate(rois):
            left, top, right, bottom = (int(np.floor(c * spatial_scale + 0.5)) for c in corners)
            height, width = (
                max(e - b + 1, 1) / p
                for b, e, p in zip((top, left), (bottom, right), pooled_shape, strict=True)
            )
            for i, j in np.ndindex(*pooled_shape):
                rows = slice(max(top + int(i * height), 0), max(top + int(np.ceil((i + 1) * height)), 0))
                columns = slice(max(left + int(j * width), 0), max(left + int(np.ceil((j + 1) * width)), 0))
                pixels = x[int(batch), :, rows, columns]
                if pixels.size:
                    out[region, :, i, j] = pixels.max((1, 2))
        return (out,)


class DeformConv(Standard):
    """DeformConv; onnx's rounds positions to float32."""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        offset: np.ndarray,
        b: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        dilations: list[int] | None = None,
        group: int | None = None,
        kernel_shape: list[int] | None = None,
        offset_group: int | None = None,
        pads: list[int] | None = None,
        strides: list[int] | None = None,
    ) -> tuple[np.ndarray]:
        groups, deform = group or 1, offset_group or 1
        (batch, channels), counts, kernel = x.shape[:2], offset.shape[2:], w.shape[2:]
        moves = offset.reshape(batch, deform, -1, 2, *counts)
        factors = (
            np.ones(moves[:, :, :, 0].shape) if mask is None else mask.reshape(batch, deform, -1, *counts)
        )
        strides, dilations, pads = strides or [1, 1], dilations or [1, 1], pads or [0] * 4
        wide = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])  # zeros around: those further away are the same
        taken = np.zeros((batch, channels, *kernel, *counts))
        for n, c, i, j, *window in np.ndindex(*taken.shape):
            g, tap = c * deform // channels, i * kernel[1] + j
            place = (
                np.array([i, j]) * dilations
                + np.array(window) * strides
                - pads[:2]
                + moves[(n, g, tap, ..., *window)]
            )
            low = np.floor(place)
            for step in np.ndindex(2, 2):
                pixel = np.clip(low + step, -1, x.shape[2:]).astype(int) + 1
                weight = np.prod(1 - np.abs(place - low - step))
                taken[(n, c, i, j, *window)] += weight * wide[(n, c, *pixel)] * factors[(n, g, tap, *window)]
        taken = taken.reshape(batch, groups, -1, *counts)
        y = np.einsum("gmk,ngk...->ngm...", w.reshape(groups, len(w) // groups, -1), taken).reshape(
            batch, -1, *counts
        )
        y = y if b is None else y + b.reshape(-1, 1, 1)
        return (y.astype(x.dtype),)


class Unique(Standard):
    """Unique; onnx's takes slices for elements, and slices along another axis, where the order stays as it was."""

    def _run(self, x: np.ndarray, axis: int | None = None, sorted: int | None = None) -> tuple[Any, ...]:
        x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
        _, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
        if not sorted:
            order = np.argsort(first)
            first, inverse, counts = first[order], np.argsort(order)[inverse.reshape(-1)], counts[order]
        outputs = np.take(x, first, axis), first, inverse.reshape(-1), counts
        return outputs[: len(self.onnx_node.output)]


class LpNormalization(Standard):
    """LpNormalization; onnx's takes no absolute values for p = 1."""

    def _run(self, x: np.ndarray, axis: int | None = None, p: int | None = None) -> tuple[np.ndarray]:
        return (x / np.linalg.norm(x, p, -1 if axis is None else axis, keepdims=True),)


class Loop(OnnxLoop):
    """Loop; onnx's does nothing without a condition, and joins scan outputs instead of stacking them."""

    op_domain = ""

    def _run(
        self,
        most: np.ndarray | None,
        condition: np.ndarray | None,
        *state: Any,
        context: dict[str, Any] | None = None,
        body: Any = None,
        **linked: Any,
    ) -> tuple[Any, ...]:
        stacks: list[list[np.ndarray]] = [[] for _ in range(self.K)]
        keep_going, count = condition is None or bool(condition), 0
        while keep_going and (most is None or count < most):
            given = [np.array(count, np.int64), np.array(True), *state]
            inputs = {**(context or {}), **dict(zip(self.body.input_names, given, strict=True))}
            keep_going, *results = self._run_body(inputs, **linked)
            state, count = tuple(results[: self.N]), count + 1
            for stack, value in zip(stacks, results[self.N :], strict=True):
                stack.append(value)
        return (*state, *(np.stack(stack) if stack else np.zeros(0) for stack in stacks))


class Scan(Standard):
    """Scan; onnx's knows neither axes, nor directions, nor scans of nothing."""

    def need_context(self) -> bool:
        """The body reads what is outside of it."""
        return True

    def _run(
        self,
        *inputs: np.ndarray,
        context: dict[str, Any] | None = None,
        body: Any = None,
        num_scan_inputs: int = 1,
        scan_input_axes: list[int] | None = None,
        scan_input_directions: list[int] | None = None,
        scan_output_axes: list[int] | None = None,
        scan_output_directions: list[int] | None = None,
        **linked: Any,
    ) -> tuple[Any, ...]:
        state, read = list(inputs[:-num_scan_inputs]), inputs[-num_scan_inputs:]
        axes = scan_input_axes or [0] * len(read)
        moved = [np.moveaxis(values, axis, 0) for values, axis in zip(read, axes, strict=True)]
        for k, backwards in enumerate(scan_input_directions or []):
            moved[k] = moved[k][::-1] if backwards else moved[k]
        stacks: list[list[np.ndarray]] = [[] for _ in self.body.output_names[len(state) :]]
        for slices in zip(*moved, strict=True):
            given = {**(context or {}), **dict(zip(self.body.input_names, [*state, *slices], strict=True))}
            results = self._run_body(given, **linked)
            state = list(results[: len(state)])
            for stack, value in zip(stacks, results[len(state) :], strict=True):
                stack.append(value)
        backwards = scan_output_directions or [0] * len(stacks)
        axes = scan_output_axes or [0] * len(stacks)
        stacked = [
            np.stack(stack[:: -1 if last else 1], axis) if stack else np.zeros(0)
            for stack, last, axis in zip(stacks, backwards, axes, strict=True)
        ]
        return (*state, *stacked)


CORRECTED = CONTRIB | {
    ("", op.__name__): op
    for op in (
        Erf,
        ConvTranspose,
        MaxPool,
        AveragePool,
        BatchNormalization,
        GroupNormalization,
        GatherElements,
        DequantizeLinear,
        LpPool,
        GlobalMaxPool,
        GlobalLpPool,
        LRN,
        Resize,
        GridSample,
        MaxRoiPool,
        RoiAlign,
        DeformConv,
        Unique,
        LpNormalization,
        MeanVarianceNormalization,
        Loop,
        Scan,
    )
}


class ReferenceEvaluator(OnnxReferenceEvaluator):
    """As onnx's, with the implementations above also inside functions, which do not get `new_ops`."""

    def _load_impl(self, node: onnx.NodeProto, input_types: onnx.TypeProto | None = None) -> Any:
        return CORRECTED.get((node.domain, node.op_type)) or super()._load_impl(node, input_types)
