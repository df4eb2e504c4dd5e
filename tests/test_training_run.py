"""From an `.onnx` file to a trained one: against a float64 implementation in numpy, bit-equal resuming, BatchNorm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

import models
from onnxtrain.api import CheckpointState
from onnxtrain.optimizers import SGD, Adafactor, Adam, AdamW, Muon, Optimizer, ParameterGroup
from training_run import Run

STEPS = 20


def batches(
    steps: int = STEPS, batch: int = 16, features: int = 4, classes: int = 3
) -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(7)
    return [
        (rng.normal(0, 1, (batch, features)).astype(np.float32), rng.integers(0, classes, batch))
        for _ in range(steps)
    ]


class NumpyMLP:
    """models.mlp with softmax cross-entropy and its gradients written out, in float64."""

    def __init__(self) -> None:
        self.w = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in models.mlp().graph.initializer}

    def loss_and_gradients(self, x: np.ndarray, labels: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        x, rows, w = x.astype(np.float64), np.arange(len(labels)), self.w
        a = np.tanh(x @ w["w1"] + w["b1"])
        z = a @ w["w2"] + w["b2"]
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        loss = -np.log(p[rows, labels]).mean()
        dz = p.copy()
        dz[rows, labels] -= 1
        dz /= len(labels)
        dh = dz @ w["w2"].T * (1 - a**2)
        return loss, {"w1": x.T @ dh, "b1": dh.sum(0), "w2": a.T @ dz, "b2": dz.sum(0)}


def numpy_adamw(w, g, m, v, t, lr, hugging_face, decay):
    """One AdamW step: Hugging Face's form (decay after the update, eps beside sqrt(v)), or torch's."""
    b1, b2 = 0.9, 0.999
    m[:] = b1 * m + (1 - b1) * g
    v[:] = b2 * v + (1 - b2) * g * g
    if hugging_face:
        u = w - lr * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + 1e-6)
        return u - lr * decay * u
    w = w - lr * decay * w
    return w - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + 1e-8)


@pytest.mark.parametrize("form", ["hugging_face", "torch", "sgd", "groups"])
def test_twenty_steps_against_numpy(tmp_path: Path, form: str) -> None:
    optimizer: Optimizer = {
        "hugging_face": AdamW(adam_mode=1, eps=1e-6, weight_decay=0.01),
        "torch": AdamW(),
        "sgd": SGD(),
        "groups": AdamW(
            adam_mode=0,
            eps=1e-8,
            weight_decay=0.01,
            groups=[ParameterGroup("b?", weight_decay=0.0), ParameterGroup("w2", learning_rate_scale=0.5)],
        ),
    }[form]
    run = Run.generate(tmp_path, models.mlp(), loss="cross_entropy", optimizer=optimizer)
    reference = NumpyMLP()
    moments = {name: (np.zeros_like(w), np.zeros_like(w)) for name, w in reference.w.items()}
    rate = 0.05
    run.optimizer.set_learning_rate(rate)
    for t, (x, labels) in enumerate(batches(), start=1):
        loss, gradients = reference.loss_and_gradients(x, labels)
        assert abs(run.step(x, labels) - loss) <= 1e-6 * max(1, abs(loss))
        for name, g in gradients.items():
            if form == "sgd":
                reference.w[name] = reference.w[name] - np.float32(rate) * g
            else:
                grouped = form == "groups"
                lr = np.float32(rate).astype(np.float64) * (0.5 if grouped and name == "w2" else 1)
                decay = 0.0 if grouped and name.startswith("b") else 0.01
                reference.w[name] = numpy_adamw(
                    reference.w[name], g, *moments[name], t, lr, form == "hugging_face", decay
                )
    for name, parameter in run.state.parameters:
        difference = np.linalg.norm(parameter.data - reference.w[name]) / np.linalg.norm(reference.w[name])
        assert difference <= 1e-6, (name, difference)


@pytest.mark.parametrize(
    "optimizer",
    [
        AdamW(weight_decay=0.01),
        Adam(),
        SGD(momentum=0.9, nesterov=True),
        Adafactor(),
        AdamW(
            groups=[ParameterGroup("fc.weight", optimizer=Muon()), ParameterGroup("*.bias", optimizer=SGD())]
        ),
    ],
)
def test_resuming_is_bit_equal_to_not_stopping(tmp_path: Path, optimizer: Optimizer) -> None:
    through = Run.generate(tmp_path, models.conv_bn(), loss="cross_entropy", optimizer=optimizer)
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(5, 2, 6, 6)).astype(np.float32), rng.integers(0, 3, 5)) for _ in range(8)]
    through.optimizer.set_learning_rate(0.02)
    for batch in data[:4]:
        through.step(*batch)
    CheckpointState.save_checkpoint(through.state, tmp_path / "half", include_optimizer_state=True)
    resumed = Run.open(tmp_path, tmp_path / "half")
    assert resumed.optimizer.get_learning_rate() == 0.02
    losses = [[run.step(*batch) for batch in data[4:]] for run in (through, resumed)]
    assert losses[0] == losses[1]
    for name, parameter in through.state.parameters:
        np.testing.assert_array_equal(parameter.data, resumed.state.parameters[name].data)
    for name, statistic in through.state.statistics:
        np.testing.assert_array_equal(statistic.data, resumed.state.statistics[name].data)


@pytest.mark.parametrize("applications", [1, 2])
def test_running_statistics_by_the_onnx_formula(tmp_path: Path, applications: int) -> None:
    """running = running * momentum + batch * (1 - momentum), population variance (BatchNormalization-15)."""
    model = models.conv_bn(applications=applications)
    values = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    run = Run.generate(tmp_path, model, loss="cross_entropy", optimizer=SGD())
    run.optimizer.set_learning_rate(0.0)  # so that only the statistics move
    rng = np.random.default_rng(1)
    mean, var = values["bn.mean"], values["bn.var"]
    for _ in range(5):
        x = rng.normal(0, 2, (6, 2, 6, 6)).astype(np.float32)
        run.step(x, rng.integers(0, 3, 6))
        padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        y = np.einsum("nchwij,ocij->nohw", windows, values["conv.weight"])
        for _ in range(applications):
            batch_mean, batch_var = y.mean((0, 2, 3)), y.var((0, 2, 3))
            mean = mean * np.float32(0.8) + batch_mean * (1 - np.float32(0.8))
            var = var * np.float32(0.8) + batch_var * (1 - np.float32(0.8))
            scale = values["bn.scale"] / np.sqrt(batch_var + 1e-5)
            y = (y - batch_mean[:, None, None]) * scale[:, None, None] + values["bn.bias"][:, None, None]
    for name, expected in (("bn.mean", mean), ("bn.var", var)):
        np.testing.assert_allclose(run.state.statistics[name].data, expected, rtol=1e-6, atol=1e-6)


def test_eval_uses_running_statistics_and_leaves_them(tmp_path: Path) -> None:
    run = Run.generate(tmp_path, models.conv_bn(), loss="cross_entropy", optimizer=SGD())
    rng = np.random.default_rng(2)
    x, labels = rng.normal(size=(4, 2, 6, 6)).astype(np.float32), rng.integers(0, 3, 4)
    before = run.state.statistics["bn.mean"].data.copy()
    run.module.eval()
    one_by_one = np.mean([float(run.module(x[i : i + 1], labels[i : i + 1])) for i in range(4)])
    assert abs(one_by_one - float(run.module(x, labels))) <= 1e-5  # in training mode the batch would matter
    np.testing.assert_array_equal(run.state.statistics["bn.mean"].data, before)
