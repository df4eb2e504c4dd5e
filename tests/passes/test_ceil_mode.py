"""Poolings with ceil_mode have as many windows as torch gives them, and so do their gradients."""

from __future__ import annotations

import io
import itertools
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxtrain.autodiff import differentiate
from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import build, info, run
from runtimes import counts_ceil_windows
from tolerances import NORM_RELATIVE, norm_relative_error

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
F32 = np.dtype(np.float32)
LAYERS = {
    "max": torch.nn.MaxPool2d(2, 2, 1, ceil_mode=True),
    "average": torch.nn.AvgPool2d(3, 3, padding=1, ceil_mode=True),
    "average-excluding": torch.nn.AvgPool2d(3, 3, padding=1, ceil_mode=True, count_include_pad=False),
    "one-axis": torch.nn.AvgPool2d((3, 2), (3, 2), padding=1, ceil_mode=True),
    "gaps": torch.nn.MaxPool2d(1, 4, ceil_mode=True),
}


def pool(op: str, size: int, kernel: int, stride: int, pad: int, dilation: int) -> onnx.ModelProto:
    extra = {"dilations": [dilation]} if op != "LpPool" else {}
    node = helper.make_node(
        op, ["x"], ["y"], kernel_shape=[kernel], strides=[stride], pads=[pad, pad], ceil_mode=1, **extra
    )
    return build([node], [info("x", [1, 1, size])], [info("y", None)])


@pytest.mark.skipif(not counts_ceil_windows(), reason="these kernels count windows otherwise than specified")
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_shape_is_that_of_the_kernels_and_values_stay(op: str) -> None:
    for size, kernel, stride, dilation in itertools.product((4, 5, 6, 7), (1, 2, 3), (1, 2, 3, 4), (1, 2)):
        if (kernel - 1) * dilation + 1 > size:
            continue
        for pad in range(kernel // 2 + 1):
            plain = pool(op, size, kernel, stride, pad, dilation)
            x = np.random.default_rng(size).standard_normal((1, 1, size)).astype(np.float32)
            (expected,) = run(plain, {"x": x})
            canonical = canonicalize(load_model(plain))
            assert canonical.graph.outputs[0].shape == list(expected.shape)
            np.testing.assert_array_equal(run(to_proto(canonical), {"x": x})[0], expected)


def test_shapes_that_follow_are_corrected_and_folded() -> None:
    """The second pooling is miscounted only if the first one is not."""
    window: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1] * 4, "ceil_mode": 1}
    nodes = [
        helper.make_node("MaxPool", ["x"], ["p"], **window),
        helper.make_node("MaxPool", ["p"], ["q"], **window),
        helper.make_node("Shape", ["q"], ["s"]),
        helper.make_node("ConstantOfShape", ["s"], ["zeros"]),
        helper.make_node("Add", ["q", "zeros"], ["y"]),
    ]
    wrong = [info("p", [1, 1, 6, 6]), info("q", [1, 1, 4, 4])]
    model = build(nodes, [info("x", [1, 1, 9, 9])], [info("y", [1, 1, 4, 4])])
    model.graph.value_info.extend(wrong)
    x = np.random.default_rng(0).standard_normal((1, 1, 9, 9)).astype(np.float32)
    expected = torch.nn.functional.max_pool2d(torch.tensor(x), 2, 2, 1, ceil_mode=True)
    expected = torch.nn.functional.max_pool2d(expected, 2, 2, 1, ceil_mode=True).numpy()
    canonical = canonicalize(load_model(model))
    assert canonical.graph.outputs[0].shape == list(expected.shape)
    np.testing.assert_array_equal(run(to_proto(canonical), {"x": x})[0], expected)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradient_of_an_exported_pooling_matches_torch(name: str, dynamo: bool) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), LAYERS[name], torch.nn.Conv2d(2, 1, 1)).eval()
    x = torch.randn(1, 1, 5, 6, requires_grad=True)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (x.detach(),), file, dynamo=dynamo, **({"verbose": False} if dynamo else {}))
    model = onnx.load_from_string(file.getvalue())
    source, target = model.graph.input[0].name, model.graph.output[0].name
    step = differentiate(model, of=target, wrt=[source], cotangent="ct")
    y = net(x)
    ct = torch.randn_like(y)
    y.backward(ct)
    assert [d.dim_value for d in step.graph.input[-1].type.tensor_type.shape.dim] == list(y.shape)
    results = run(step, {source: x.detach().numpy(), "ct": ct.numpy()})
    for value, expected in zip(results, (y.detach(), x.grad), strict=True):
        assert norm_relative_error(value, expected.numpy()) < NORM_RELATIVE[F32]
