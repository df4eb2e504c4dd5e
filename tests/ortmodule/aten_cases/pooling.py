"""Pooling, resizing and sampling."""

from functools import partial

import torch
import torch.nn.functional as F

from ortmodule.aten_case import Case, T


def _interpolate(**options):
    return partial(F.interpolate, **options)


def _unpooled(pool, unpool, **windows):
    """Pools and writes the maxima back to their places, as the two halves of a SegNet do."""
    return lambda x: unpool(*pool(x, return_indices=True, **windows), output_size=x.shape, **windows)


CASES = [
    Case("max_pool1d", partial(F.max_pool1d, kernel_size=2), (T(2, 3, 8),)),
    Case("max_pool2d", partial(F.max_pool2d, kernel_size=3, stride=2, padding=1), (T(2, 3, 7, 8),)),
    Case("max_pool2d_dilated", partial(F.max_pool2d, kernel_size=2, stride=1, dilation=2), (T(2, 3, 6, 6),)),
    Case("max_pool2d_ceil", partial(F.max_pool2d, kernel_size=2, ceil_mode=True), (T(2, 3, 5, 7),)),
    Case(
        "max_pool2d_ceil_last_window_outside",
        partial(F.max_pool2d, kernel_size=2, stride=3, padding=1, ceil_mode=True), (T(1, 2, 5, 6),),
    ),
    Case("max_pool2d_indices", partial(F.max_pool2d, kernel_size=2, return_indices=True), (T(2, 3, 4, 6),)),
    Case("max_pool2d_without_batch", partial(F.max_pool2d, kernel_size=2), (T(3, 4, 6),)),
    Case("max_pool3d", partial(F.max_pool3d, kernel_size=2), (T(1, 2, 4, 4, 6),)),
    Case("max_unpool1d", _unpooled(F.max_pool1d, F.max_unpool1d, kernel_size=2), (T(2, 3, 8),)),
    Case("max_unpool2d", _unpooled(F.max_pool2d, F.max_unpool2d, kernel_size=2), (T(2, 3, 5, 6),)),
    Case(
        "max_unpool2d_without_batch",
        lambda x: F.max_unpool2d(x, torch.tensor([[[3, 0], [9, 14]]]).expand(3, 2, 2), 2), (T(3, 2, 2),),
    ),
    Case(
        "max_unpool2d_of_overlapping_windows",
        _unpooled(F.max_pool2d, F.max_unpool2d, kernel_size=3, stride=1), (T(1, 2, 5, 4),),
    ),
    Case("max_unpool3d", _unpooled(F.max_pool3d, F.max_unpool3d, kernel_size=2), (T(1, 2, 4, 2, 6),)),
    Case("avg_pool1d", partial(F.avg_pool1d, kernel_size=3, stride=2, padding=1), (T(2, 3, 8),)),
    Case("avg_pool2d", partial(F.avg_pool2d, kernel_size=2), (T(2, 3, 6, 6),)),
    Case(
        "avg_pool2d_without_pads", partial(F.avg_pool2d, kernel_size=3, padding=1, count_include_pad=False),
        (T(2, 3, 6, 6),),
    ),
    Case(
        "avg_pool2d_ceil", partial(F.avg_pool2d, kernel_size=3, stride=2, ceil_mode=True, padding=1),
        (T(2, 3, 6, 7),),
    ),
    Case(
        "avg_pool2d_divisor", partial(F.avg_pool2d, kernel_size=2, divisor_override=3, padding=1),
        (T(2, 3, 4, 4),),
    ),
    Case(
        "avg_pool2d_divisor_ceil",
        partial(F.avg_pool2d, kernel_size=3, stride=2, divisor_override=5, padding=1, ceil_mode=True),
        (T(2, 3, 6, 7),),
    ),
    Case("adaptive_max_pool2d_uneven", partial(F.adaptive_max_pool2d, output_size=(3, 5)), (T(2, 3, 7, 6),)),
    Case(
        "adaptive_max_pool2d_ties", lambda x: F.adaptive_max_pool2d(x.round().relu(), (3, 4)),
        (T(2, 3, 7, 6),),
    ),
    Case(
        "adaptive_max_pool2d_indices",
        partial(F.adaptive_max_pool2d, output_size=(3, 2), return_indices=True), (T(2, 3, 7, 6),),
    ),
    Case("adaptive_max_pool1d_larger", partial(F.adaptive_max_pool1d, output_size=5), (T(2, 3, 3),)),
    Case("adaptive_max_pool3d_uneven", partial(F.adaptive_max_pool3d, output_size=2), (T(1, 2, 3, 5, 4),)),
    Case("avg_pool3d", partial(F.avg_pool3d, kernel_size=2), (T(1, 2, 4, 4, 6),)),
    Case("adaptive_avg_pool1d_one", partial(F.adaptive_avg_pool1d, output_size=1), (T(2, 3, 7),)),
    Case("adaptive_avg_pool2d_one", partial(F.adaptive_avg_pool2d, output_size=1), (T(2, 3, 5, 7),)),
    Case("adaptive_max_pool2d_one", partial(F.adaptive_max_pool2d, output_size=1), (T(2, 3, 5, 7),)),
    Case(
        "adaptive_avg_pool2d", partial(F.adaptive_avg_pool2d, output_size=(2, 4)), (T(2, 3, 6, 8),),
        dynamic=False,
    ),
    Case(
        "adaptive_avg_pool2d_uneven", partial(F.adaptive_avg_pool2d, output_size=(3, 4)), (T(2, 3, 7, 6),),
        dynamic=False,
    ),
    Case(
        "adaptive_avg_pool3d", partial(F.adaptive_avg_pool3d, output_size=2), (T(1, 3, 4, 6, 2),),
        dynamic=False,
    ),
    Case("adaptive_max_pool1d", partial(F.adaptive_max_pool1d, output_size=2), (T(2, 3, 8),), dynamic=False),
    Case(
        "adaptive_max_pool2d", partial(F.adaptive_max_pool2d, output_size=2), (T(2, 3, 4, 6),), dynamic=False
    ),
    Case("upsample_nearest1d", _interpolate(scale_factor=2), (T(2, 3, 5),)),
    Case("upsample_nearest2d", _interpolate(scale_factor=2), (T(2, 3, 4, 5),)),
    # An axis whose size stays or doubles, but not by this scale.
    Case("upsample_nearest2d_kept", _interpolate(scale_factor=1.3), (T(2, 3, 4, 2),), dynamic=False),
    Case("upsample_nearest2d_doubled", _interpolate(scale_factor=2.2), (T(2, 3, 4, 7),), dynamic=False),
    Case("upsample_linear1d_kept", _interpolate(scale_factor=1.3, mode="linear"), (T(2, 3, 3),), dynamic=False),
    Case("upsample_bilinear_kept", _interpolate(scale_factor=1.3, mode="bilinear"), (T(2, 3, 4, 2),), dynamic=False),
    Case("upsample_nearest2d_uneven", _interpolate(size=(7, 3)), (T(2, 3, 4, 5),)),
    Case("upsample_nearest3d", _interpolate(scale_factor=2), (T(1, 2, 3, 2, 2),)),
    Case("upsample_nearest_exact", _interpolate(size=(7, 3), mode="nearest-exact"), (T(2, 3, 4, 5),)),
    Case("upsample_nearest_exact1d", _interpolate(size=7, mode="nearest-exact"), (T(2, 3, 5),)),
    Case("upsample_nearest_exact3d", _interpolate(size=(2, 5, 3), mode="nearest-exact"), (T(1, 2, 3, 2, 2),)),
    Case("upsample_linear1d", _interpolate(scale_factor=2.5, mode="linear"), (T(2, 3, 5),), dynamic=False),
    Case("upsample_bilinear", _interpolate(scale_factor=2, mode="bilinear"), (T(2, 3, 4, 5),)),
    Case(
        "upsample_bilinear_uneven", _interpolate(scale_factor=1.75, mode="bilinear"), (T(2, 3, 5, 6),),
        dynamic=False,
    ),
    Case(
        "upsample_bilinear_corners", _interpolate(size=(7, 4), mode="bilinear", align_corners=True),
        (T(2, 3, 4, 5),),
    ),
    Case("upsample_bilinear_down", _interpolate(size=(2, 3), mode="bilinear"), (T(2, 3, 6, 6),)),
    Case("upsample_bicubic", _interpolate(scale_factor=2, mode="bicubic"), (T(2, 3, 4, 5),), dynamic=False),
    Case("upsample_trilinear", _interpolate(scale_factor=2, mode="trilinear"), (T(1, 2, 3, 2, 4),)),
    Case(
        "grid_sample", partial(F.grid_sample, align_corners=False),
        (T(2, 3, 5, 6), T(2, 4, 3, 2, low=-1.1, high=1.1)),
    ),
    Case(
        "grid_sample_border", partial(F.grid_sample, align_corners=True, padding_mode="border"),
        (T(2, 3, 5, 6), T(2, 4, 3, 2, low=-1.1, high=1.1)),
    ),
    Case(
        "grid_sample_nearest", partial(F.grid_sample, align_corners=False, mode="nearest"),
        (T(2, 3, 5, 6), T(2, 4, 3, 2, low=-1.1, high=1.1, grad=False)),
    ),
    Case(
        "grid_sample_3d", partial(F.grid_sample, align_corners=False),
        (T(1, 2, 3, 4, 3), T(1, 2, 3, 2, 3, low=-1.1, high=1.1)),
    ),
    Case(
        "max_pool2d_ties", partial(F.max_pool2d, kernel_size=3, stride=1),
        (torch.tensor([1.0, 2.0, 2.0, 1.0] * 8).view(1, 1, 4, 8).requires_grad_(),),
    ),
]  # fmt: skip
