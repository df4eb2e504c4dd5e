"""Draw convolutions, pooling, normalisation and resampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autodiff.fuzz.builder import Builder
from autodiff.fuzz.draw import Draw, Rejected

Drawer = Callable[[Builder, Draw], None]


def image(b: Builder, d: Draw, ranks: Sequence[int] = (3, 4, 5)) -> str:
    """Returns a value `[batch, channels, *spatial]`."""
    rank = d.choice([r for r in ranks if r < 5] * 3 + [r for r in ranks if r == 5])

    def shape() -> list[int]:
        return [*b.sizes(1), *b.sizes(1, least=1), *b.sizes(rank - 2, most=5 if rank < 5 else 3)]

    return b.tensor([rank], fits=lambda a: a.shape[1] > 0, shape=shape)


def _geometry(b: Builder, d: Draw, op: str, rank: int) -> dict[str, Any]:
    """Strides, dilations and padding of sliding windows."""
    attrs: dict[str, Any] = {}
    if d.chance(50):
        attrs["strides"] = [d.integer(1, 3) for _ in range(rank)]
    if b.supports(op, "dilations") and d.chance(25):
        attrs["dilations"] = [d.integer(1, 2) for _ in range(rank)]
    kind = d.choice(["none", "pads", "pads", "auto"])
    if kind == "auto":
        attrs["auto_pad"] = d.choice(["VALID", "SAME_UPPER", "SAME_LOWER", "NOTSET"])
    elif kind == "pads":
        attrs["pads"] = [d.integer(0, 1) for _ in range(2 * rank)]
    return attrs


def conv(b: Builder, d: Draw) -> None:
    """With groups, dilations, strides, every kind of padding."""
    x = image(b, d)
    rank, channels = len(b.shape(x)) - 2, b.shape(x)[1]
    if channels == 0:
        raise Rejected("no channels")
    group = d.choice([g for g in (1, 2, 3, 4) if channels % g == 0])
    kernel = [d.integer(1, 3) for _ in range(rank)]
    outputs = group * d.integer(1, 2)
    w = weight(b, d, [outputs, channels // group, *kernel])
    bias = [b.like([outputs])] if d.chance(50) else []
    attrs = _geometry(b, d, "Conv", rank)
    if 0 in b.shape(x)[2:]:
        # The gradient of a padded one is a ConvTranspose to an image without pixels, which ONNX Runtime refuses.
        attrs.pop("pads", None)
    b.node(
        "Conv",
        [x, w, *bias],
        group=group if group > 1 else None,
        kernel_shape=d.choice([None, kernel]),
        **attrs,
    )


def conv_transpose(b: Builder, d: Draw) -> None:
    """With groups, padding of the output, or its shape."""
    x = image(b, d)
    rank, channels = len(b.shape(x)) - 2, b.shape(x)[1]
    if channels == 0:
        raise Rejected("no channels")
    group = d.choice([g for g in (1, 2, 3, 4) if channels % g == 0])
    kernel = [d.integer(1, 3) for _ in range(rank)]
    w = weight(b, d, [channels, d.integer(1, 2), *kernel])
    bias = [b.like([group * b.shape(w)[1]])] if d.chance(50) else []
    strides = [d.integer(1, 3) for _ in range(rank)]
    attrs: dict[str, Any] = {"strides": strides}
    kind = d.choice(["none", "pads", "output_padding", "same", "shape"])
    if kind == "pads":
        attrs["pads"] = [d.integer(0, 1) for _ in range(2 * rank)]
    elif kind == "output_padding":
        attrs["output_padding"] = [d.integer(0, s - 1) for s in strides]
    elif kind == "same":
        attrs["auto_pad"] = d.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
    elif kind == "shape":
        full = [s * (n - 1) + k for s, n, k in zip(strides, b.shape(x)[2:], kernel, strict=True)]
        attrs["output_shape"] = [max(f - d.integer(0, 1), 1) for f in full]
    b.node("ConvTranspose", [x, w, *bias], group=group if group > 1 else None, **attrs)


def weight(b: Builder, d: Draw, shape: Sequence[int]) -> str:
    """Returns a weight: a parameter, mostly; its sizes are known then."""
    return b.leaf(shape, -1.0, 1.0, kind="parameter" if d.chance(80) else None)


def _pool(op: str) -> Drawer:
    def drawer(b: Builder, d: Draw) -> None:
        x = image(b, d)
        rank = len(b.shape(x)) - 2
        attrs = _geometry(b, d, op, rank)
        attrs["kernel_shape"] = [d.integer(1, 3) for _ in range(rank)]
        if "pads" in attrs:
            attrs["pads"] = [
                min(p, k - 1) for p, k in zip(attrs["pads"], attrs["kernel_shape"] * 2, strict=True)
            ]
        # The reference evaluator pads dilated windows otherwise than the runtime where both settings meet.
        counted_alike = "dilations" not in attrs or not attrs.get("auto_pad", "").startswith("SAME")
        if b.supports(op, "ceil_mode") and counted_alike:
            attrs["ceil_mode"] = d.choice([None, 0, 1])
        if op == "AveragePool":
            attrs["count_include_pad"] = d.choice([None, 0, 1])
        if op == "LpPool":
            attrs["p"] = d.choice([None, 1, 2, 3])
        if op == "MaxPool":
            attrs["storage_order"] = d.choice([None, None, 1])
        b.node(op, [x], **attrs)

    return drawer


def _global_pool(op: str) -> Drawer:
    def drawer(b: Builder, d: Draw) -> None:
        b.node(op, [image(b, d)], p=d.choice([None, 1, 2, 3]) if op == "GlobalLpPool" else None)

    return drawer


def max_unpool(b: Builder, d: Draw) -> None:
    """Undoes a pooling with disjoint windows, whose indices are data."""
    x = image(b, d, (3, 4))
    rank = len(b.shape(x)) - 2
    kernel = [d.integer(1, 2) for _ in range(rank)]
    full = [n * k for n, k in zip(b.shape(x)[2:], kernel, strict=True)]
    where = np.arange(int(np.prod(b.shape(x)[:2]) * np.prod(full))).reshape(*b.shape(x)[:2], *full)
    for axis, k in enumerate(kernel, start=2):
        offset = d.integer(0, k - 1)
        where = np.take(where, range(offset, where.shape[axis], k), axis)
    b.node("MaxUnpool", [x, b.data(where.astype(np.int64))], kernel_shape=kernel, strides=kernel)


def col2im(b: Builder, d: Draw) -> None:
    """Adds up overlapping blocks."""
    block = [d.integer(1, 2) for _ in range(2)]
    size = [k + d.integer(0, 2) for k in block]
    strides = [d.integer(1, 2) for _ in range(2)]
    pads = [d.integer(0, 1) for _ in range(4)] if d.chance(40) else [0] * 4
    counts = [
        (s + pads[i] + pads[i + 2] - k) // t + 1
        for i, (s, k, t) in enumerate(zip(size, block, strides, strict=True))
    ]
    x = b.like([*b.sizes(1), d.integer(1, 2) * int(np.prod(block)), int(np.prod(counts))])
    b.node(
        "Col2Im", [x, b.data(np.array(size)), b.data(np.array(block), fixed=True)], strides=strides, pads=pads
    )


def depth_to_space(b: Builder, d: Draw) -> None:
    """Both modes."""
    x = b.like([*b.sizes(1), 4 * d.integer(1, 2), *b.sizes(2)])
    b.node("DepthToSpace", [x], blocksize=2, mode=d.choice([None, "DCR", "CRD"]))


def space_to_depth(b: Builder, d: Draw) -> None:
    """Blocks of two."""
    b.node("SpaceToDepth", [b.like([*b.sizes(2, least=1), *(2 * s for s in b.sizes(2))])], blocksize=2)


def resize(b: Builder, d: Draw) -> None:
    """Every mode, by scales or sizes."""
    x = image(b, d, (3, 4))
    rank = len(b.shape(x))
    mode = d.choice(["nearest", "linear", "cubic"])
    if mode == "cubic" and rank != 4:
        mode = "linear"
    attrs: dict[str, Any] = {"mode": mode}
    attrs["coordinate_transformation_mode"] = d.choice(
        ["half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners"]
    )
    if mode == "nearest":
        attrs["nearest_mode"] = d.choice(["round_prefer_floor", "floor", "ceil", "round_prefer_ceil"])
    if mode == "cubic":
        attrs["exclude_outside"] = d.choice([None, 1])
    spatial = b.shape(x)[2:]
    if d.chance(60):
        factors = [d.choice([1.0, 2.0, 0.5, 1.5, 3.0]) for _ in spatial]
        if 0 in [int(f * s) for f, s in zip(factors, spatial, strict=True)]:
            raise Rejected("an image of size zero")
        b.node("Resize", [x, "", b.data(np.array([1, 1, *factors], np.float32))], **attrs)
        return
    sizes = [*b.shape(x)[:2], *(d.integer(1, 5) for _ in spatial)]
    if 0 in b.shape(x):
        raise Rejected("an image of size zero")
    b.node("Resize", [x, "", "", b.data(np.array(sizes))], **attrs)


# Normalisation.


def batch_norm(b: Builder, d: Draw) -> None:
    """With given statistics or those of the batch."""
    x = image(b, d, (2, 3, 4))
    channels = b.shape(x)[1]
    training = b.supports("BatchNormalization", "training_mode") and d.chance(50)
    scale, bias = (weight(b, d, [channels]) for _ in range(2))
    mean = b.leaf([channels], wrt=not training)
    var = b.leaf([channels], 0.3, 2.0, wrt=not training)
    b.unused.update((mean, var))  # one that serves as anything else is taken for merged by an exporter
    epsilon = d.choice([None, 0.01])
    if training:
        if b.values[x].size // max(channels, 1) < 2:
            raise Rejected("the variance of one number")
        names = b.nodes("BatchNormalization", [x, scale, bias, mean, var], 3, training_mode=1, epsilon=0.01)
        b.unused.update(names[1:])  # running statistics have no gradient
        return
    b.node("BatchNormalization", [x, scale, bias, mean, var], epsilon=epsilon)


def instance_norm(b: Builder, d: Draw) -> None:
    """A scale per channel."""
    x = image(b, d)
    channels = [b.shape(x)[1]]
    b.node("InstanceNormalization", [x, weight(b, d, channels), weight(b, d, channels)], epsilon=0.01)


def group_norm(b: Builder, d: Draw) -> None:
    """A scale per channel, or per group before opset 21."""
    x = image(b, d)
    channels = b.shape(x)[1]
    if 0 in b.shape(x):
        raise Rejected("a group of nothing")
    groups = d.choice([g for g in (1, 2, 3) if channels % g == 0])
    scales = [channels if b.graph.opset >= 21 else groups]
    if b.graph.opset < 21 and groups != channels:
        raise Rejected("the judge scales channels")
    b.node(
        "GroupNormalization",
        [x, weight(b, d, scales), weight(b, d, scales)],
        num_groups=groups,
        epsilon=0.01,
    )


def layer_norm(b: Builder, d: Draw) -> None:
    """Over some of the last axes; the scale may be repeated."""
    x = b.tensor(range(1, 5))
    rank = len(b.shape(x))
    axis = d.integer(-rank, rank - 1)
    shape = b.shape(x)[axis:]
    scale = b.broadcastable(shape, within=True)
    bias = [b.broadcastable(shape, within=True)] if d.chance(60) else []
    b.node("LayerNormalization", [x, scale, *bias], axis=axis, epsilon=0.01)


def rms_norm(b: Builder, d: Draw) -> None:
    """Over some of the last axes."""
    x = b.tensor(range(1, 5))
    rank = len(b.shape(x))
    axis = d.integer(-rank, rank - 1)
    b.node("RMSNormalization", [x, b.broadcastable(b.shape(x)[axis:], within=True)], axis=axis, epsilon=0.01)


def lp_norm(b: Builder, d: Draw) -> None:
    """Both norms."""
    x = b.tensor(range(1, 5))
    rank = len(b.shape(x))
    b.node("LpNormalization", [x], axis=d.choice([None, *range(-rank, rank)]), p=d.choice([None, 1, 2]))


def lrn(b: Builder, d: Draw) -> None:
    """Windows shorter and longer than the channels."""
    attrs = {"alpha": d.choice([None, 0.5]), "beta": d.choice([None, 0.625]), "bias": d.choice([None, 2.0])}
    b.node("LRN", [image(b, d, (3, 4, 5))], size=d.integer(1, 4), **attrs)


def mean_variance_norm(b: Builder, d: Draw) -> None:
    """Over given axes."""
    x = image(b, d, (3, 4))
    rank = len(b.shape(x))
    axes = d.choice([[0, *range(2, rank)], [rank - 1], [0, -1], [-1, 1]])
    if np.prod([b.shape(x)[a] for a in axes]) < 3:
        raise Rejected("one number, or two, of which only the signs are left: gradients are rounding errors")
    b.node("MeanVarianceNormalization", [x], axes=axes)


DRAWERS: dict[str, Drawer] = {
    **{op: _pool(op) for op in ("AveragePool", "LpPool", "MaxPool")},
    **{op: _global_pool(op) for op in ("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool")},
    "BatchNormalization": batch_norm,
    "Col2Im": col2im,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "DepthToSpace": depth_to_space,
    "GroupNormalization": group_norm,
    "InstanceNormalization": instance_norm,
    "LRN": lrn,
    "LayerNormalization": layer_norm,
    "LpNormalization": lp_norm,
    "MaxUnpool": max_unpool,
    "MeanVarianceNormalization": mean_variance_norm,
    "RMSNormalization": rms_norm,
    "Resize": resize,
    "SpaceToDepth": space_to_depth,
}
