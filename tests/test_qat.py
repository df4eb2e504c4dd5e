"""Quantization-aware training of a digits classifier in int8, beside the fake quantization of PyTorch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from sklearn.datasets import load_digits
from torch import nn

from onnxtrain import Trainer, qat
from onnxtrain.api import CheckpointState, Module
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import GraphBuildError
from onnxtrain.lora import LoraConfig, adapter_model, merge, save_adapter

pytestmark = pytest.mark.torch

PIXELS, CLASSES = load_digits(return_X_y=True)
IMAGES = (PIXELS / 16).astype(np.float32).reshape(-1, 1, 8, 8)
TURNED = np.rot90(IMAGES, axes=(2, 3)).copy()
TRAIN, TEST = slice(None, 1437), slice(1437, None)


class Calibration(CalibrationDataReader):
    def __init__(self) -> None:
        self.batches: Iterator[dict[str, np.ndarray]] = iter([{"x": IMAGES[k : k + 1]} for k in range(50)])

    def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
        return next(self.batches, None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The classifier in int8: by form, and with a scale per channel."""
    directory = tmp_path_factory.mktemp("qat")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    x, y = torch.from_numpy(IMAGES[TRAIN]), torch.from_numpy(CLASSES[TRAIN])
    for start in range(0, 1437 * 3, 64):
        batch = torch.arange(start, start + 64) % 1437
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
    logging.disable(logging.WARNING)  # The quantizer advises to prepare the model.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(
            net.eval(),
            (x[:2],),
            directory / "float.onnx",
            dynamo=True,
            verbose=False,
            input_names=["x"],
            output_names=["y"],
            dynamic_shapes=({0: "batch"},),
        )
        paths = {}
        for form in (QuantFormat.QDQ, QuantFormat.QOperator):
            for per_channel in (False, True):
                name = f"{form.name}-{'channel' if per_channel else 'tensor'}"
                paths[name] = directory / f"{name}.onnx"
                quantize_static(
                    directory / "float.onnx",
                    paths[name],
                    Calibration(),
                    quant_format=form,
                    per_channel=per_channel,
                    weight_type=QuantType.QInt8,
                )
    logging.disable(logging.NOTSET)
    return paths


STEP = 0.0874
"""Scale of the scores in all four files, rounded up."""
NAMES = ["QDQ-tensor", "QDQ-channel", "QOperator-tensor", "QOperator-channel"]


def compute(model: onnx.ModelProto | Path, x: np.ndarray) -> np.ndarray:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source).run(None, {"x": x})[0]


def accuracy(scores: np.ndarray) -> float:
    return float((scores.argmax(1) == CLASSES[TEST]).mean())


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}


def ops(model: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("name", NAMES)
def test_masters_stand_for_the_integers(files: dict[str, Path], name: str) -> None:
    model = qat.prepare(files[name])
    held, before = arrays(model), arrays(onnx.load(files[name]))
    trainable = {"0.weight", "4.weight", "0.bias", "4.bias"}
    assert {
        key for key in held if held[key].dtype == np.float32 and held[key].ndim and "scale" not in key
    } == trainable
    scale = before["0.weight_scale"].reshape(-1, 1, 1, 1)
    assert np.allclose(held["0.weight"], before["0.weight_quantized"] * scale, rtol=1e-6)
    assert np.array_equal(compute(model, IMAGES[TEST]), compute(files[name], IMAGES[TEST]))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_was_not_trained_converts_to_what_it_was(files: dict[str, Path], name: str) -> None:
    original = onnx.load(files[name])
    converted = qat.convert(qat.prepare(original))
    assert ops(converted) == ops(original)
    before, after = arrays(original), arrays(converted)
    assert np.array_equal(after["0.weight_quantized"], before["0.weight_quantized"])
    assert np.array_equal(after["4.weight_quantized"], before["4.weight_quantized"])
    for layer in (0, 4):
        # Half a step of a bias may be rounded either way.
        assert np.abs(after[f"{layer}.bias_quantized"] - before[f"{layer}.bias_quantized"]).max() <= 1
    assert (
        np.abs(compute(converted, IMAGES[TEST]) - compute(original, IMAGES[TEST])).max()
        <= 1.01 * before["y_scale"]
    )


@pytest.mark.parametrize("train_scales", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_turned_digits_are_learned_and_the_integers_compute_the_same(
    files: dict[str, Path], name: str, train_scales: bool, tmp_path: Path
) -> None:
    """Rotated by 90 degrees, the digits are another domain, for which the classifier is adapted."""
    before = accuracy(compute(files[name], TURNED[TEST]))
    model = qat.prepare(files[name], train_scales=train_scales)
    trainer = Trainer(model, "cross_entropy", learning_rate=1e-2, straight_through=True)
    names = {parameter for parameter, _ in trainer.parameters}
    assert {"0.weight", "4.weight", "0.bias", "4.bias"} == {n for n in names if "scale" not in n}
    before_training = {name: np.array(parameter.data) for name, parameter in trainer.parameters}
    assert any(parameter.endswith("log_of_scale") for parameter in names) == train_scales
    trainer.fit(TURNED[TRAIN], CLASSES[TRAIN], epochs=4, batch_size=64, verbose=False)
    trained = trainer.predict(TURNED[TEST])
    assert all((parameter.data != before_training[name]).any() for name, parameter in trainer.parameters)
    assert accuracy(trained) > 0.8 > 0.3 > before
    trainer.export(tmp_path / "trained.onnx")
    converted = qat.convert(tmp_path / "trained.onnx")
    onnx.checker.check_model(converted)
    assert ops(converted) == ops(onnx.load(files[name]))
    after = arrays(converted)
    assert {"0.weight_quantized", "4.weight_quantized"} <= set(after)
    assert all(after[f"{n}.weight_quantized"].dtype == np.int8 for n in (0, 4))
    assert all(after[f"{n}.bias_quantized"].dtype == np.int32 for n in (0, 4))
    assert not any(array.dtype == np.float32 and array.size > 16 for array in after.values())
    # Computed in integers: sums that lie between two steps may be rounded the other way.
    step = (
        after["y_scale"]
        if "y_scale" in after
        else next(a for n, a in after.items() if n.startswith("y_scale"))
    )
    integers = compute(converted, TURNED[TEST])
    within = np.abs(integers - trained) <= 1.01 * step
    assert within.mean() >= 0.999
    assert (integers.argmax(1) == trained.argmax(1)).mean() >= 0.99
    assert accuracy(integers) == pytest.approx(accuracy(trained), abs=0.01)
    assert all((array > 0).all() for key, array in after.items() if "scale" in key)


@pytest.mark.parametrize("name", NAMES)
def test_turned_digits_are_learned_by_adapters(files: dict[str, Path], name: str, tmp_path: Path) -> None:
    """The adapter of the last layer alone, which the file without it does not change."""
    config = LoraConfig(r=8)
    deployed = adapter_model(files[name], config)
    assert np.array_equal(compute(deployed, IMAGES), compute(files[name], IMAGES))
    directory = tmp_path / "run"
    trainer = Trainer(
        files[name],
        "cross_entropy",
        learning_rate=1e-2,
        straight_through=True,
        lora=config,
        directory=directory,
    )
    assert {parameter for parameter, _ in trainer.parameters} == {"4.lora_A.weight", "4.lora_B.weight"}
    before = accuracy(trainer.predict(TURNED[TEST]))
    trainer.fit(TURNED[TRAIN], CLASSES[TRAIN], epochs=6, batch_size=64, verbose=False)
    trained = trainer.predict(TURNED[TEST])
    assert accuracy(trained) > 0.75 > 0.3 > before
    save_adapter(directory / "checkpoint", tmp_path / "mine.onnx_adapter")
    adapter, options = ort.LoraAdapter(), ort.RunOptions()
    adapter.Load(str(tmp_path / "mine.onnx_adapter"))
    options.add_active_adapter(adapter)
    session = ort.InferenceSession(deployed.SerializeToString())
    assert np.abs(session.run(None, {"x": TURNED[TEST]}, options)[0] - trained).max() <= 1.01 * STEP
    merged = merge(files[name], tmp_path / "mine.onnx_adapter", requantize=True)
    assert ops(merged) == ops(onnx.load(files[name]))
    integers = compute(merged, TURNED[TEST])
    assert accuracy(integers) == pytest.approx(accuracy(trained), abs=0.04)
    # As written, op by op, and as ONNX Runtime makes it of integers.
    written = ort.SessionOptions()
    written.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = ort.InferenceSession(merged.SerializeToString(), written).run(None, {"x": TURNED[TEST]})[0]
    assert np.abs(integers - plain).max() <= 1.01 * STEP


SMALL = """<ir_version: 10, opset_import: ["": 21]> g (float[n, 3] x) => (float[n, 2] y)
    <int8[3, 2] w_quantized = {1, -2, 3, 127, -128, 6}, float s = {0.5}, int8 z = {0}>
    { d = DequantizeLinear(w_quantized, s, z)  y = MatMul(x, d) }"""


@pytest.mark.parametrize("train_scales", [False, True])
def test_gradients_are_those_of_pytorchs_fake_quantization(train_scales: bool, tmp_path: Path) -> None:
    model = qat.prepare(onnx.parser.parse_model(SMALL), train_scales=train_scales)
    # One master is moved out of the range of int8, where its gradient is zero.
    master = next(i for i in model.graph.initializer if i.name == "w")
    moved = numpy_helper.to_array(master).copy()
    moved[1, 1], moved[0, 0] = 80.0, 0.61
    master.CopyFrom(numpy_helper.from_array(moved, "w"))
    generate_artifacts(model, loss="mse", straight_through=True, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    target = np.zeros((4, 2), np.float32)
    loss = module(x, target)

    w = torch.tensor(moved, requires_grad=True)
    scale = torch.tensor([0.5], requires_grad=True)
    zero = torch.zeros(1, requires_grad=True)
    rounded = torch._fake_quantize_learnable_per_tensor_affine(w, scale, zero, -128, 127, 1.0)
    expected = nn.functional.mse_loss(torch.from_numpy(x) @ rounded, torch.from_numpy(target))
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    assert np.allclose(state.parameters["w"].grad, w.grad.numpy(), rtol=1e-5, atol=1e-6)
    assert state.parameters["w"].grad[1, 1] == 0
    if train_scales:
        # d/d log s = s d/ds.
        logarithm = state.parameters["s.log_of_scale"]
        assert logarithm.data == pytest.approx(np.log(0.5))
        assert logarithm.grad == pytest.approx(0.5 * scale.grad.item(), rel=1e-5)


@pytest.mark.parametrize("per_channel", [False, True])
def test_biases_of_integer_products_are_those_of_pytorchs_fake_quantization(
    per_channel: bool, tmp_path: Path
) -> None:
    """QGemm with alpha: values, gradients of weight and bias, and the integers that come back."""
    rng = np.random.default_rng(0)
    scales = np.array([0.02, 0.03], np.float32) if per_channel else np.float32(0.02)
    codes = {
        "fc_weight_quantized": rng.integers(-100, 100, (3, 2)).astype(np.int8),
        "fc_bias_quantized": np.array([700, -90], np.int32),
    }
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g (float[n, 3] x) => (float[n, 2] y)
        <float s = {0.05}, int8 z = {0}, float y_scale = {0.01}> {
            q = QuantizeLinear(x, s, z)
            p = com.microsoft.QGemm<alpha = 0.5>(q, s, z, fc_weight_quantized, w, wz, fc_bias_quantized, y_scale, z)
            y = DequantizeLinear(p, y_scale, z) }"""
    )
    for name, array in {**codes, "w": scales, "wz": np.zeros_like(scales, np.int8)}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    prepared = qat.prepare(model)
    x = rng.normal(size=(6, 3)).astype(np.float32)
    assert np.array_equal(compute(prepared, x), compute(model, x))
    back = arrays(qat.convert(prepared))
    assert all(np.array_equal(back[name], array) for name, array in codes.items())
    assert ops(qat.convert(prepared)) == ops(model)

    # Masters between the integers, as training leaves them.
    masters = {"fc_weight": 0.004, "fc_bias": 0.0003}
    for initializer in prepared.graph.initializer:
        if initializer.name in masters:
            moved = numpy_helper.to_array(initializer) + np.float32(masters[initializer.name])
            masters[initializer.name] = moved
            initializer.CopyFrom(numpy_helper.from_array(moved, initializer.name))
    generate_artifacts(prepared, loss="mse", straight_through=True, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert {name for name, _ in state.parameters} == set(masters)
    target = np.zeros((6, 2), np.float32)
    loss = Module(tmp_path / "training_model.onnx", state)(x, target)

    def rounded(value: torch.Tensor, step: torch.Tensor | float) -> torch.Tensor:
        return value + (torch.round(value / step) * step - value).detach()

    w, b = (torch.tensor(masters[name], requires_grad=True) for name in ("fc_weight", "fc_bias"))
    step = torch.tensor(scales)
    sums = 0.5 * rounded(torch.tensor(x), 0.05) @ rounded(w, step) + rounded(b, 0.5 * 0.05 * step)
    scores = torch.fake_quantize_per_tensor_affine(sums, 0.01, 0, -128, 127)
    expected = nn.functional.mse_loss(scores, torch.from_numpy(target))
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    for name, master in (("fc_weight", w), ("fc_bias", b)):
        assert np.abs(master.grad.numpy()).min() > 0
        assert np.allclose(state.parameters[name].grad, master.grad.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("axis", [0, 1])
def test_unsigned_weights_with_zero_points_per_channel(axis: int) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (4, 3)).astype(np.uint8)
    size = codes.shape[axis]
    scale, zero = rng.uniform(0.1, 0.3, size).astype(np.float32), rng.integers(0, 256, size).astype(np.uint8)
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 3] y) {{
            d = DequantizeLinear<axis={axis}>(w_quantized, s, z)  y = MatMul(x, d) }}"""
    )
    for name, array in {"w_quantized": codes, "s": scale, "z": zero}.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    x = np.eye(4, dtype=np.float32)
    prepared = qat.prepare(model)
    assert np.array_equal(compute(prepared, x), compute(model, x))
    assert np.array_equal(arrays(qat.convert(prepared))["w_quantized"], codes)


def test_a_weight_that_two_layers_read_has_one_master() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n, 2] x) => (float[n, 2] y)
        <int8[2, 2] w_quantized = {1, 2, 3, 4}, float s = {0.5}>
        { a = DequantizeLinear(w_quantized, s)  h = MatMul(x, a)
          b = DequantizeLinear(w_quantized, s)  y = MatMul(h, b) }"""
    )
    prepared = qat.prepare(model)
    assert [name for name in arrays(prepared) if name.startswith("w")] == ["w"]
    assert ops(prepared).count("QuantizeLinear") == 1


def test_models_without_integers_or_masters_are_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n, 2] x) => (float[n, 2] y)
        <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }"""
    )
    with pytest.raises(GraphBuildError, match="quantize it first"):
        qat.prepare(model)
    with pytest.raises(GraphBuildError, match="no QuantizeLinear of a float weight"):
        qat.convert(model)
