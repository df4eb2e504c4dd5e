"""Sampling grids and regions of interest."""

import numpy as np
import torch
import torch.nn.functional as nnf

from autodiff.case import C, Case, F, R

GRID = {"low": -1.6, "high": 1.6}
CASES = [
    Case(
        "GridSample",
        (F(2, 3, 4, 5), F(2, 3, 2, 2, **GRID)),
        lambda x, grid, padding=padding, align=align: nnf.grid_sample(
            x, grid, "bilinear", padding, bool(align)
        ),
        {"padding_mode": padding, "align_corners": align},
        opset=20,
    )
    for padding in ("zeros", "border", "reflection")
    for align in (0, 1)
]
CASES += [
    Case(
        "GridSample", (F(1, 2, 3, 4, 2), F(1, 2, 1, 3, 3, **GRID)), lambda x,
        grid: nnf.grid_sample(x, grid, "bilinear", "zeros", False), opset=22, name="3d",
    ),
    Case(
        "GridSample", (F(2, 3, 4, 5), F(2, 3, 2, 2, wrt=False, **GRID)), lambda x,
        grid: nnf.grid_sample(x, grid, "nearest", "border", True),
        {"mode": "nearest", "padding_mode": "border", "align_corners": 1}, opset=22, name="nearest",
    ),
    Case(
        "GridSample", (F(2, 3, 4, 5), F(2, 30, 2, 2, low=-6.0, high=6.0)), lambda x,
        grid: nnf.grid_sample(x, grid, "bilinear", "reflection", False), {"padding_mode": "reflection"},
        opset=22, name="far-outside",
    ),
]  # fmt: skip
CASES += [
    Case(
        "GridSample",
        (F(2, 2, 4, 5), F(2, 4, 2, 2, low=-reach, high=reach)),
        lambda x, grid, padding=padding, align=align: nnf.grid_sample(
            x, grid, "bicubic", padding, bool(align)
        ),
        {"mode": "cubic", "padding_mode": padding, "align_corners": align},
        name=f"cubic-{padding}-{align}",
        # onnx's moves samples beyond the border to it before it looks for the pixels around them.
        evaluator="onnxruntime" if padding == "border" else "reference",
    )
    for padding, align, reach in (
        ("zeros", 0, 1.6),
        ("border", 1, 1.6),
        ("reflection", 0, 3.6),
        ("reflection", 1, 3.6),
    )
]
CASES += [
    Case(
        "AffineGrid",
        (F(2, *theta), C(np.array(size))),
        lambda theta, size, align=align: nnf.affine_grid(theta, size.tolist(), bool(align)),
        {"align_corners": align},
        name=f"{len(size) - 2}d-{align}",
        symbolic={0: (0,)},
        evaluator="onnxruntime",  # the op's function body, which onnx evaluates, mixes float32 into float64
    )
    for theta, size in [((2, 3), (2, 3, 4, 5)), ((3, 4), (2, 1, 2, 3, 4))]
    for align in (0, 1)
]

REGIONS = [[0, 0, 0, 3, 3], [1, 2, 1, 9, 7], [1, 4, 4, 4, 4], [0, 6, 5, 12, 11], [0, 20, 20, 30, 30]]


def max_roi_pool(x, rois, pooled, scale):
    """Region by region; bins outside of the image are zero."""
    rows = []
    for batch, *corners in rois.tolist():
        left, top, right, bottom = (int(np.floor(c * scale + 0.5)) for c in corners)
        for i, j in np.ndindex(*pooled):
            height, width = (bottom - top + 1) / pooled[0], (right - left + 1) / pooled[1]
            part = x[
                int(batch),
                :,
                top + int(i * height) : top + int(np.ceil((i + 1) * height)),
                left + int(j * width) : left + int(np.ceil((j + 1) * width)),
            ].flatten(1)
            rows.append(part.amax(1) if part.shape[1] else x.new_zeros(x.shape[1]))
    return torch.stack(rows).reshape(len(rois), *pooled, x.shape[1]).movedim(-1, 1)


CASES += [
    Case(
        "MaxRoiPool",
        (F(2, 3, 7, 8, distinct=True), R(np.array(REGIONS, float))),
        lambda x, rois, scale=scale: max_roi_pool(x, rois, (2, 3), scale),
        {"pooled_shape": [2, 3], "spatial_scale": scale},
    )
    for scale in (1.0, 0.5)
]


def between(where, size):
    """The pixels around a position on one axis and their weights, none beyond a pixel from the image."""
    if not -1 <= where <= size:
        return [(0, 0.0), (0, 0.0)]
    where = min(max(where, 0), size - 1)
    low = int(where)
    return [(low, 1 - where + low), (min(low + 1, size - 1), where - low)]


def roi_align(x, rois, images, *, mode="avg", half=True, size=(1, 1), ratio=0, scale=1.0):
    """Sample by sample."""
    bins = []
    for corners, image in zip((rois.numpy() * scale - 0.5 * half).tolist(), images.tolist(), strict=True):
        begins, ends = corners[1::-1], corners[:1:-1]
        steps = [(e - b if half else max(e - b, 1.0)) / s for b, e, s in zip(begins, ends, size, strict=True)]
        numbers = [max(ratio or int(np.ceil(step)), 0) for step in steps]
        for place in np.ndindex(*size):
            products = []
            for sample in np.ndindex(*numbers):
                rows, columns = (
                    between(b + (p + (k + 0.5) / count) * step, extent)
                    for b, p, k, count, step, extent in zip(
                        begins, place, sample, numbers, steps, x.shape[2:], strict=True
                    )
                )
                products += [x[image, :, i, j] * (a * b) for i, a in rows for j, b in columns]
            terms = torch.stack(products) if products else x[image, :, :1, 0].T * 0
            bins.append(terms.amax(0) if mode == "max" else terms.sum(0) / max(np.prod(numbers), 1))
    return torch.stack(bins).reshape(len(rois), *size, x.shape[1]).movedim(-1, 1)


ALIGNED = [
    [0.3, 0.2, 3.9, 4.2],
    [1.1, 2.3, 9.7, 6.9],
    [2.2, 2.1, 2.7, 2.6],
    [5.1, 4.3, 12, 11.2],
    [20, 20, 30, 30],
]


def roi_align_case(name, **given):
    attrs = {
        "mode": given.get("mode", "avg"),
        "coordinate_transformation_mode": "half_pixel" if given.get("half", True) else "output_half_pixel",
        "output_height": given["size"][0],
        "output_width": given["size"][1],
        "sampling_ratio": given.get("ratio", 0),
        "spatial_scale": given.get("scale", 1.0),
    }
    images = R(np.array([0, 1, 1, 0, 1]))
    return Case(
        "RoiAlign",
        (F(2, 3, 7, 6), R(np.array(ALIGNED)), images),
        lambda x, rois, images: roi_align(x, rois, images, **given),
        attrs,
        name=name,
    )


CASES += [
    roi_align_case("adaptive", size=(2, 3)),
    roi_align_case("fixed", size=(3, 2), ratio=2, half=False, scale=0.5),
    roi_align_case("adaptive-whole", size=(2, 2), half=False),
    roi_align_case("max", size=(2, 2), mode="max", ratio=2),
    roi_align_case("max-adaptive", size=(2, 1), mode="max", half=False, scale=0.75),
]
