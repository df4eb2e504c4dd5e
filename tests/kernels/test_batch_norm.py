"""Training BatchNormalization, with what follows it, by kernel: beside function bodies and PyTorch in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from kernels.against_body import check, needs_kernels, run
from onnxtrain.recipe import Recipe
from onnxtrain.runtime.kernels import register_kernels
from onnxtrain.training.training_graph import build_training_graphs
from tolerances import NORM_RELATIVE

pytestmark = needs_kernels

SHAPES = (
    [2, 3],
    [5, 1],
    [40, 17],
    [2, 3, 4],
    [3, 16, 8, 8],
    [2, 5, 7, 3],
    [1, 4, 33, 40],
    [2, 3, 2, 5, 3],
    [6, 2, 1, 1],
    # Short planes: several groups of channels on a thread, and more samples than are summed in float.
    [70, 130, 3, 3],
    [3, 600, 2],
    [40, 9, 4, 4],
    [9, 1, 15],
)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_bodies(shape: Sequence[int]) -> None:
    rng = np.random.default_rng(0)
    x, ct, y = 3 + rng.standard_normal((3, *shape))
    scale, bias, mean = rng.standard_normal((3, shape[1]))
    inputs = {"x": x, "scale": scale, "bias": bias, "mean": mean, "var": mean**2}
    for name in ("BatchNormalizationTraining", "BatchNormalizationRelu", "BatchNormalizationRelu6"):
        check(name, inputs, {"epsilon": 1e-5, "momentum": 0.9})
    gradient = {"ct": ct, "x": x, "scale": scale}
    size = float(np.linalg.norm(ct))
    terms = (size, size * (x.size / shape[1]) ** 0.5, size)
    check("BatchNormalizationGradient", gradient, {"epsilon": 1e-5}, terms=terms)
    y -= 3  # half of it positive
    for name, result in (("Relu", y), ("Relu6", 6 * np.clip(y, 0, 1))):
        check(f"BatchNormalization{name}Gradient", gradient | {"y": result}, {"epsilon": 1e-5}, terms=terms)


@pytest.mark.parametrize("name", ["BatchNormalizationRelu", "BatchNormalizationRelu6"])
def test_relu_keeps_what_is_no_number(name: str) -> None:
    x = np.ones((2, 2, 3))
    x[0, 0, 0] = np.nan
    zeros, ones = np.zeros(2), np.ones(2)
    inputs = {"x": x, "scale": ones, "bias": zeros, "mean": zeros, "var": ones}
    check(name, inputs, {"epsilon": 1e-5, "momentum": 0.9})


POOLS = {
    "halves": ((8, 12), (2, 2), (2, 2), (0, 0, 0, 0)),
    "halves of odd sizes": ((9, 7), (2, 2), (2, 2), (0, 0, 0, 0)),
    "thirds, padded": ((8, 7), (3, 3), (3, 3), (1, 1, 1, 1)),
    "rows": ((4, 9), (1, 3), (2, 3), (0, 1, 0, 1)),
    "thirds of one axis": ((11,), (3,), (3,), (1, 1)),
    "halves of three axes": ((4, 7, 8), (2, 2, 2), (2, 2, 2), (0,) * 6),
    "three axes": ((4, 7, 8), (1, 3, 2), (1, 3, 3), (0, 1, 0, 0, 1, 1)),
    "overlapping": ((9, 9), (3, 3), (2, 2), (1, 1, 1, 1)),  # stays a MaxPool
}


def _net(
    size: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]
) -> onnx.ModelProto:
    """Conv, BatchNormalization, MaxPool and Relu, then a depthwise Conv, BatchNormalization, Relu, Conv."""
    text, rank = helper.make_node, len(size)
    nodes = [
        text("Conv", ["x", "w1", "b1"], ["c1"], pads=[1] * 2 * rank),
        text(
            "BatchNormalization", ["c1", "s1", "o1", "m1", "v1"], ["n1", "m1_new", "v1_new"], training_mode=1
        ),
        text("Relu", ["n1"], ["r1"]),
        text("MaxPool", ["r1"], ["p1"], kernel_shape=kernel, strides=strides, pads=pads),
        text("Conv", ["p1", "w2"], ["c2"], pads=[1] * 2 * rank, group=6),
        text(
            "BatchNormalization", ["c2", "s2", "o2", "m2", "v2"], ["n2", "m2_new", "v2_new"], training_mode=1
        ),
        text("Relu", ["n2"], ["r2"]),
        text("Conv", ["r2", "w3"], ["c3"]),
        text("Mul", ["c3", "c3"], ["squares"]),
        text("ReduceMean", ["squares"], ["loss"], keepdims=0),
    ]
    rng = np.random.default_rng(3)
    taps, one = (3,) * rank, (1,) * rank
    shapes = {"w1": (6, 3, *taps), "b1": (6,), "w2": (6, 1, *taps), "w3": (2, 6, *one)}
    shapes |= {f"{name}{i}": (6,) for i in (1, 2) for name in "som"}
    values = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    values |= {"v1": np.abs(values["m1"]), "v2": np.abs(values["m2"]) + 1}
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, *size])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _expected(
    model: onnx.ModelProto, x: np.ndarray, pool: Sequence[Sequence[int]], correction: int
) -> dict[str, np.ndarray]:
    """Loss, gradients and updated statistics by PyTorch in float64; ONNX's variance has no correction, PyTorch's 1."""
    kernel, strides, pads = pool
    rank = len(kernel)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank - 1]
    max_pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[rank - 1]
    values = {
        t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).astype(np.float64))
        for t in model.graph.initializer
    }
    first, second = conv(3, 6, 3, padding=1), conv(6, 6, 3, padding=1, groups=6, bias=False)
    head = conv(6, 2, 1, bias=False)
    norms = [norm(6), norm(6)]
    net = nn.Sequential(
        first, norms[0], nn.ReLU(), max_pool(kernel, strides, pads[:rank]), second, norms[1], nn.ReLU(), head
    ).double()
    parameters = {"w1": first.weight, "b1": first.bias, "w2": second.weight, "w3": head.weight}
    parameters |= {"s1": norms[0].weight, "o1": norms[0].bias, "s2": norms[1].weight, "o2": norms[1].bias}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
    data = torch.from_numpy(x).double()
    loss = (net(data) ** 2).mean()
    loss.backward()
    result = {"loss": loss} | {f"{name}_grad": p.grad for name, p in parameters.items()}
    axes = (0, *range(2, 2 + rank))
    for i, source in ((1, first(data)), (2, second(net[:4](data)))):
        result[f"m{i}_updated"] = 0.9 * values[f"m{i}"] + 0.1 * source.mean(axes)
        result[f"v{i}_updated"] = 0.9 * values[f"v{i}"] + 0.1 * source.var(axes, correction=correction)
    return {name: value.detach().numpy() for name, value in result.items()}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("native", [True, False], ids=["kernels", "bodies"])
@pytest.mark.parametrize("mode", ["as_exported", "training"])
def test_net_against_torch(name: str, native: bool, mode: Literal["as_exported", "training"]) -> None:
    size, *pool = POOLS[name]
    model = _net(size, *pool)
    graphs = build_training_graphs(ir.from_proto(model), "loss", Recipe(batch_norm=mode))
    training = ir.to_proto(graphs.training)
    calls = Counter(node.op_type for node in training.graph.node if node.domain == "onnxtrain")
    overlapping = name == "overlapping"
    depthwise = sum(count for op, count in calls.items() if op.startswith("DepthwiseConvolution"))
    assert calls["Convolution_float"] + depthwise == 3
    fused = calls["BatchNormalizationMaxPoolRelu_float"]
    assert calls["BatchNormalizationMaxPoolReluGradient_float"] == (not overlapping)
    # With overlapping windows, only the forward half can be fused, if nothing else reads its values.
    assert fused + calls["BatchNormalizationTraining_float"] == 1
    assert fused or overlapping
    assert calls["BatchNormalizationRelu_float"] == calls["BatchNormalizationReluGradient_float"] == 1
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if native:
        register_kernels(options)
        del training.functions[:]  # nothing but kernels can compute these
    session = ort.InferenceSession(training.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(4).standard_normal((5, 3, *size)).astype(np.float32)
    feeds = {"x": x} | {
        key: tensor.numpy()
        for group in (graphs.parameters, graphs.statistics)
        for key, tensor in group.items()
    }
    results = session.run(None, feeds)
    computed = dict(zip((value.name for value in session.get_outputs()), results, strict=True))
    names = {entry["output"]: f"{entry['name']}_updated" for entry in graphs.manifest["statistics"]}
    computed = {names.get(key, key): value for key, value in computed.items()}
    reference = _expected(model, x, pool, correction=int(mode == "training"))
    assert set(computed) == set(reference)
    for key, value in reference.items():
        if key == "b1_grad":  # BatchNormalization takes it away
            assert np.abs(computed[key]).max() < 1e-6
            continue
        distance = np.linalg.norm(computed[key] - value) / np.linalg.norm(value)
        # The second BatchNormalization takes most of what the first one's scale and bias do away, so that terms cancel:
        # up to 4.5e-5 with what ONNX Runtime computes on x86-64, 5.4e-5 on aarch64.
        limit = 1e-4 if key in ("s1_grad", "o1_grad") else NORM_RELATIVE[np.dtype(np.float32)]
        assert distance < limit, key


POOLINGS = [
    ((2, 3, 8, 8), (2, 2), (2, 2), (0, 0, 0, 0)),
    ((2, 3, 10, 32), (2, 2), (2, 2), (0, 0, 0, 0)),
    ((1, 5, 16, 16), (2, 2), (2, 2), (0, 0, 0, 0)),
    ((2, 3, 7, 9), (2, 2), (2, 2), (0, 0, 0, 0)),
    ((2, 3, 7, 9), (3, 3), (2, 2), (1, 1, 1, 1)),
    ((2, 3, 6, 5), (3, 2), (1, 2), (0, 1, 2, 0)),
    ((2, 3, 5, 7), (2, 2), (2, 2), (0, 0, 1, 1)),
    ((2, 3, 8, 7), (2, 2), (2, 2), (0, 0, 0, 1)),
    ((2, 3, 7, 32), (2, 2), (2, 2), (0, 0, 1, 0)),
    ((2, 3, 9), (3,), (2,), (1, 1)),
    ((2, 3, 8, 16, 16), (2, 2, 2), (2, 2, 2), (0,) * 6),
    ((2, 3, 5, 6, 8), (2, 2, 2), (2, 2, 2), (0,) * 6),
    ((1, 2, 4, 7, 5), (2, 2, 2), (2, 2, 2), (0,) * 6),
    ((2, 3, 3, 6, 6), (2, 2, 2), (2, 2, 2), (0, 0, 0, 1, 0, 0)),
    ((2, 3, 5, 6, 7), (3, 2, 3), (2, 1, 2), (1, 0, 1, 1, 1, 1)),
    ((0, 3, 6, 6), (2, 2), (2, 2), (0, 0, 0, 0)),
]


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("shape", "kernel", "strides", "pads"), POOLINGS, ids=str)
def test_max_pool(
    shape: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]
) -> None:
    """The very values and indices of ONNX Runtime's own kernel, negative ones and equal ones among them."""
    x = np.random.default_rng(0).integers(-9, 3, shape).astype(np.float32)
    attributes = {"kernel_shape": list(kernel), "strides": list(strides), "pads": list(pads)}
    expected = run("MaxPool", {"x": x}, attributes, native=False)
    for threads in (1, 2):
        found = run("MaxPool", {"x": x}, attributes, native=True, threads=threads)
        for value, reference in zip(found, expected, strict=True):
            np.testing.assert_array_equal(value, reference)


@pytest.mark.parametrize(("shape", "kernel", "strides", "pads"), POOLINGS[:-1], ids=str)
def test_what_is_no_number_is_a_maximum(
    shape: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]
) -> None:
    """NaN wherever a window has one, and the index of the last one of it, as in PyTorch."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    x[rng.random(shape) < 0.2] = np.nan
    x[rng.random(shape) < 0.1] = -np.inf
    attributes = {"kernel_shape": list(kernel), "strides": list(strides), "pads": list(pads)}
    y, places = run("MaxPool", {"x": x}, attributes, native=True)
    rank = len(kernel)
    around = [n for axis in reversed(range(rank)) for n in (pads[axis], pads[rank + axis])]
    filled = torch.nn.functional.pad(torch.from_numpy(x), around, value=-np.inf)
    max_pool = getattr(torch.nn.functional, f"max_pool{rank}d")
    want, indices = max_pool(filled, kernel, strides, return_indices=True)
    np.testing.assert_array_equal(y, want)
    nan = np.isnan(y)
    assert nan.any()
    assert not nan.all()
    planes = np.arange(shape[0] * shape[1]).reshape(*shape[:2], *[1] * rank)
    within = np.unravel_index(indices.numpy(), filled.shape[2:])
    inside = [place - begin for place, begin in zip(within, pads, strict=False)]
    expected = planes * np.prod(shape[2:]) + np.ravel_multi_index(inside, shape[2:])
    np.testing.assert_array_equal(places[nan], expected[nan])


@pytest.mark.parametrize("native", [True, False], ids=["kernel", "body"])
def test_gradient_of_a_channel_that_is_no_number(native: bool) -> None:
    """The bias still sees the cotangents: PyTorch's ReLU passes them on where it has given NaN."""
    rng = np.random.default_rng(0)
    x, ct = (rng.standard_normal((4, 3, 5)).astype(np.float32) for _ in range(2))
    x[1, 1, 2] = np.nan
    scale, bias = rng.standard_normal((2, 3)).astype(np.float32)
    parameter = torch.tensor(bias, requires_grad=True)
    normal = torch.nn.functional.batch_norm(
        torch.from_numpy(x), None, None, torch.from_numpy(scale), parameter, training=True
    )
    y = torch.relu(normal)
    y.backward(torch.from_numpy(ct))
    inputs = {"ct": ct, "x": x, "scale": scale, "y": y.detach().numpy()}
    ct_x, ct_scale, ct_bias = run("BatchNormalizationReluGradient", inputs, {"epsilon": 1e-5}, native=native)
    np.testing.assert_allclose(ct_bias, parameter.grad, rtol=1e-5, atol=1e-6)
    assert np.isfinite(ct_bias).all()
    assert np.isnan(ct_x[:, 1]).all()
    assert np.isnan(ct_scale[1])
