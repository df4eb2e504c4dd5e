"""A Clip between 0 and 6 behind training BatchNormalization is PyTorch's ReLU6, and one op with it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper

from onnxtrain.recipe import Recipe
from onnxtrain.runtime.kernels import kernel_library, register_kernels
from onnxtrain.training.training_graph import build_training_graphs
from tolerances import NORM_RELATIVE, norm_relative_error

NET = """<ir_version: 10, opset_import: ["": 21]>
net (float[batch, 3, 4, 5] x) => (float loss)
<float[3] scale, float[3] bias, float[3] mean, float[3] var, float low, float high, float[2, 3, 1, 1] w> {
  n, new_mean, new_var = BatchNormalization<training_mode = 1>(x, scale, bias, mean, var)
  r = Clip(n, low, high)
  c = Conv(r, w)
  squares = Mul(c, c)
  loss = ReduceMean<keepdims = 0>(squares)
}"""
PARAMETERS = ["scale", "bias", "w"]


def build(high: float = 6.0) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    values = {
        "scale": np.array([4, 3, 1]),
        "bias": np.array([3, 0, 6]),  # channels 1 and 2 lie on the bounds where x is constant
        "mean": np.zeros(3),
        "var": np.ones(3),
        "low": np.array(0),
        "high": np.array(high),
        "w": rng.standard_normal((2, 3, 1, 1)),
    }
    model = onnx.parser.parse_model(NET)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in values.items()
    )
    return model


def samples(constant: bool) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((6, 3, 4, 5)).astype(np.float32)
    if constant:
        x[:, 1:] = 0.5
    return x


@pytest.mark.parametrize("constant", [False, True], ids=["in between", "on the bounds"])
@pytest.mark.parametrize("native", [False, True], ids=["bodies", "kernels"])
def test_gradients_are_those_of_torch(native: bool, constant: bool) -> None:
    if native and kernel_library() is None:
        pytest.skip("no native kernels are installed")
    model = build()
    graphs = build_training_graphs(
        ir.from_proto(model), "loss", Recipe(requires_grad=PARAMETERS), input_gradients=["x"]
    )
    training = ir.to_proto(graphs.training)
    calls = Counter(node.op_type for node in training.graph.node)
    assert calls["BatchNormalizationRelu6_float"] == calls["BatchNormalizationRelu6Gradient_float"] == 1
    assert calls["Clip"] == 0
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if native:
        register_kernels(options)
        del training.functions[:]  # nothing but kernels can compute these
    session = ort.InferenceSession(training.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = samples(constant)
    held = {name: t.numpy() for g in (graphs.parameters, graphs.statistics) for name, t in g.items()}
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"x": x} | held), strict=True))

    values = {
        t.name: torch.from_numpy(numpy_helper.to_array(t).copy()).double() for t in model.graph.initializer
    }
    leaves = {name: values[name].requires_grad_() for name in PARAMETERS}
    data = torch.from_numpy(x).double().requires_grad_()
    normalized = torch.nn.functional.batch_norm(
        data, None, None, leaves["scale"], leaves["bias"], training=True
    )
    result = torch.nn.functional.conv2d(torch.nn.functional.relu6(normalized), leaves["w"])
    loss = (result**2).mean()
    loss.backward()
    assert norm_relative_error(found["loss"], loss.item()) < NORM_RELATIVE[np.dtype(np.float32)]
    for name, leaf in (*leaves.items(), ("x", data)):
        assert (
            norm_relative_error(found[f"{name}_grad"], leaf.grad.numpy())
            < NORM_RELATIVE[np.dtype(np.float32)]
        ), name


def test_other_bounds_stay_a_clip() -> None:
    graphs = build_training_graphs(ir.from_proto(build(high=5.0)), "loss", Recipe(requires_grad=PARAMETERS))
    calls = Counter(node.op_type for node in graphs.training.graph)
    assert calls["Clip"] == 1
    assert calls["BatchNormalizationTraining_float"] == 1
