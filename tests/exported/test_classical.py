"""Files as the converters of scikit-learn and TensorFlow write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from models import parse_nodes
from onnxtrain import differentiate
from onnxtrain.api import CheckpointState
from training_run import Run

RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 3)).astype(np.float32)


def floats(name: str, array: np.ndarray) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.asarray(array, np.float32), name)


def classifier() -> onnx.ModelProto:
    """A layer, Softmax, and a ZipMap behind the probabilities, as a list of dictionaries."""
    helper = onnx.helper
    nodes = parse_nodes("""
        scores = MatMul(x, w)  tensor = Softmax <axis = 1> (scores)
        label = ArgMax <axis = 1, keepdims = 0> (tensor)
        probabilities = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1, 7]> (tensor)""")
    entry = helper.make_map_type_proto(
        onnx.TensorProto.INT64, helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
    )
    outputs = [
        helper.make_tensor_value_info("label", onnx.TensorProto.INT64, [None]),
        helper.make_value_info("probabilities", helper.make_sequence_type_proto(entry)),
    ]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, 3])
    graph = helper.make_graph(nodes, "g", [x], outputs, [floats("w", RNG.standard_normal((3, 3)))])
    imports = [helper.make_opsetid("", 15), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def test_a_classifier_that_ends_in_dictionaries_trains_as_in_torch(tmp_path: Path) -> None:
    model = classifier()
    (listed,) = ort.InferenceSession(model.SerializeToString()).run(["probabilities"], {"x": X})
    assert list(listed[0]) == [0, 1, 7]  # the file is one
    run = Run.generate(tmp_path, model, loss="mse", optimizer="sgd", loss_input_names=["probabilities"])
    weight = torch.tensor(run.state.parameters["w"].data.copy(), requires_grad=True)
    target = RNG.random((5, 3)).astype(np.float32)
    loss = torch.nn.functional.mse_loss(torch.softmax(torch.tensor(X) @ weight, 1), torch.tensor(target))
    np.testing.assert_allclose(float(run.module(X, target)), loss.item(), rtol=1e-5)
    (gradient,) = torch.autograd.grad(loss, weight)
    np.testing.assert_allclose(run.state.parameters["w"].grad, gradient, rtol=1e-4, atol=1e-7)
    inference = ort.InferenceSession(tmp_path / "inference_model.onnx")
    label, probabilities = inference.run(["label", "probabilities"], {"x": X, "w": weight.detach().numpy()})
    np.testing.assert_allclose(probabilities, [list(row.values()) for row in listed], rtol=1e-5)
    np.testing.assert_array_equal(label, probabilities.argmax(1))


@pytest.mark.parametrize(("exponent", "trained"), [(2.0, False), (-3.0, False), (2.5, True), ([2.0], True)])
def test_the_two_of_a_square_is_no_parameter(
    exponent: float | list[float], trained: bool, tmp_path: Path
) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 15]>
        net (float[N, 3] x) => (float[N, 3] y) { z = Sub(x, mean)  s = Pow(z, power)  y = Add(s, bias) }"""
    )
    model.graph.initializer.extend(
        [floats("mean", np.zeros(3)), floats("power", np.array(exponent)), floats("bias", np.ones(3))]
    )
    run = Run.generate(tmp_path, model, loss="mse", optimizer="sgd")
    state = CheckpointState.load_checkpoint(run.directory / "checkpoint")
    assert ("power" in {name for name, _ in state.parameters}) == trained
    if not trained:
        losses = [run.step(X, np.zeros_like(X)) for _ in range(3)]
        assert np.isfinite(losses).all()
        named = Run.generate(tmp_path / "named", model, loss="mse", requires_grad=["power"])
        assert named.state.parameters["power"].requires_grad


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_attributes_of_old_ops_become_inputs_of_the_dtype_of_the_others(dtype: type[np.floating]) -> None:
    elements = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = parse_nodes("""
        a = Mul(x, w)  c = Clip <min = -1.0, max = 1.0> (a)
        y = Pad <pads = [0, 1, 0, 1], value = 0.5> (c)""")
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", elements, [5, 3])],
        [onnx.helper.make_tensor_value_info("y", elements, [5, 5])],
        [onnx.numpy_helper.from_array(np.ones(3, dtype), "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 10)], ir_version=5)
    step = differentiate(model, "y", ["w"], cotangent="ct")
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    ct = RNG.integers(-3, 4, (5, 5)).astype(dtype)
    x = X.astype(dtype)
    y, gradient = session.run(None, {"x": x, "ct": ct})
    np.testing.assert_array_equal(y, np.pad(x.clip(-1, 1), ((0, 0), (1, 1)), constant_values=0.5))
    np.testing.assert_allclose(gradient, (ct[:, 1:-1] * x * (abs(x) <= 1)).sum(0), rtol=1e-2)


@pytest.mark.parametrize(("dtype", "lowest"), [(np.float32, np.finfo(np.float32).min), (np.float16, -np.inf)])
def test_a_mask_of_attention_is_not_trained(dtype: type[np.floating], lowest: float, tmp_path: Path) -> None:
    elements = "float" if dtype is np.float32 else "float16"
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 15]>
        net ({elements}[N, 3] x) => ({elements}[N, 3] y) {{ a = Mul(x, w)  b = Add(a, mask)  y = Softmax(b) }}"""
    )
    values = {"w": np.ones(3), "mask": np.array([0, lowest, 0])}
    for name, array in values.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(dtype), name))
    run = Run.generate(tmp_path, model, loss="mse", optimizer="sgd")
    assert [name for name, _ in run.state.parameters] == ["w"]


@pytest.mark.parametrize(("producer", "trained"), [("tf2onnx", {"w", "dense/ReadVariableOp:0"}), ("", None)])
def test_numbers_of_formulas_are_not_trained(producer: str, trained: set[str] | None, tmp_path: Path) -> None:
    """The 0 that states start from is the 0 that ids of words are compared with: it must stay one."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 15]>
        net (float[N, 3] x, int64[N] ids) => (float[N, 3] y) {
            id = Cast<to = 1>(ids)
            below = Less(id, zero)
            wrapped = Add(ids, three)
            index = Where(below, wrapped, ids)
            row = Gather(w, index)
            state = Add(row, zero)
            scaled = Mul(state, "dense/ReadVariableOp:0")
            y = Mul(scaled, x)
        }"""
    )
    three = onnx.numpy_helper.from_array(np.array(3, np.int64), "three")
    values = {
        "zero": np.array(0.0),
        "w": RNG.standard_normal((3, 3)),
        "dense/ReadVariableOp:0": np.array(1.5),
    }
    model.graph.initializer.extend([three, *(floats(name, array) for name, array in values.items())])
    model.producer_name = producer
    run = Run.generate(tmp_path, model, loss="mse", optimizer="sgd")
    assert {name for name, _ in run.state.parameters} == (trained or set(values))
    if trained:
        losses = [run.step(X, np.array([0, 1, 2, -1, -3]), np.ones_like(X)) for _ in range(3)]
        assert losses[-1] < losses[0]


@pytest.mark.parametrize(("mode", "twin"), [("linear", "bilinear"), ("nearest", "nearest-exact")])
def test_a_scale_that_is_rounded_gives_the_sizes_that_the_runtime_computes(
    mode: str, twin: str, tmp_path: Path
) -> None:
    """10 times float32 0.7 is 6.99999988 in float64 and 7 in float32."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 13]>
        net (float[N, 10, 10, 2] x) => (float[N, A, B] y)
            <float[4] scales = {{1.0, 1.0, 0.7, 0.9}}, int64[3] shape = {{-1, 14, 9}}>
        {{
            last = Mul(x, w)
            scaled = Transpose<perm = [0, 3, 1, 2]>(last)
            small = Resize<mode = "{mode}", nearest_mode = "round_prefer_ceil">(scaled, , scales)
            moved = Transpose<perm = [0, 2, 3, 1]>(small)
            back = Transpose<perm = [0, 3, 1, 2]>(moved)
            y = Reshape(back, shape)
        }}"""
    )
    model.graph.initializer.append(floats("w", RNG.standard_normal((10, 10, 2))))
    run = Run.generate(tmp_path, model, loss="mse", optimizer="sgd")
    assert {name for name, _ in run.state.parameters} == {"w"}
    x = RNG.standard_normal((3, 10, 10, 2)).astype(np.float32)
    weight = torch.tensor(run.state.parameters["w"].data.copy(), requires_grad=True)
    scaled = (torch.tensor(x) * weight).permute(0, 3, 1, 2)
    small = torch.nn.functional.interpolate(scaled, size=(7, 9), mode=twin)
    loss = torch.nn.functional.mse_loss(small.reshape(3, 14, 9), torch.ones(3, 14, 9))
    np.testing.assert_allclose(float(run.module(x, np.ones((3, 14, 9), np.float32))), loss.item(), rtol=1e-5)
    (gradient,) = torch.autograd.grad(loss, weight)
    np.testing.assert_allclose(run.state.parameters["w"].grad, gradient, rtol=1e-4, atol=1e-6)
