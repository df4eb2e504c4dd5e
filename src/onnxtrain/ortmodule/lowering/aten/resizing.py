"""Lowers interpolation and grid sampling. Inputs are `[batch, channels, *spatial]`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.nn import functional

from onnxtrain.ortmodule.lowering._table import Lowering, lower, per_axis


def _interpolate(
    x: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Replaces `interpolate` with one ATen op, because tracing would decompose the function into many ops."""
    rank = x.dim() - 2
    # The ATen ops below do not support these arguments.
    if antialias or recompute_scale_factor or mode not in _UPSAMPLE:
        return functional.interpolate(
            x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    factors: list[Any] = [None] * rank
    if scale_factor is not None:
        factors = [float(factor) for factor in per_axis(scale_factor, rank)]
        size = [
            n * int(f) if f.is_integer() else torch.sym_int(n * f)  # type: ignore[no-untyped-call]
            for n, f in zip(x.shape[2:], factors, strict=True)
        ]
    corners = [] if mode.startswith("nearest") else [bool(align_corners)]
    op = getattr(torch.ops.aten, f"{_UPSAMPLE[mode]}{rank}d")
    return op.default(x, per_axis(size, rank), *corners, *factors)


_UPSAMPLE = {
    "nearest": "upsample_nearest",
    "nearest-exact": "_upsample_nearest_exact",
    "linear": "upsample_linear",
    "bilinear": "upsample_bilinear",
    "bicubic": "upsample_bicubic",
    "trilinear": "upsample_trilinear",
}
INTERPOLATE: dict[Any, Callable[..., Any]] = {functional.interpolate: _interpolate}
"""Replacements for interpolation functions when a Dynamo graph is traced."""


@lower(
    "aten.upsample_nearest1d.default", "aten.upsample_nearest2d.default", "aten.upsample_nearest3d.default"
)
def upsample_nearest(low: Lowering, x: ir.Value, size: list[Any], *scales: float | None) -> ir.Value:
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    exact_ratios = (1, 2) if len(size) == 2 else ()
    return _resize(low, x, size, scales, exact_ratios, mode="nearest", **how)


@lower(
    "aten._upsample_nearest_exact1d.default",
    "aten._upsample_nearest_exact2d.default",
    "aten._upsample_nearest_exact3d.default",
)
def upsample_nearest_exact(low: Lowering, x: ir.Value, size: list[Any], *scales: float | None) -> ir.Value:
    how = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_ceil"}
    return _resize(low, x, size, scales, (), mode="nearest", **how)


@lower(
    "aten.upsample_linear1d.default", "aten.upsample_bilinear2d.default", "aten.upsample_trilinear3d.default"
)
def upsample_linear(
    low: Lowering, x: ir.Value, size: list[Any], align_corners: bool, *scales: float | None
) -> ir.Value:
    coordinates = _coordinate_mode(align_corners)
    return _resize(low, x, size, scales, (1,), mode="linear", coordinate_transformation_mode=coordinates)


@lower("aten.upsample_bicubic2d.default")
def upsample_bicubic(
    low: Lowering, x: ir.Value, size: list[Any], align_corners: bool, *scales: float | None
) -> ir.Value:
    coordinates = _coordinate_mode(align_corners)
    return _resize(
        low,
        x,
        size,
        scales,
        (),
        mode="cubic",
        cubic_coeff_a=-0.75,
        coordinate_transformation_mode=coordinates,
    )


@lower("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(
    low: Lowering, x: ir.Value, grid: ir.Value, mode: int, padding_mode: int, align_corners: bool
) -> ir.Value:
    if mode == 2:
        raise low.unsupported("bicubic sampling, which has no gradient rule")
    # PyTorch's "bilinear" is "linear" in ONNX, for any number of axes.
    return low.op.GridSample(
        x,
        grid,
        mode=("linear", "nearest")[mode],
        padding_mode=("zeros", "border", "reflection")[padding_mode],
        align_corners=int(align_corners),
    )


def _coordinate_mode(align_corners: bool) -> str:
    """Returns the value of Resize's attribute `coordinate_transformation_mode`."""
    return "align_corners" if align_corners else "half_pixel"


def _resize(
    low: Lowering,
    x: ir.Value,
    size: list[Any],
    scales: tuple[float | None, ...],
    exact_ratios: tuple[int, ...],
    **attributes: Any,
) -> ir.Value:
    """Emits a Resize with scales if PyTorch computes coordinates from scales, else with sizes.

    Args:
        low: the lowering.
        x: the input.
        size: output sizes of the spatial axes.
        scales: one scale per spatial axis. Empty, or None for each axis, if the user passed sizes.
        exact_ratios: ratios of output size to input size, e.g. (1, 2). If the sizes of an axis have one of these
            ratios, eager PyTorch (2.13) computes coordinates from the ratio instead of the scale. E.g. a scale of 1.3
            enlarges an axis of 3 elements to int(3.9) = 3; with the ratio 1, the elements are copied.
        attributes: attributes of Resize.
    """
    sizes_in, sizes_out = low.fake(0).shape[-len(size) :], low.result.shape[-len(size) :]
    axes = [*range(2, 2 + len(size))]
    # With align_corners, PyTorch ignores scales.
    aligned = attributes["coordinate_transformation_mode"] == "align_corners"
    factors = None if aligned else _scales(low, scales, sizes_in, sizes_out, exact_ratios)
    scales_or_sizes = (None, low.ints(size)) if factors is None else (low.op.const(factors),)
    output: ir.Value = low.op.Resize(x, None, *scales_or_sizes, axes=axes, **attributes)
    return output


def _scales(
    low: Lowering,
    scales: tuple[float | None, ...],
    sizes_in: Sequence[Any],
    sizes_out: Sequence[Any],
    exact_ratios: tuple[int, ...],
) -> np.ndarray | None:
    """Returns the `scales` input for a Resize that computes the same coordinates as eager PyTorch.

    Args:
        low: the lowering.
        scales: the user's scales, as in :func:`_resize`.
        sizes_in: input sizes of the spatial axes, possibly symbolic.
        sizes_out: output sizes of the spatial axes, possibly symbolic.
        exact_ratios: ratios of sizes that replace a scale, as in :func:`_resize`.

    Returns:
        The scales, float32 [spatial rank]; None if Resize should use sizes instead, because the user passed no scales,
        or they equal the ratios of the sizes.

    Raises:
        UnsupportedATenOp: Resize cannot reproduce PyTorch's coordinates with these scales.
    """
    if not scales or None in scales:
        return None
    factors = [float(scale or 0) for scale in scales]
    known = all(isinstance(n, int) for n in (*sizes_in, *sizes_out))
    for axis, ratio in itertools.product(range(len(factors)), exact_ratios):
        if known and sizes_out[axis] == ratio * sizes_in[axis]:
            factors[axis] = float(ratio)
        # With larger factors, the output size is not `ratio` times the input size, except for an input size of 1. There
        # the scale has no effect.
        elif not known and ratio < factors[axis] < ratio + 0.5:
            raise low.unsupported(f"scale {factors[axis]} with symbolic sizes")
    # ONNX Runtime (1.32) ignores scales if the sizes do not change.
    if any(f != 1 for f in factors) and all(
        n == m if known else 1 <= f < 1.5 for n, m, f in zip(sizes_out, sizes_in, factors, strict=True)
    ):
        raise low.unsupported(f"scales {factors} that do not change the sizes")
    rounded = np.array(factors, np.float32)
    if known:
        # The scales are the ratios of the sizes, which need no rounding.
        if [n / m for n, m in zip(sizes_out, sizes_in, strict=True)] == factors:
            return None
        # ONNX's scales are float32, PyTorch's float64. After rounding, the output sizes may differ.
        exact = [int(m * f) for m, f in zip(sizes_in, rounded, strict=True)] == list(sizes_out)
    else:
        exact = rounded.astype(np.float64).tolist() == factors
    if not exact:
        raise low.unsupported(f"scales {factors}, which float32 cannot represent")
    return rounded
