"""Running statistics of `batch_norm="training"`: PyTorch's, step by step, from files and from the trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional

import models
from onnxtrain import Trainer
from onnxtrain._words import speaking
from onnxtrain.api import CheckpointState, Module
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.cli._shell_words import ShellWords
from onnxtrain.errors import DivergenceError

MOMENTUM = float(np.float32(0.8))


def values_of(model: onnx.ModelProto) -> dict[str, torch.Tensor]:
    """The initializers, in float64."""
    arrays = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    return {name: torch.tensor(array) for name, array in arrays.items()}


def torch_statistics(
    model: onnx.ModelProto, batches: list[np.ndarray], applications: int
) -> list[np.ndarray]:
    """Running mean and variance of `models.conv_bn` after these batches, by torch's batch_norm in float64."""
    v = values_of(model)
    for batch in batches:
        y = functional.conv2d(torch.tensor(batch.astype(np.float64)), v["conv.weight"], padding=1)
        for _ in range(applications):
            y = functional.batch_norm(
                y, v["bn.mean"], v["bn.var"], v["bn.scale"], v["bn.bias"], True, 1 - MOMENTUM, 1e-5
            )
    return [v["bn.mean"].numpy(), v["bn.var"].numpy()]


@pytest.mark.parametrize("applications", [1, 2])
@pytest.mark.parametrize("exported_in_training", [False, True])
def test_artifacts_update_as_torch(tmp_path: Path, applications: int, exported_in_training: bool) -> None:
    """Batches of different sizes, small enough that n / (n - 1) is far from one; a layer that is applied twice."""
    model = models.conv_bn(training=exported_in_training, applications=applications)
    generate_artifacts(
        model, loss="cross_entropy", optimizer="sgd", artifact_directory=tmp_path, batch_norm="training"
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    rng = np.random.default_rng(1)
    batches = [rng.normal(0, 2, (size, 2, 6, 6)).astype(np.float32) for size in (1, 3, 2, 1)]
    for batch in batches:
        module(batch, np.zeros(len(batch), np.int64))
    expected = torch_statistics(model, batches, applications)
    for name, value in zip(("bn.mean", "bn.var"), expected, strict=True):
        np.testing.assert_allclose(state.statistics[name].data, value, rtol=2e-6, atol=2e-6, err_msg=name)
    module.eval()
    x = batches[1]
    y = functional.conv2d(torch.tensor(x.astype(np.float64)), values_of(model)["conv.weight"], padding=1)
    for _ in range(applications):
        statistics = [torch.tensor(value) for value in expected]
        y = functional.batch_norm(
            y, *statistics, values_of(model)["bn.scale"], values_of(model)["bn.bias"], False, 0.0, 1e-5
        )
    v = values_of(model)
    logits = y.relu().mean((2, 3)) @ v["fc.weight"] + v["fc.bias"]
    loss = functional.cross_entropy(logits, torch.zeros(3, dtype=torch.int64))
    assert float(module(x, np.zeros(3, np.int64))) == pytest.approx(float(loss), rel=1e-5)


def layers(dtype: type = np.float32) -> onnx.ModelProto:
    """x [n, 3] -> linear, BatchNormalization -> y [n, 2], as exported for inference."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[n, 3] x) => (float[n, 2] y)
        <float[3, 2] w = {0.5, -1, 1, 0.25, 0.75, 1}, float[2] s = {1, 2}, float[2] b = {0, 0.5},
         float[2] m = {0.1, 0.2}, float[2] v = {1, 0.5}>
        { a = MatMul(x, w)  y = BatchNormalization(a, s, b, m, v) }"""
    )
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return model


@pytest.mark.parametrize("clip", [None, 1.0])
def test_trainer_trains_as_torch(clip: float | None) -> None:
    """Parameters and statistics after two epochs of batches of 4, 4 and 2 samples."""
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((10, 3)).astype(np.float32), rng.standard_normal((10, 2)).astype(np.float32)
    trainer = Trainer(layers(), "mse", "sgd", 0.1, batch_norm="training", clip_grad_norm=clip)
    trainer.fit(x, y, epochs=2, batch_size=4, shuffle=False, verbose=False)

    linear, norm = nn.Linear(3, 2, bias=False, dtype=torch.float64), nn.BatchNorm1d(2, dtype=torch.float64)
    v = values_of(layers())
    with torch.no_grad():
        linear.weight.copy_(v["w"].T)
        for target, name in (
            (norm.weight, "s"),
            (norm.bias, "b"),
            (norm.running_mean, "m"),
            (norm.running_var, "v"),
        ):
            target.copy_(v[name])  # type: ignore[union-attr]
    net = nn.Sequential(linear, norm)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        for part in (slice(0, 4), slice(4, 8), slice(8, 10)):
            optimizer.zero_grad()
            functional.mse_loss(
                net(torch.tensor(x[part]).double()), torch.tensor(y[part]).double()
            ).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    for name, value in (("m", norm.running_mean), ("v", norm.running_var)):
        np.testing.assert_allclose(trainer.state.statistics[name].data, value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(trainer.parameters["w"].data, linear.weight.detach().T, rtol=1e-4)
    np.testing.assert_allclose(trainer.predict(x), net.eval()(torch.tensor(x).double()).detach(), rtol=1e-4)


def test_one_value_per_channel_is_an_error_as_in_torch(tmp_path: Path) -> None:
    """Of 9 samples in batches of 4 the last is alone: PyTorch refuses, and so do we, with the parameters untouched."""
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((9, 3)).astype(np.float32), rng.standard_normal((9, 2)).astype(np.float32)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        nn.BatchNorm1d(3)(torch.tensor(x[8:]))
    trainer = Trainer(layers(), "mse", "sgd", 0.1, batch_norm="training", directory=tmp_path / "run")
    with pytest.raises(DivergenceError, match=r"one value per channel.*drop_last=True") as error:
        trainer.fit(x, y, batch_size=4, verbose=False)
    assert "learning rate, clip" not in str(error.value)
    shell = Trainer(layers(), "mse", "sgd", 0.1, batch_norm="training")
    with (
        speaking(ShellWords()),
        pytest.raises(
            DivergenceError,
            match=r"another --batch-size, so that no batch has one sample, or .*\(--drop-last\)\.$",
        ),
    ):
        shell.fit(x, y, batch_size=4, verbose=False)
    assert all(np.isfinite(value.data).all() for _, value in trainer.state.statistics)
    trainer.abandon_fit()
    trainer.fit(x, y, batch_size=4, drop_last=True, verbose=False)
    assert trainer.global_step == 4


def test_half_precision_counts_beyond_its_range(tmp_path: Path) -> None:
    """float16 ends at 65,504, and n is larger: the factor must not become infinite."""
    model = layers(np.float16)
    generate_artifacts(model, loss="mse", optimizer="sgd", artifact_directory=tmp_path, batch_norm="training")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    x = np.random.default_rng(0).standard_normal((70_000, 3)).astype(np.float16)
    module(x, np.zeros((70_000, 2), np.float16))
    a = x.astype(np.float64) @ values_of(model)["w"].numpy()
    expected = 0.9 * np.array([1, 0.5]) + 0.1 * a.var(axis=0, ddof=1)
    np.testing.assert_allclose(state.statistics["v"].data, expected, rtol=5e-3)
