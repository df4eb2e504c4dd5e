"""Files that onnxruntime has laid out in blocks of channels are the models that they were made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from onnxtrain.errors import ModelError
from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import normal, run
from training_run import Run

CHANNELS = """(float[n, 3, 9, 10] x) => (float[n, 4] y) <float eps = {1e-3}> {
    a1 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w1, b1)
    a = Sigmoid(a1)
    b1_ = Conv<kernel_shape = [1, 1]>(a, w2)
    b = Relu(b1_)
    c1 = Conv<kernel_shape = [3, 3], group = 20, pads = [1, 1, 1, 1]>(b, w3, b3)
    c2 = Add(c1, b)
    c = Relu(c2)
    d = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(c)
    e = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(c)
    f = Add(d, e)
    g1 = Conv<kernel_shape = [2, 3], strides = [2, 1], dilations = [1, 2]>(f, w4, b4)
    g = LeakyRelu<alpha = 0.2>(g1)
    h = GlobalAveragePool(g)
    i = Flatten(h)
    y = Gemm<transB = 1>(i, w5)
}"""
"""10, 20, 20 and 33 channels: the last block of each is not full, and the sigmoid of what fills it is not zero."""

GROUPS = """(float[2, 32, 6, 6] x) => (float[2, 32, 3, 3] y, float[2, 64, 6, 6] z) {
    a = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1], group = 2>(x, w1)
    b = BatchNormalization(a, scale, bias, mean, var)
    c = Conv<kernel_shape = [1, 1]>(b, w2)
    d = Relu(c)
    z = Concat<axis = 1>(b, d)
    y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(d)
}"""

LAST = """(float[2, 6, 5, 16] x) => (float[2, 12, 10, 16] y) <float[4] scales = {1., 1., 2., 2.}> {
    first = Transpose<perm = [0, 3, 1, 2]>(x)
    a = Conv<kernel_shape = [1, 1]>(first, w1)
    b = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">(a, , scales)
    c = Conv<kernel_shape = [1, 1]>(b, w2)
    y = Transpose<perm = [0, 2, 3, 1]>(c)
}"""

WEIGHTS = {
    "CHANNELS": {
        "w1": (10, 3, 3, 3),
        "b1": (10,),
        "w2": (20, 10, 1, 1),
        "w3": (20, 1, 3, 3),
        "b3": (20,),
        "w4": (33, 20, 2, 3),
        "b4": (33,),
        "w5": (4, 33),
    },
    "GROUPS": {
        "w1": (32, 16, 3, 3),
        "w2": (32, 32, 1, 1),
        **dict.fromkeys(("scale", "bias", "mean", "var"), (32,)),
    },
    "LAST": {"w1": (24, 16, 1, 1), "w2": (16, 24, 1, 1)},
}
MODELS = {"CHANNELS": CHANNELS, "GROUPS": GROUPS, "LAST": LAST}


def model_of(name: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> net {MODELS[name]}')
    for seed, (weight, shape) in enumerate(WEIGHTS[name].items()):
        array = 0.3 * normal(*shape, seed=seed)
        if weight == "var":
            array = np.abs(array) + 1
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, weight))
    return model


def laid_out(model: onnx.ModelProto, folder: Path) -> Path:
    """Returns what onnxruntime's optimizer makes of a model on this machine."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(folder / "laid_out.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return folder / "laid_out.onnx"


def inputs_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    shape = [size.dim_value or 2 for size in model.graph.input[0].type.tensor_type.shape.dim]
    return {"x": normal(*shape, seed=7)}


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_the_model_did(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    path = laid_out(model, tmp_path)
    restored = to_proto(canonicalize(load_model(path)))
    assert not [node for node in restored.graph.node if node.domain == "com.microsoft.nchwc"]
    onnx.checker.check_model(restored)
    for got, want in zip(run(restored, inputs_of(model)), run(model, inputs_of(model)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["CHANNELS", "LAST"])
def test_it_trains_as_the_model_does(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    x = inputs_of(model)["x"]
    target = normal(*run(model, {"x": x})[0].shape, seed=8)
    losses = []
    for folder, source in (("model", model), ("file", laid_out(model, tmp_path))):
        (tmp_path / folder).mkdir()
        trained = Run.generate(tmp_path / folder, source, loss="mse", optimizer="sgd")
        trained.optimizer.set_learning_rate(1e-3)
        losses.append([trained.step(x, target) for _ in range(4)])
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_weights_have_their_own_layout_again(tmp_path: Path) -> None:
    model = model_of("CHANNELS")
    restored = canonicalize(load_model(laid_out(model, tmp_path)))
    before = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    weights = [node.inputs[1] for node in restored.graph if node.op_type in ("Conv", "FusedConv")]
    assert len(weights) == 4
    for name, value in zip(("w1", "w2", "w3", "w4"), weights, strict=True):
        np.testing.assert_array_equal(value.const_value.numpy(), before[name])


def test_blocks_of_another_machine_are_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft.nchwc": 1]>
        g (float[1, 3, 4, 4] x) => (float[1, 2, 4, 4] y) {
            a = com.microsoft.nchwc.Conv<kernel_shape = [1, 1]>(x, w)
            y = com.microsoft.nchwc.ReorderOutput<channels = 2>(a)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(2, 3, 1, 1), "w"))
    with pytest.raises(ModelError, match=r"with 2 channels.*optimized this file for another CPU"):
        canonicalize(load_model(model))


def test_weights_that_are_not_in_the_file_are_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft.nchwc": 1]>
        g (float[1, 16, 4, 4] x, float[16, 16, 1, 1] w) => (float[1, 16, 4, 4] y) {
            y = com.microsoft.nchwc.Conv<kernel_shape = [1, 1]>(x, w)
        }"""
    )
    with pytest.raises(ModelError, match="its weight is not stored in the model"):
        canonicalize(load_model(model))
