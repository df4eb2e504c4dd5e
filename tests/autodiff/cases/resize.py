"""Resolution and rearrangement of images."""

import numpy as np
import torch
import torch.nn.functional as nnf

from autodiff.case import C, Case, F, R


def scales(*factors):
    return np.array(factors, np.float32)


def interpolated(mode, align_corners=None, antialias=False):
    """torch's interpolate, which takes the spatial part of the last input, scales or sizes."""

    def twin(x, *given):
        size, factor = None, given[-1][2:].tolist()
        if given[-1].dtype == torch.int64:
            size, factor = factor, None
        return nnf.interpolate(x, size, factor, mode, align_corners, antialias=antialias)

    return twin


def repeated(*axes):
    """Repeats each position along the axes twice."""

    def twin(x, *_):
        for axis in axes:
            x = x.repeat_interleave(2, axis)
        return x

    return twin


def by_matrices(*matrices, constant=0.0):
    """Multiplies the last axes by matrices `[size of X, size of Y]` and adds a constant."""

    def twin(x, *_):
        for axis, matrix in zip(range(-len(matrices), 0), matrices, strict=True):
            x = (x.movedim(axis, -1) @ torch.tensor(matrix, dtype=x.dtype)).movedim(-1, axis)
        return x + torch.as_tensor(constant, dtype=x.dtype)

    return twin


def cubic_inside(size, factor):
    """Cubic weights with a = -0.75, those of positions outside left out, `[size, size * factor]`."""
    t = np.abs(np.arange(size)[:, None] - ((np.arange(size * factor) + 0.5) / factor - 0.5))
    near, far = 1.25 * t**3 - 2.25 * t**2 + 1, -0.75 * (t**3 - 5 * t**2 + 8 * t - 4)
    weights = np.where(t <= 1, near, np.where(t < 2, far, 0))
    return weights / weights.sum(0)


def linear_at(size, result, factor):
    """Linear weights `[size, result]` of positions that are `factor` apart, whatever the quotient of the sizes is."""
    where = np.clip((np.arange(result) + 0.5) / factor - 0.5, 0, size - 1)
    return np.maximum(1 - np.abs(np.arange(size)[:, None] - where), 0)


def by_factor(mode, factor, align_corners=None, antialias=False):
    """torch's interpolate by one factor for all axes."""
    return lambda x, *_: nnf.interpolate(x, None, factor, mode, align_corners, antialias=antialias)


UP = ((2, 3, 4, 3), scales(1, 1, 2, 3))
LINEAR = {"mode": "linear"}
CUBIC = {"mode": "cubic"}
ASYMMETRIC = {"coordinate_transformation_mode": "asymmetric"}
FLOOR = {**ASYMMETRIC, "nearest_mode": "floor"}
TORCH = {"coordinate_transformation_mode": "pytorch_half_pixel"}
ALIGNED = {"coordinate_transformation_mode": "align_corners"}
CROPPED = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0}
SMOOTH = {"antialias": 1, "exclude_outside": 1}
HALF = [[1, 0.5, 0, 0, 0, 0], [0, 0.5, 1, 0.5, 0, 0], [0, 0, 0, 0.5, 1, 1]]

CASES = [
    Case("Resize", (F(*shape), None, C(factors)), twin, attrs, name=name)
    for name, (shape, factors), twin, attrs in [
        ("nearest", UP, interpolated("nearest"), FLOOR),
        ("nearest-half_pixel", UP, interpolated("nearest-exact"), {}),
        ("nearest-1d", ((2, 3, 4), scales(1, 1, 3)), interpolated("nearest"), FLOOR),
        ("nearest-3d", ((1, 2, 2, 3, 2), scales(1, 1, 2, 1, 2)), interpolated("nearest"), FLOOR),
        ("nearest-fraction", ((2, 3, 4, 4), scales(1, 1, 1.5, 0.5)), interpolated("nearest"), FLOOR),
        ("nearest-channels", ((2, 2, 3, 2), scales(1, 2, 1, 2)), repeated(1, 3), FLOOR),
        ("nearest-batch", ((2, 2, 3), scales(2, 1, 1)), repeated(0), FLOOR),
        ("linear", UP, interpolated("bilinear", False), LINEAR),
        ("linear-pytorch", UP, interpolated("bilinear", False), {**LINEAR, **TORCH}),
        ("linear-aligned", UP, interpolated("bilinear", True), {**LINEAR, **ALIGNED}),
        ("linear-fraction", ((2, 3, 4, 4), scales(1, 1, 0.75, 0.5)), interpolated("bilinear", False), LINEAR),
        ("linear-1d", ((2, 3, 4), scales(1, 1, 2.5)), interpolated("linear", False), LINEAR),
        ("linear-3d", ((1, 2, 2, 3, 2), scales(1, 1, 2, 2, 3)), interpolated("trilinear", False), LINEAR),
        ("linear-asymmetric", ((2, 3, 3), scales(1, 1, 2)), by_matrices(HALF), {**LINEAR, **ASYMMETRIC}),
        (
            "linear-antialias", ((2, 3, 8, 6), scales(1, 1, 0.5, 0.5)), interpolated("bilinear", False, True),
            {**LINEAR, **SMOOTH},
        ),
        ("cubic", UP, interpolated("bicubic", False), CUBIC),
        ("cubic-aligned", UP, interpolated("bicubic", True), {**CUBIC, **ALIGNED}),
        (
            "cubic-antialias", ((2, 3, 8, 6), scales(1, 1, 0.5, 0.5)), interpolated("bicubic", False, True),
            {**CUBIC, **SMOOTH, "cubic_coeff_a": -0.5},
        ),
        (
            "cubic-exclude_outside", ((1, 2, 2, 4), scales(1, 1, 1, 2)), by_matrices(cubic_inside(4, 2)),
            {**CUBIC, "exclude_outside": 1},
        ),
    ]
]  # fmt: skip
CASES += [
    Case(
        "Resize",
        (F(*shape), None, None, given(np.array(sizes))),
        twin,
        attrs,
        name=f"{name}-{given.__name__}",
    )
    for given in (C, R)
    for name, shape, sizes, twin, attrs in [
        ("sizes-nearest", (2, 3, 4, 3), [2, 3, 8, 9], interpolated("nearest"), FLOOR),
        ("sizes-linear", (2, 3, 4, 3), [2, 3, 7, 5], interpolated("bilinear", False), LINEAR),
        ("sizes-cubic", (2, 3, 4, 3), [2, 3, 7, 5], interpolated("bicubic", True), {**CUBIC, **ALIGNED}),
    ]
]  # fmt: skip
SPATIAL = {"axes": [2, 3]}
CASES += [
    Case(
        "Resize",
        (F(*shape), None, None, given(np.array(sizes))),
        twin,
        {"keep_aspect_ratio_policy": policy, **SPATIAL, **attrs},
        name=f"{policy}-{name}-{given.__name__}",
    )
    for name, given, shape, sizes, policy, twin, attrs in [
        ("nearest", C, (2, 3, 4, 6), [6, 12], "not_larger", by_factor("nearest", 1.5), FLOOR),
        ("nearest", R, (2, 3, 4, 6), [2, 12], "not_smaller", by_factor("nearest", 2), FLOOR),
        ("linear", R, (2, 3, 4, 6), [9, 9], "not_larger", by_factor("bilinear", 1.5, False), LINEAR),
        # 5/3 of 4 is 6.67, rounded to 7.
        (
            "linear-round", C, (1, 2, 3, 4), [5, 5], "not_smaller",
            by_matrices(linear_at(3, 5, 5 / 3), linear_at(4, 7, 5 / 3)), LINEAR,
        ),
        ("cubic", R, (2, 3, 8, 6), [4, 6], "not_larger", by_factor("bicubic", 0.5, False), CUBIC),
    ]
]  # fmt: skip
CASES += [
    Case(
        "Resize",
        (F(2, 3, 8, 6), None, None, C(np.array([4, 6]))),
        by_factor("bilinear", 0.5, False, True),
        {"keep_aspect_ratio_policy": "not_larger", **SPATIAL, **LINEAR, **SMOOTH},
        name="not_larger-antialias",
    ),
    Case(
        "Resize",
        (F(2, 3, 4), None, None, C(np.array([2, 3, 6]))),
        by_matrices(linear_at(2, 3, 1.5), linear_at(3, 5, 1.5), linear_at(4, 6, 1.5)),
        {"keep_aspect_ratio_policy": "not_smaller", **LINEAR},
        name="not_smaller-all-axes",
    ),
]
CASES += [
    Case(
        "Resize",
        (F(2, 2, 3, 4), None, C(scales(2, 2))),
        lambda x, *_: interpolated("bilinear", False)(x, torch.tensor([1.0, 1.0, 2.0, 2.0])),
        {**LINEAR, "axes": [2, 3]},
        name="axes",
    ),
    Case(
        "Resize",
        (F(2, 3, 4, 3), None, R(scales(1, 1, 2, 3))),
        interpolated("bilinear", False),
        LINEAR,
        name="run-time-scales",
    ),
    Case(
        "Resize",
        (F(2, 1, 1, 3), C(scales(0, 0, 0, 0.25, 1, 1, 1, 1.25)), None, C(np.array([2, 1, 1, 5]))),
        # Positions 0.5, 1, 1.5, 2 and 2.5, the last one outside.
        by_matrices([[0.5, 0, 0, 0, 0], [0.5, 1, 0.5, 0, 0], [0, 0, 0.5, 1, 0]], constant=[0, 0, 0, 0, 7.0]),
        {**LINEAR, **CROPPED},
        name="crop",
    ),
]
CASES += [
    Case("DepthToSpace", (F(2, 8, 2, 3),), twin, {"blocksize": 2, **mode}, name=name)
    for name, mode, twin in [
        ("crd", {"mode": "CRD"}, lambda x: nnf.pixel_shuffle(x, 2)),
        ("dcr", {}, lambda x: nnf.pixel_shuffle(x.unflatten(1, (4, 2)).transpose(1, 2).flatten(1, 2), 2)),
    ]
]
CASES += [
    Case(
        "SpaceToDepth",
        (F(2, 2, 4, 6),),
        lambda x: nnf.pixel_unshuffle(x, 2).unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2),
        {"blocksize": 2},
    ),
]
CASES += [
    Case(
        "Col2Im",
        (F(2, 12, length), C(np.array([6, 5])), C(np.array([2, 3]))),
        lambda x, *_, options=options: nnf.fold(x, (6, 5), (2, 3), *options),
        attrs,
        name=name,
        symbolic={0: (0, 2)},
    )
    for name, length, options, attrs in [
        ("plain", 15, (), {}),
        ("stride", 6, (1, 0, 2), {"strides": [2, 2]}),
        ("padding-dilation", 18, (2, (1, 1), 1), {"pads": [1, 1, 1, 1], "dilations": [2, 2]}),
    ]
]
