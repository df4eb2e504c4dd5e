"""Poolings with ceil_mode have as many windows as torch gives them, and so do their gradients."""

from __future__ import annotations

import io
import itertools
import warnings
from collections import defaultdict
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxtrain.autodiff import differentiate
from onnxtrain.passes import canonicalize, load_model, to_proto
from onnxtrain.runtime.device import parse_device
from onnxtrain.runtime.session import open_session
from passes._models import build, info, run
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


def pool(op: str, size: int | str, **attributes: Any) -> onnx.ModelProto:
    outputs = ["y", "i"] if op == "MaxPool" else ["y"]
    node = helper.make_node(op, ["x"], outputs, ceil_mode=1, **attributes)
    types = {"y": onnx.TensorProto.FLOAT, "i": onnx.TensorProto.INT64}
    return build([node], [info("x", [1, 2, size])], [info(name, None, types[name]) for name in outputs])


def specified(
    x: np.ndarray, op: str, kernel: int, stride: int, pads: tuple[int, int], dilation: int, include: int
) -> tuple[list[float], list[int | None]]:
    """Values of the windows that start before the end of `x`, and where their maxima lie; None: outside."""
    values, places = [], []
    begin, end = pads
    extent = (kernel - 1) * dilation + 1
    rounded_up = -(-(len(x) + begin + end - extent) // stride) + 1
    for start in range(-begin, rounded_up * stride - begin, stride):
        if start >= len(x):
            continue
        taps = [start + tap * dilation for tap in range(kernel)]
        inside = [tap for tap in taps if 0 <= tap < len(x)]
        counted = [tap for tap in taps if -begin <= tap < len(x) + end] if include else inside
        places.append(max(inside, key=lambda tap: x[tap], default=None))
        if op == "MaxPool":
            values.append(max((x[tap] for tap in inside), default=np.nan))
        elif op == "AveragePool":
            values.append(sum(x[tap] for tap in inside) / len(counted) if counted else np.nan)
        else:
            values.append(np.sqrt(sum(x[tap] ** 2 for tap in inside)))
    return values, places


Geometry = tuple[int, int, tuple[int, int], int]
"""Kernel, stride, pads and dilation of a pooling along one axis."""

GEOMETRIES: list[Geometry] = [
    (kernel, stride, (begin, end), dilation)
    for kernel, stride, dilation in itertools.product((1, 2, 3), (1, 2, 3, 4), (1, 2, 3))
    for begin, end in itertools.product(range(kernel), repeat=2)
]


def pools(op: str, include: int, geometries: list[Geometry], size: int | str) -> onnx.ModelProto:
    """All of them on one input, in one model: a session for each would take most of the time."""
    nodes, outputs = [], []
    for place, (kernel, stride, pads, dilation) in enumerate(geometries):
        attributes: dict[str, Any] = {
            "kernel_shape": [kernel],
            "strides": [stride],
            "pads": list(pads),
            "dilations": [dilation],
        }
        if op == "AveragePool":
            attributes["count_include_pad"] = include
        names = [f"y{place}", f"i{place}"] if op == "MaxPool" else [f"y{place}"]
        nodes.append(helper.make_node(op, ["x"], names, ceil_mode=1, **attributes))
        kinds = (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64)
        outputs += [info(name, None, kind) for name, kind in zip(names, kinds, strict=False)]
    return build(nodes, [info("x", [1, 2, size])], outputs)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("op", "include"), [("MaxPool", 0), ("AveragePool", 0), ("AveragePool", 1), ("LpPool", 0)]
)
def test_windows_are_those_specified(op: str, include: int, symbolic: bool) -> None:
    """With every onnxruntime; windows without a tap inside hold anything."""
    compared = 0
    samples = {n: np.random.default_rng(n).standard_normal((1, 2, n)).astype(np.float32) for n in range(1, 8)}
    fitting: dict[tuple[int, ...], list[Geometry]] = defaultdict(list)
    for place, geometry in enumerate(GEOMETRIES[::3]):
        sizes = samples if symbolic else [1 + place % 7]
        fits = tuple(n for n in sizes if specified(samples[n][0, 1], op, *geometry, include)[0])
        fitting[fits].append(geometry)
    fitting.pop((), None)
    for sizes, geometries in fitting.items():
        model = pools(op, include, geometries, "n" if symbolic else sizes[0])
        canonical = canonicalize(load_model(model))
        session = open_session(to_proto(canonical).SerializeToString(), "model", parse_device("cpu"), None)
        shapes = {value.name: value.shape for value in canonical.graph.outputs}
        names = [output.name for output in session.get_outputs()]
        for size in sizes:
            x = samples[size]
            got = dict(zip(names, session.run(None, {"x": x}), strict=True))
            for place, geometry in enumerate(geometries):
                values, places = specified(x[0, 1], op, *geometry, include)
                assert got[f"y{place}"].shape == (1, 2, len(values))
                if not symbolic:
                    assert shapes[f"y{place}"] == [1, 2, len(values)]
                somewhere = np.array([p is not None for p in places])
                y = got[f"y{place}"][0, 1][somewhere]
                np.testing.assert_allclose(y, np.array(values)[somewhere], rtol=1e-5)
                if op == "MaxPool":
                    wanted = [size + p for p in places if p is not None]
                    np.testing.assert_array_equal(got[f"i{place}"][0, 1][somewhere], wanted)
                compared += 1
    assert compared > (300 if symbolic else 40)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_automatic_padding_with_more_stride_than_kernel(auto_pad: str) -> None:
    """SAME has a window for each stride; none that starts behind the input counts."""
    x = np.arange(1.0, 13.0, dtype=np.float32).reshape(1, 2, 6)
    model = pool("MaxPool", "n", kernel_shape=[1], strides=[2], auto_pad=auto_pad)
    y, places = run(to_proto(canonicalize(load_model(model))), {"x": x})
    np.testing.assert_array_equal(y, x[:, :, ::2])
    np.testing.assert_array_equal(places, np.arange(12).reshape(1, 2, 6)[:, :, ::2])


DILATED = {
    "max": (torch.nn.MaxPool1d(2, 4, dilation=3, ceil_mode=True), {}),
    "max-padded": (torch.nn.MaxPool1d(2, 3, 1, dilation=2, ceil_mode=True), {"pads": [1, 1]}),
}


@pytest.mark.parametrize("size", [4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("name", DILATED)
def test_gradient_of_windows_that_are_cut(name: str, size: int) -> None:
    """The last window starts behind the input of some sizes, which runtimes may compute, with any index."""
    layer, extra = DILATED[name]
    window = {"kernel_shape": [2], "strides": [layer.stride], "dilations": [layer.dilation], **extra}
    model = pool("MaxPool", "n", **window)
    del model.graph.output[1:], model.graph.node[0].output[1:]
    step = differentiate(model, of="y", wrt=["x"], cotangent="ct")
    x = torch.randn(1, 2, size, generator=torch.Generator().manual_seed(size), requires_grad=True)
    y = layer(x)
    ct = torch.arange(1.0, 1.0 + y.numel()).reshape(y.shape)
    y.backward(ct)
    value, gradient = run(step, {"x": x.detach().numpy(), "ct": ct.numpy()})
    np.testing.assert_array_equal(value, y.detach().numpy())
    np.testing.assert_array_equal(gradient, x.grad.numpy())


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
