"""Pooling."""

import numpy as np
import torch
import torch.nn.functional as nnf

from autodiff.case import Case, F, R
from autodiff.cases.conv import CONV, around

MAX = {1: nnf.max_pool1d, 2: nnf.max_pool2d, 3: nnf.max_pool3d}
GLOBAL_MAX = {1: nnf.adaptive_max_pool1d, 2: nnf.adaptive_max_pool2d, 3: nnf.adaptive_max_pool3d}


def max_pool(x, *, kernel_shape, strides=1, pads=(), dilations=1, ceil_mode=0, **_):
    padded = nnf.pad(x, around(pads), value=-torch.inf)
    return MAX[x.ndim - 2](padded, kernel_shape, strides, 0, dilations, bool(ceil_mode))


def window_sums(x, *, kernel_shape, strides=None, pads=None, dilations=None, ceil_mode=0, value=0.0, **_):
    """Sums of windows over x, padded with `value`; zeros beyond, where ceil_mode lets windows reach."""
    rank = x.ndim - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    x = nnf.pad(x, around(pads or [0] * 2 * rank), value=value)
    if ceil_mode:
        extents = [(k - 1) * d + 1 for k, d in zip(kernel_shape, dilations, strict=True)]
        short = [-(size - e) % s for size, e, s in zip(x.shape[2:], extents, strides, strict=True)]
        x = nnf.pad(x, around([0] * rank + short))
    flat = x.reshape(-1, 1, *x.shape[2:])
    out = CONV[rank](flat, torch.ones(1, 1, *kernel_shape, dtype=x.dtype), None, strides, 0, dilations)
    return out.reshape(*x.shape[:2], *out.shape[2:])


def average_pool(x, *, count_include_pad=0, **attrs):
    return window_sums(x, **attrs) / window_sums(torch.ones_like(x), value=float(count_include_pad), **attrs)


def lp_pool(x, *, p=2, **attrs):
    return window_sums(x.abs() ** p, **attrs) ** (1 / p)


TWINS = {"MaxPool": max_pool, "AveragePool": average_pool, "LpPool": lp_pool}


def case(op, *shape, name, equal_to=None, **attrs):
    """`equal_to`: attributes that say the same in torch's words where ONNX derives the padding itself."""
    own = {**attrs, **(equal_to or {})}
    x = F(*shape, distinct=op == "MaxPool")
    return Case(op, (x,), lambda x: TWINS[op](x, **own), attrs, name=name)


WINDOWS = {
    "disjoint": ((2, 3, 6, 4), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "disjoint-rest": ((2, 3, 7, 8), {"kernel_shape": [2, 3], "strides": [2, 3]}),
    "disjoint-pads": ((2, 2, 6, 5), {"kernel_shape": [3, 3], "strides": [3, 3], "pads": [1, 1, 0, 0]}),
    "overlapping": ((2, 3, 6, 5), {"kernel_shape": [3, 2]}),
    "overlapping-stride": ((2, 3, 8, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "asymmetric-pads": ((2, 2, 6, 6), {"kernel_shape": [3, 3], "strides": [2, 1], "pads": [0, 1, 2, 0]}),
    "dilations": ((2, 2, 8, 7), {"kernel_shape": [2, 3], "dilations": [3, 2], "strides": [2, 1]}),
    "gaps": ((2, 2, 9, 8), {"kernel_shape": [2, 1], "dilations": [2, 1], "strides": [3, 4]}),
    "ceil_mode": ((2, 2, 8, 6), {"kernel_shape": [3, 3], "strides": [3, 2], "ceil_mode": 1}),
    "ceil_mode-disjoint": ((2, 2, 7, 5), {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    "ceil_mode-pads": (
        (2, 2, 9, 8),
        {"kernel_shape": [3, 3], "strides": [3, 2], "pads": [1, 0, 1, 0], "ceil_mode": 1},
    ),
    "1d": ((2, 3, 9), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
    "1d-disjoint": ((2, 3, 9), {"kernel_shape": [3], "strides": [3]}),
    "3d": ((2, 2, 4, 5, 4), {"kernel_shape": [2, 3, 2], "strides": [1, 2, 2], "pads": [1, 0, 0, 0, 1, 0]}),
    "3d-disjoint": ((2, 2, 4, 4, 4), {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]}),
    "valid": ((2, 2, 6, 5), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "VALID"}),
}
BY_TWO = {"kernel_shape": [3, 3], "strides": [2, 2]}
CASES = [case(op, *shape, name=name, **attrs) for op in TWINS for name, (shape, attrs) in WINDOWS.items()]
CASES += [
    case(op, 2, 2, *sizes, name=name, equal_to={"pads": pads}, **attrs)
    for op in TWINS
    for name, sizes, pads, attrs in [
        ("same-upper", (7, 6), [1, 0, 1, 1], {"kernel_shape": [3, 2], "auto_pad": "SAME_UPPER"}),
        ("same-lower", (7, 6), [1, 1, 1, 0], {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER"}),
        ("same-upper-stride", (8, 7), [0, 1, 1, 1], {**BY_TWO, "auto_pad": "SAME_UPPER"}),
        ("same-lower-stride", (8, 7), [1, 1, 0, 1], {**BY_TWO, "auto_pad": "SAME_LOWER"}),
    ]
]  # fmt: skip
CASES += [
    case("AveragePool", *shape, name=f"{name}-include", count_include_pad=1, **attrs)
    for name, (shape, attrs) in WINDOWS.items()
    if "pads" in attrs or "ceil_mode" in attrs
]
CASES += [
    Case(
        "AveragePool",
        (F(2, 3, 7, 6),),
        lambda x, include=include: nnf.avg_pool2d(
            x, 3, 2, 1, ceil_mode=True, count_include_pad=bool(include)
        ),
        {
            "kernel_shape": [3, 3],
            "strides": [2, 2],
            "pads": [1] * 4,
            "ceil_mode": 1,
            "count_include_pad": include,
        },
        name=f"torch-include={include}",
    )
    for include in (0, 1)
]
CASES += [
    case("MaxPool", 2, 2, 5, 4, name="storage_order", kernel_shape=[2, 2], storage_order=1),
    case("LpPool", 2, 2, 5, 4, name="p=1", kernel_shape=[2, 2], p=1),
    case("LpPool", 2, 2, 5, 4, name="p=3", kernel_shape=[2, 2], p=3),
]
for shape in [(2, 3, 5), (2, 3, 4, 5), (2, 2, 3, 2, 3)]:
    axes = tuple(range(2, len(shape)))
    CASES += [
        Case("GlobalAveragePool", (F(*shape),), lambda x, axes=axes: x.mean(axes, keepdim=True)),
        Case("GlobalMaxPool", (F(*shape, distinct=True),), lambda x: GLOBAL_MAX[x.ndim - 2](x, 1)),
        Case(
            "GlobalLpPool",
            (F(*shape),),
            lambda x, axes=axes: torch.linalg.vector_norm(x, 3, axes, keepdim=True),
            {"p": 3},
        ),
    ]  # fmt: skip


def _unpool_indices() -> np.ndarray:
    """Indices of a 2x2 max pooling of [2, 2, 4, 6], as ONNX counts them: over all axes."""
    x = torch.from_numpy(np.random.default_rng(0).permutation(96).reshape(2, 2, 4, 6).astype(np.float64))
    plane = nnf.max_pool2d(x, 2, return_indices=True)[1].numpy()
    return plane + 24 * np.arange(4).reshape(2, 2, 1, 1)


CASES += [
    Case(
        "MaxUnpool",
        (F(2, 2, 2, 3), R(_unpool_indices())),
        lambda x, i: nnf.max_unpool2d(x, i % 24, 2),
        {"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    Case(
        "MaxUnpool",
        (F(2, 2, 2, 3), R(np.arange(24).reshape(2, 2, 2, 3) * 4)),
        lambda x, i: (
            torch.zeros(96, dtype=x.dtype).index_put((i.flatten(),), x.flatten()).reshape(2, 2, 4, 6)
        ),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 0, 0]},
        name="pads",
    ),
    # With larger sizes the standard and ONNX Runtime compute different things: test_max_unpool.py.
    Case(
        "MaxUnpool",
        (F(2, 2, 2, 3), R(_unpool_indices()), R(np.array([2, 2, 4, 6]))),
        lambda x, i, _: nnf.max_unpool2d(x, i % 24, 2),
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        name="output_shape",
    ),
]
