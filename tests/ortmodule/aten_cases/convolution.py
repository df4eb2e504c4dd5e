"""Convolutions."""

from functools import partial

import torch.nn.functional as F

from ortmodule.aten_case import Case, T


def _case(name, fn, arguments):
    """Kernels have fixed sizes."""
    return Case(name, fn, arguments, dynamic=(0,))


CASES = [
    _case("conv1d", partial(F.conv1d, stride=2, padding=1), (T(2, 3, 8), T(4, 3, 3), T(4))),
    _case("conv2d", partial(F.conv2d, padding=1), (T(2, 3, 6, 5), T(4, 3, 3, 3), T(4))),
    _case("conv2d_without_bias", partial(F.conv2d, stride=(2, 1)), (T(2, 3, 7, 5), T(4, 3, 3, 2))),
    _case(
        "conv2d_grouped_dilated",
        partial(F.conv2d, groups=2, dilation=2, padding=2),
        (T(2, 4, 6, 6), T(6, 2, 3, 3), T(6)),
    ),
    _case("conv2d_depthwise", partial(F.conv2d, groups=4, padding=1), (T(2, 4, 5, 5), T(4, 1, 3, 3), T(4))),
    _case("conv2d_same", partial(F.conv2d, padding="same"), (T(2, 3, 6, 6), T(4, 3, 3, 3), T(4))),
    _case("conv3d", partial(F.conv3d, padding=1, stride=2), (T(2, 2, 4, 5, 6), T(3, 2, 3, 3, 3), T(3))),
    _case(
        "conv_transpose1d",
        partial(F.conv_transpose1d, stride=2, padding=1, output_padding=1),
        (T(2, 3, 5), T(3, 4, 3), T(4)),
    ),
    _case("conv_transpose2d", partial(F.conv_transpose2d, stride=2), (T(2, 3, 4, 5), T(3, 4, 2, 2), T(4))),
    _case(
        "conv_transpose2d_grouped",
        partial(F.conv_transpose2d, stride=3, padding=1, output_padding=(1, 2), groups=2),
        (T(2, 4, 4, 3), T(4, 3, 3, 3)),
    ),
    _case("conv_transpose3d", partial(F.conv_transpose3d, dilation=2), (T(1, 2, 3, 3, 3), T(2, 2, 2, 2, 2))),
]
