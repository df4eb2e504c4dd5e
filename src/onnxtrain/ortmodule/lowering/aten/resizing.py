"""Lowers resizing and sampling of images.

Shapes are `[batch, channels, *spatial]`.
"""

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
    """Computes `torch.nn.functional.interpolate` by one ATen op, where PyTorch's tracing would decompose it."""
    rank = x.dim() - 2
    # These compute other sizes or weights, which the ATen ops below do not have.
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
"""Replacements by the function in a Dynamo graph, which is traced as its replacement instead."""


@lower(
    "aten.upsample_nearest1d.default", "aten.upsample_nearest2d.default", "aten.upsample_nearest3d.default"
)
def upsample_nearest(low: Lowering, x: ir.Value, size: list[Any], *scales: float | None) -> ir.Value:
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    without_scale = (1, 2) if len(size) == 2 else ()
    return _resize(low, x, size, scales, without_scale, mode="nearest", **how)


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
    where = _corners(align_corners)
    return _resize(low, x, size, scales, (1,), mode="linear", coordinate_transformation_mode=where)


@lower("aten.upsample_bicubic2d.default")
def upsample_bicubic(
    low: Lowering, x: ir.Value, size: list[Any], align_corners: bool, *scales: float | None
) -> ir.Value:
    where = _corners(align_corners)
    return _resize(
        low, x, size, scales, (), mode="cubic", cubic_coeff_a=-0.75, coordinate_transformation_mode=where
    )


@lower("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(
    low: Lowering, x: ir.Value, grid: ir.Value, mode: int, padding_mode: int, align_corners: bool
) -> ir.Value:
    if mode == 2:
        raise low.unsupported("bicubic sampling, which has no gradient rule")
    # ONNX's "linear" is PyTorch's "bilinear", for any number of axes.
    return low.op.GridSample(
        x,
        grid,
        mode=("linear", "nearest")[mode],
        padding_mode=("zeros", "border", "reflection")[padding_mode],
        align_corners=int(align_corners),
    )


def _corners(align: bool) -> str:
    return "align_corners" if align else "half_pixel"


def _resize(
    low: Lowering,
    x: ir.Value,
    size: list[Any],
    scales: tuple[float | None, ...],
    without_scale: tuple[int, ...],
    **attributes: Any,
) -> ir.Value:
    """Lowers to Resize by scales if PyTorch computes coordinates with scales, else to sizes.

    Args:
        low: lowers the node.
        x: the input.
        size: sizes of the output along the axes that are resized.
        scales: one scale per axis, or none.
        without_scale: ratios of the output's size to the input's with which eager PyTorch (2.13) ignores the scale of
            an axis. E.g. with 1 in it 3 rows are copied for a scale of 1.3, which also gives 3.
        attributes: those of Resize.
    """
    sizes_in, sizes_out = low.fake(0).shape[-len(size) :], low.result.shape[-len(size) :]
    axes = [*range(2, 2 + len(size))]
    # With aligned corners PyTorch never uses scales.
    aligned = attributes["coordinate_transformation_mode"] == "align_corners"
    factors = None if aligned else _scales(low, scales, sizes_in, sizes_out, without_scale)
    last = (None, low.ints(size)) if factors is None else (low.op.const(factors),)
    output: ir.Value = low.op.Resize(x, None, *last, axes=axes, **attributes)
    return output


def _scales(
    low: Lowering,
    scales: tuple[float | None, ...],
    sizes_in: Sequence[Any],
    sizes_out: Sequence[Any],
    without_scale: tuple[int, ...],
) -> np.ndarray | None:
    """Returns the scales that PyTorch computes coordinates with, float32 [rank]; None where it uses ratios of sizes."""
    if not scales or None in scales:
        return None
    factors = [float(scale or 0) for scale in scales]
    known = all(isinstance(n, int) for n in (*sizes_in, *sizes_out))
    for axis, ratio in itertools.product(range(len(factors)), without_scale):
        if known and sizes_out[axis] == ratio * sizes_in[axis]:
            factors[axis] = float(ratio)
        # A larger factor gives more than `ratio` times as many, but of a single element, whose copies are all the same.
        elif not known and ratio < factors[axis] < ratio + 0.5:
            raise low.unsupported(f"scale {factors[axis]} of sizes that are not known yet")
    # ONNX Runtime (1.32) copies an input whose sizes stay, whatever the scales are.
    if any(f != 1 for f in factors) and all(
        n == m if known else 1 <= f < 1.5 for n, m, f in zip(sizes_out, sizes_in, factors, strict=True)
    ):
        raise low.unsupported(f"scales {factors} that leave the sizes as they are")
    rounded = np.array(factors, np.float32)
    if known:
        # Scales equal to the ratios of sizes: the sizes say the same, without rounding.
        if [n / m for n, m in zip(sizes_out, sizes_in, strict=True)] == factors:
            return None
        # Scales of ONNX are float32, those of PyTorch float64: sizes may differ.
        exact = [int(m * f) for m, f in zip(sizes_in, rounded, strict=True)] == list(sizes_out)
    else:
        exact = rounded.astype(np.float64).tolist() == factors
    if not exact:
        raise low.unsupported(f"scales {factors}, which float32 cannot hold")
    return rounded
