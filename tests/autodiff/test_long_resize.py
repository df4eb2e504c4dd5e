"""The gradient of Resize along long axes, which is scattered instead of multiplied by a matrix."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.nn import functional

from onnxtrain import differentiate
from onnxtrain.autodiff.rules import resize

MODES = {
    "nearest": ("nearest", "asymmetric", None),
    "linear": ("linear", "half_pixel", False),
    "linear, corners aligned": ("linear", "align_corners", True),
    "cubic": ("cubic", "half_pixel", False),
    "cubic, corners aligned": ("cubic", "align_corners", True),
}


def trained(mode: str, shape: list[int | str], sizes: list[int]) -> onnx.ModelProto:
    kind, where, _ = MODES[mode]
    info, float32 = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    attributes = {"nearest_mode": "floor"} if kind == "nearest" else {"cubic_coeff_a": -0.75}
    nodes = [
        onnx.helper.make_node(
            "Resize",
            ["x", "", "", "sizes"],
            ["y"],
            mode=kind,
            coordinate_transformation_mode=where,
            axes=list(range(len(shape) - len(sizes), len(shape))),
            **attributes,
        ),
        onnx.helper.make_node("Mul", ["y", "v"], ["z"]),
        onnx.helper.make_node("ReduceSum", ["z"], ["loss"], keepdims=0),
    ]
    constant = onnx.numpy_helper.from_array(np.array(sizes, np.int64), "sizes")
    inputs = [info("x", float32, shape), info("v", float32, [*shape[: len(shape) - len(sizes)], *sizes])]
    graph = onnx.helper.make_graph(nodes, "g", inputs, [info("loss", float32, [])], [constant])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    return differentiate(model, of="loss", wrt=["x"])


def expected(mode: str, x: np.ndarray, v: np.ndarray, sizes: list[int]) -> np.ndarray:
    kind, _, corners = MODES[mode]
    name = {1: kind, 2: {"linear": "bilinear", "cubic": "bicubic"}.get(kind, kind), 3: "trilinear"}[
        len(sizes)
    ]
    tensor = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    (
        functional.interpolate(tensor, sizes, mode=name, align_corners=corners) * torch.tensor(v)
    ).sum().backward()
    assert tensor.grad is not None
    return tensor.grad.numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 12, 31])
@pytest.mark.parametrize("mode", MODES)
def test_gradient_matches_torch(mode: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At small sizes, so that the neighbors of all positions meet the ends."""
    monkeypatch.setattr(resize, "_LARGEST_MATRIX", -1)
    shape, sizes = [2, 3, 7, 5], [size, 9]
    draw = np.random.default_rng(0)
    x, v = (draw.standard_normal(dims).astype(np.float32) for dims in (shape, [2, 3, *sizes]))
    session = onnxruntime.InferenceSession(trained(mode, list(shape), sizes).SerializeToString())
    (gradient,) = session.run(["x_grad"], {"x": x, "v": v})
    np.testing.assert_allclose(gradient, expected(mode, x, v, sizes), rtol=1e-4, atol=1e-4)


def test_one_long_axis_before_two_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resize, "_LARGEST_MATRIX", 100)
    shape, sizes = [2, 3, 9, 2, 3], [18, 4, 6]
    draw = np.random.default_rng(0)
    x, v = (draw.standard_normal(dims).astype(np.float32) for dims in (shape, [2, 3, *sizes]))
    session = onnxruntime.InferenceSession(trained("linear", list(shape), sizes).SerializeToString())
    (gradient,) = session.run(["x_grad"], {"x": x, "v": v})
    np.testing.assert_allclose(gradient, expected("linear", x, v, sizes), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("size_in", "size_out"), [(3000, 6000), (6000, 3001), (5000, 5003)])
@pytest.mark.parametrize("mode", ["linear", "linear, corners aligned"])
def test_no_value_is_as_large_as_the_matrix(mode: str, size_in: int, size_out: int, symbolic: bool) -> None:
    model = trained(mode, [1, 2, "n" if symbolic else size_in], [size_out])
    computed = [name for node in model.graph.node for name in node.output if name]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in computed)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    draw = np.random.default_rng(0)
    x, v = (draw.standard_normal((1, 2, size)).astype(np.float32) for size in (size_in, size_out))
    values = dict(zip(computed, session.run(None, {"x": x, "v": v}), strict=True))
    np.testing.assert_allclose(values["x_grad"], expected(mode, x, v, [size_out]), rtol=1e-3, atol=2e-3)
    assert max(np.size(value) for value in values.values()) <= 5 * max(size_in, size_out)
