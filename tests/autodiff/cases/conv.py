"""Convolutions."""

import torch.nn.functional as nnf

from autodiff.case import Case, F

CONV = {1: nnf.conv1d, 2: nnf.conv2d, 3: nnf.conv3d}
TRANSPOSED = {1: nnf.conv_transpose1d, 2: nnf.conv_transpose2d, 3: nnf.conv_transpose3d}


def around(pads):
    """ONNX pads (all begins, then all ends) as `torch.nn.functional.pad` takes them: the last axis first."""
    rank = len(pads) // 2
    return [p for axis in reversed(range(rank)) for p in (pads[axis], pads[rank + axis])]


def conv(x, w, bias=None, *, pads=(), strides=1, dilations=1, group=1, **_):
    return CONV[x.ndim - 2](nnf.pad(x, around(pads)), w, bias, strides, 0, dilations, group)


def conv_transpose(x, w, bias=None, *, pads=None, strides=1, dilations=1, group=1, output_padding=None, **_):
    """torch pads symmetrically only: compute everything, then cut."""
    rank = x.ndim - 2
    out = TRANSPOSED[rank](x, w, None, strides, 0, 0, group, dilations)
    out = nnf.pad(out, around([0] * rank + list(output_padding or [0] * rank)))
    out = nnf.pad(out, around([-p for p in pads or [0] * 2 * rank]))
    return out if bias is None else out + bias.reshape(-1, *[1] * rank)


def case(op, x, w, *, bias=False, name, equal_to=None, opset=21, **attrs):
    """`equal_to`: attributes that say the same in torch's words where ONNX derives the padding itself."""
    function = conv if op == "Conv" else conv_transpose
    channels = w[0] if op == "Conv" else w[1] * attrs.get("group", 1)
    inputs = (F(*x), F(*w), F(channels)) if bias else (F(*x), F(*w))
    return Case(
        op,
        inputs,
        lambda *args: function(*args, **{**attrs, **(equal_to or {})}),
        attrs,
        name=name,
        opset=opset,
        symbolic={0: (0, *range(2, len(x)))} if "output_shape" not in attrs else {0: (0,)},
    )


CASES = [
    case("Conv", (2, 3, 7), (4, 3, 3), bias=True, name="1d", pads=[1, 1]),
    case("Conv", (2, 3, 8), (4, 3, 3), name="1d-stride-pads", strides=[3], pads=[0, 2]),
    case("Conv", (2, 3, 6, 5), (4, 3, 3, 2), bias=True, name="2d-kernel_shape", kernel_shape=[3, 2]),
    case("Conv", (2, 3, 6, 5), (4, 3, 1, 1), bias=True, name="pointwise"),
    case("Conv", (2, 3, 6, 5), (4, 3, 1, 1), name="pointwise-stride", strides=[2, 2]),
    case("Conv", (2, 4, 6), (6, 2, 1), bias=True, name="pointwise-groups", group=2),
    case("Conv", (2, 3, 4, 5), (4, 3, 1, 1), name="pointwise-pads", pads=[1, 0, 2, 1]),
    case("Conv", (2, 3, 4, 5), (3, 1, 3, 2), name="depthwise-uneven", group=3, pads=[2, 0, 1, 1]),
    case("Conv", (2, 3, 4, 5), (3, 1, 2, 2), name="depthwise-pads", group=3, pads=[2, 1, 0, 1]),
    case("Conv", (2, 17, 5, 4), (3, 17, 3, 3), name="many-channels", pads=[1, 1, 1, 1]),
    case("Conv", (2, 34, 5, 4), (4, 17, 2, 3), name="many-channels-groups", group=2, strides=[2, 1]),
    case("Conv", (2, 4, 7, 6), (6, 2, 3, 3), bias=True, name="groups", group=2, pads=[1, 0, 2, 1]),
    case("Conv", (2, 4, 7, 6), (4, 1, 3, 3), bias=True, name="depthwise", group=4, pads=[1, 1, 1, 1]),
    case("Conv", (2, 4, 7, 6), (4, 1, 3, 3), name="depthwise-stride", group=4, strides=[2, 2], pads=[1] * 4),
    case("Conv", (2, 2, 9, 10), (2, 1, 3, 3), name="depthwise-rows", group=2, pads=[1, 0, 2, 1]),
    case(
        "Conv", (1, 2, 15, 14), (2, 1, 3, 2), name="depthwise-rows-stride", group=2, strides=[1, 2],
        dilations=[2, 1], pads=[0, 1, 1, 0],
    ),
    case("Conv", (2, 3, 4, 35), (3, 1, 2, 3), name="depthwise-wide", group=3, strides=[2, 1], pads=[0, 1, 1, 0]),
    case("Conv", (2, 3, 17), (3, 1, 4), name="depthwise-1d", group=3, strides=[2], dilations=[3], pads=[2, 1]),
    case("Conv", (2, 2, 7, 6), (4, 1, 3, 3), name="depthwise-multiplier", group=2, strides=[2, 3]),
    case("Conv", (1, 1, 7, 6), (1, 1, 3, 3), name="one-channel", dilations=[2, 1]),
    case(
        "Conv", (2, 3, 9, 10), (2, 3, 3, 2), name="dilations", dilations=[2, 3], strides=[2, 3],
        pads=[1, 2, 3, 0],
    ),
    case(
        "Conv", (2, 2, 4, 5, 6), (3, 2, 2, 3, 2), bias=True, name="3d", strides=[1, 2, 3],
        pads=[1, 0, 1, 0, 1, 0],
    ),
    case("Conv", (2, 4, 4, 5, 4), (4, 1, 2, 3, 2), name="3d-depthwise", group=4),
    case("Conv", (2, 3, 9, 10), (2, 3, 4, 4), bias=True, name="many-taps", strides=[2, 2], pads=[1, 0, 2, 1]),
    case("Conv", (2, 2, 17, 15), (3, 2, 4, 5), name="many-taps-dilations", strides=[3, 2], dilations=[2, 3]),
    case("Conv", (2, 2, 70), (3, 2, 16), name="many-taps-1d", strides=[7], pads=[3, 3]),
    case("Conv", (2, 2, 5, 6, 7), (3, 2, 2, 3, 3), name="many-taps-3d", strides=[2, 3, 2], pads=[1] * 6),
    case("Conv", (2, 2, 7, 8), (3, 2, 3, 3), name="valid", auto_pad="VALID", strides=[2, 2]),
    case(
        "Conv", (2, 2, 7, 8), (3, 2, 3, 4), bias=True, name="same-upper", auto_pad="SAME_UPPER",
        equal_to={"pads": [1, 1, 1, 2]},
    ),
    case(
        "Conv", (2, 2, 7, 8), (3, 2, 3, 4), name="same-lower", auto_pad="SAME_LOWER",
        equal_to={"pads": [1, 2, 1, 1]},
    ),
    case(
        "Conv", (2, 2, 7, 8), (3, 2, 3, 4), name="same-upper-stride", auto_pad="SAME_UPPER", strides=[2, 3],
        equal_to={"pads": [1, 1, 1, 1]},
    ),
    case(
        "Conv", (2, 2, 8, 8), (3, 2, 3, 5), name="same-lower-stride", auto_pad="SAME_LOWER", strides=[2, 3],
        equal_to={"pads": [1, 2, 0, 1]},
    ),
    case("ConvTranspose", (2, 3, 5), (3, 4, 3), bias=True, name="1d", strides=[2], pads=[1, 0]),
    case("ConvTranspose", (2, 3, 4, 5), (3, 2, 3, 2), bias=True, name="2d"),
    case(
        "ConvTranspose", (2, 3, 4, 3), (3, 2, 3, 3), name="output_padding", strides=[2, 3], pads=[1, 0, 1, 2],
        output_padding=[1, 2],
    ),
    case("ConvTranspose", (2, 4, 3, 4), (4, 3, 3, 2), bias=True, name="groups", group=2, strides=[2, 1]),
    case("ConvTranspose", (2, 4, 3, 4), (4, 1, 2, 2), bias=True, name="depthwise", group=4, strides=[2, 2]),
    case("ConvTranspose", (2, 2, 2, 3, 2), (2, 3, 2, 2, 3), bias=True, name="3d", strides=[2, 1, 2]),
    case("ConvTranspose", (2, 3, 3, 4), (3, 2, 4, 4), bias=True, name="many-taps", strides=[2, 2], pads=[1] * 4),
    case(
        "ConvTranspose", (2, 2, 3, 3), (2, 2, 4, 4), name="many-taps-output_shape", output_shape=[9, 9],
        strides=[3, 2], equal_to={"output_shape": None, "pads": [1, 0, 0, 0], "output_padding": [0, 1]},
    ),
    case("ConvTranspose", (2, 2, 3, 4), (2, 3, 2, 3), name="dilations", dilations=[2, 3], strides=[1, 2]),
    case("ConvTranspose", (2, 2, 3, 3), (2, 2, 3, 2), name="valid", auto_pad="VALID", strides=[2, 3]),
    case(
        "ConvTranspose", (2, 2, 3, 3), (2, 2, 4, 3), name="same-upper", auto_pad="SAME_UPPER", strides=[1, 2],
        equal_to={"pads": [1, 0, 2, 1]},
    ),
    case(
        "ConvTranspose", (2, 2, 3, 3), (2, 2, 4, 3), name="same-lower", auto_pad="SAME_LOWER", strides=[1, 2],
        equal_to={"pads": [2, 1, 1, 0]},
    ),
    case(
        "ConvTranspose", (2, 2, 3, 3), (2, 2, 4, 3), name="output_shape", output_shape=[9, 6], strides=[3, 2],
        equal_to={"pads": [1, 1, 0, 0]},
    ),
    case(
        "ConvTranspose", (2, 2, 3, 3), (2, 2, 4, 3), name="output_shape-same-upper", output_shape=[7, 6],
        strides=[2, 2], auto_pad="SAME_UPPER", equal_to={"pads": [0, 0, 1, 1]},
    ),
]  # fmt: skip
