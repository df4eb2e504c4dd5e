"""Deformable convolution."""

import torch
import torch.nn.functional as nnf

from autodiff.case import Case, F


def deform_conv(
    x,
    weight,
    offset,
    bias=None,
    mask=None,
    *,
    strides=(1, 1),
    pads=(0,) * 4,
    dilations=(1, 1),
    group=1,
    offset_group=1,
):
    """Tap by tap, each image of a tap sampled by torch and convolved with the weights of the tap."""
    batch, channels, height, width = x.shape
    kernel = weight.shape[2:]
    rows, columns = offset.shape[2:]
    moves = offset.reshape(batch, offset_group, *kernel, 2, rows, columns)
    if mask is None:
        mask = torch.ones_like(offset[:, : offset.shape[1] // 2])
    mask = mask.reshape(batch, offset_group, *kernel, rows, columns)
    images = x.reshape(batch * offset_group, -1, height, width)
    parts = []
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            y = (torch.arange(rows) * strides[0] - pads[0] + i * dilations[0])[:, None] + moves[:, :, i, j, 0]
            z = torch.arange(columns) * strides[1] - pads[1] + j * dilations[1] + moves[:, :, i, j, 1]
            grid = torch.stack([(2 * z + 1) / width - 1, (2 * y + 1) / height - 1], -1).flatten(0, 1)
            read = nnf.grid_sample(images, grid, "bilinear", "zeros", False)
            read = read.reshape(batch, offset_group, -1, rows, columns) * mask[:, :, None, i, j]
            parts.append(
                nnf.conv2d(
                    read.reshape(batch, channels, rows, columns), weight[:, :, i, j, None, None], groups=group
                )
            )
    out = sum(parts)
    return out if bias is None else out + bias[:, None, None]


def case(name, shapes, **attrs):
    """`shapes`: of X, W, offset and, if given, B and mask; offsets stay away from pixels, where the slope jumps."""
    ranges = [{}, {}, {"low": 0.1, "high": 0.9}, {}, {}]
    inputs = tuple(None if s is None else F(*s, **r) for s, r in zip(shapes, ranges, strict=False))
    return Case(
        "DeformConv",
        inputs,
        lambda *x: deform_conv(*x, **attrs),
        attrs,
        name=name,
        symbolic={0: (0, 2, 3), 2: (0, 2, 3), 4: (0, 2, 3)},
    )


CASES = [
    case(
        "all", [(2, 4, 4, 3), (3, 4, 2, 3), (2, 24, 4, 3), (3,), (2, 12, 4, 3)], pads=[1, 1, 0, 1],
        offset_group=2,
    ),
    case("plain", [(1, 2, 4, 5), (3, 2, 2, 2), (1, 8, 3, 4)]),
    case("groups", [(2, 4, 6, 6), (4, 2, 3, 3), (2, 18, 3, 3), (4,)], group=2, strides=[2, 2], pads=[1] * 4),
    case(
        "dilations", [(1, 4, 6, 5), (2, 4, 2, 2), (1, 32, 4, 5), None, (1, 16, 4, 5)], dilations=[2, 2],
        pads=[0, 1, 0, 1], offset_group=4,
    ),
    case(
        "groups-both", [(1, 4, 4, 4), (4, 1, 2, 2), (1, 16, 3, 3), None, (1, 8, 3, 3)], group=4,
        offset_group=2,
    ),
]  # fmt: skip
