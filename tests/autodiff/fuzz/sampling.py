"""Draw sampling between pixels and regions of interest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autodiff.fuzz.builder import Builder
from autodiff.fuzz.draw import Draw, Rejected
from autodiff.fuzz.images import image, weight

Drawer = Callable[[Builder, Draw], None]


def grid_sample(b: Builder, d: Draw) -> None:
    """Positions inside and outside of the image."""
    x = image(b, d, (4,) if b.graph.opset < 20 or d.chance(80) else (5,))
    rank = len(b.shape(x)) - 2
    modes = ["linear", "nearest"] if b.graph.opset >= 20 else ["bilinear", "nearest"]
    grid = b.leaf([b.shape(x)[0], *b.sizes(rank, least=1), rank], -1.6, 1.6)
    padding = d.choice([None, "zeros", "border", "reflection"])
    b.node(
        "GridSample",
        [x, grid],
        mode=d.choice([None, *modes]),
        padding_mode=padding,
        align_corners=d.choice([None, 0, 1]),
    )


def affine_grid(b: Builder, d: Draw) -> None:
    """In two and three dimensions."""
    rank = d.choice([2, 3])
    (batch,) = b.sizes(1, least=1)
    size = [batch, 1, *b.sizes(rank, least=1)]
    b.node(
        "AffineGrid",
        [b.like([batch, rank, rank + 1]), b.data(np.array(size))],
        align_corners=d.choice([None, 0, 1]),
    )


def max_roi_pool(b: Builder, d: Draw) -> None:
    """Regions inside of the image."""
    x = image(b, d, (4,))
    if 0 in b.shape(x):
        raise Rejected("an image of size zero")
    height, width = b.shape(x)[2:]
    rois = []
    for _ in range(d.integer(1, 2)):
        left, top = d.integer(0, width - 1), d.integer(0, height - 1)
        corner = [left, top, d.integer(left, width - 1), d.integer(top, height - 1)]
        rois.append([d.integer(0, b.shape(x)[0] - 1), *corner])
    pooled = [d.integer(1, 2), d.integer(1, 2)]
    b.node("MaxRoiPool", [x, b.data(np.array(rois, np.float64))], pooled_shape=pooled)


def deform_conv(b: Builder, d: Draw) -> None:
    """With groups of channels and of offsets, taps inside and outside of the image."""
    x = image(b, d, (4,))
    batch, channels, *sizes = b.shape(x)
    group, deform = (d.choice([g for g in (1, 2, 3) if channels % g == 0]) for _ in range(2))
    kernel = [d.integer(1, 2) for _ in range(2)]
    attrs: dict[str, Any] = {
        "strides": [d.integer(1, 2) for _ in range(2)] if d.chance(40) else None,
        "dilations": [d.integer(1, 2) for _ in range(2)] if d.chance(25) else None,
        "pads": [d.integer(0, 1) for _ in range(4)] if d.chance(50) else None,
        "kernel_shape": d.choice([None, kernel]),
        "group": group if group > 1 else None,
        "offset_group": deform if deform > 1 else None,
    }
    strides, dilations, pads = (
        attrs["strides"] or [1, 1],
        attrs["dilations"] or [1, 1],
        attrs["pads"] or [0] * 4,
    )
    counts = [
        (s + pads[i] + pads[i + 2] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1
        for i, s in enumerate(sizes)
    ]
    taps = int(np.prod(kernel))
    if min(counts) < 1 or batch * channels * taps * np.prod(counts) > 200:
        raise Rejected("no window, or more than the judge, who goes through the taps, has time for")

    def per_tap(number: int, low: float, high: float) -> str:
        shape = [batch, deform * number * taps, *counts]
        return b.like(shape) if d.chance(30) else b.leaf(shape, low, high)

    outputs = group * d.integer(1, 2)
    w = weight(b, d, [outputs, channels // group, *kernel])
    bias = b.like([outputs]) if d.chance(50) else ""
    b.node(
        "DeformConv", [x, w, per_tap(2, -1.6, 1.6), bias, per_tap(1, 0.1, 1) if d.chance(50) else ""], **attrs
    )


def roi_align(b: Builder, d: Draw) -> None:
    """Regions within the image, beyond it, and smaller than a pixel."""
    x = image(b, d, (4,))
    if 0 in b.shape(x):
        raise Rejected("an image of size zero")
    rng, scale = d.rng(), d.choice([None, 0.5, 2.0])
    sizes = np.array(b.shape(x)[:1:-1]) / (scale or 1.0)
    count = d.integer(0 if b.empty else 1, 3)
    begins = rng.uniform(-0.3, 0.8, (count, 2)) * sizes
    rois = np.concatenate([begins, begins + rng.uniform(0.1, 0.8, (count, 2)) * sizes], 1)
    attrs: dict[str, Any] = {
        "mode": d.choice([None, "avg"]),
        "output_height": d.choice([None, 1, 2, 3]),
        "output_width": d.choice([None, 1, 2, 3]),
        "sampling_ratio": d.choice([None, None, 0, 1, 2]),
        "spatial_scale": scale,
    }
    if b.supports("RoiAlign", "coordinate_transformation_mode"):
        attrs["coordinate_transformation_mode"] = d.choice([None, "half_pixel", "output_half_pixel"])
        # ONNX Runtime says of its older kernel that it takes another maximum.
        attrs["mode"] = d.choice([None, "avg", "max"])
    images = b.data(rng.integers(0, b.shape(x)[0], count))
    b.node("RoiAlign", [x, b.data(rois.astype(np.float32).astype(np.float64)), images], **attrs)


DRAWERS: dict[str, Drawer] = {
    "AffineGrid": affine_grid,
    "DeformConv": deform_conv,
    "GridSample": grid_sample,
    "MaxRoiPool": max_roi_pool,
    "RoiAlign": roi_align,
}
