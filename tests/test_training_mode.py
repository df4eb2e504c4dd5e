"""BatchNormalization and Dropout that cannot train as they are to: said, not passed over."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import models
from onnxtrain import (
    CheckpointState,
    Module,
    Trainer,
    generate_artifacts,
    make_batch_dynamic,
    restore_dropout,
)
from onnxtrain.errors import GraphBuildError, InputError
from trainer import problems


def norm_model(batch: int | str) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    helper = onnx.helper
    values = {
        "w": rng.standard_normal((4, 8)).astype(np.float32),
        **{
            name: np.full(8, fill, np.float32) for name, fill in {"s": 1, "b": 0, "mean": 0, "var": 1}.items()
        },
        "v": rng.standard_normal((8, 2)).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("BatchNormalization", ["h", "s", "b", "mean", "var"], ["n"]),
        helper.make_node("MatMul", ["n", "v"], ["y"]),
    ]
    return models.make_model(nodes, {"x": [batch, 4]}, {"y": [batch, 2]}, values)


def test_statistics_of_one_sample_are_refused(tmp_path: Path) -> None:
    model = norm_model(1)
    with pytest.raises(
        GraphBuildError, match=r"exported for a batch of 1. .*onnxtrain.make_batch_dynamic\(model\)"
    ):
        Trainer(model, "cross_entropy", batch_norm="training", directory=tmp_path / "run")
    with pytest.raises(GraphBuildError, match="exported for a batch of 1"):
        generate_artifacts(
            model, loss="cross_entropy", batch_norm="training", artifact_directory=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
    Trainer(model, "cross_entropy", batch_norm="inference")


def test_made_dynamic_it_normalises_by_the_batch() -> None:
    """One step of gradient descent beside PyTorch's."""
    x = np.random.default_rng(1).standard_normal((16, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    model = norm_model(1)
    start = {t.name: torch.tensor(onnx.numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    trainer = Trainer(make_batch_dynamic(model), "cross_entropy", "sgd", 0.1, batch_norm="training")
    trainer.fit(x, y, batch_size=16, shuffle=False, verbose=False)
    norm = torch.nn.BatchNorm1d(8)
    w, v = start["w"].requires_grad_(), start["v"].requires_grad_()
    torch.nn.functional.cross_entropy(norm(torch.tensor(x) @ w) @ v, torch.tensor(y)).backward()
    for name, value in (("w", w), ("v", v), ("s", norm.weight), ("b", norm.bias)):
        assert value.grad is not None
        expected = (value - 0.1 * value.grad).detach().numpy()
        np.testing.assert_allclose(trainer.parameters[name].data, expected, rtol=1e-4, atol=1e-6)


def test_training_sample_by_sample_is_told(caplog: pytest.LogCaptureFixture) -> None:
    problem = problems.line(samples=6, batch=1)
    trainer = Trainer(problem.model, "mse")
    trainer.fit(problem.x, problem.y, verbose=False)
    assert "exported for one sample at a time: each step of the optimizer sees a single one" in caplog.text
    assert "make_batch_dynamic" in caplog.text
    caplog.clear()
    trainer.evaluate(problem.x, problem.y)
    assert caplog.text == ""


def test_the_device_is_told_of_a_fixed_batch(tmp_path: Path) -> None:
    generate_artifacts(
        norm_model(2), loss="cross_entropy", batch_norm="inference", artifact_directory=tmp_path
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    with pytest.raises(
        InputError, match=r"axis 0 must be 2. If this is the batch: .*make_batch_dynamic\(model\)"
    ):
        module(np.ones((3, 4), np.float32), np.zeros(3, np.int64))
    with pytest.raises(InputError, match=r"axis 1 must be 4\.$"):
        module(np.ones((2, 5), np.float32), np.zeros(2, np.int64))


def test_nothing_to_switch_is_an_error() -> None:
    problem = problems.line()
    with pytest.raises(GraphBuildError, match="batch_norm='training' has nothing to switch"):
        Trainer(problem.model, "mse", batch_norm="training")
    Trainer(problem.model, "mse", batch_norm="inference")


def test_dropout_alone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[n, 2] x) => (float[n, 1] y) <float[2, 1] w = {1., 2.}> { d = Dropout(x) y = MatMul(d, w) }"""
    )
    with caplog.at_level(logging.WARNING):
        Trainer(model, "mse", batch_norm="training")
    assert "the model has no BatchNormalization node" in caplog.text


class NormNet(torch.nn.Module):
    """Two Dropout modules with BatchNormalization, and a second output with a Dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.out = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
        self.first, self.last, self.aside = (
            torch.nn.Dropout(0.3),
            torch.nn.Dropout(0.3),
            torch.nn.Dropout(0.3),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(torch.relu(self.bn(self.fc(x))))
        return self.last(self.out(hidden)), self.aside(torch.tanh(hidden))


@pytest.fixture(scope="module")
def norm_net(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The files of NormNet, exported for inference, by `optimize`."""
    paths = {optimize: tmp_path_factory.mktemp("net") / "net.onnx" for optimize in (False, True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        for optimize, path in paths.items():
            torch.manual_seed(0)
            torch.onnx.export(
                NormNet().eval(), (torch.randn(2, 4),), str(path), input_names=["x"], output_names=["y", "z"],
                dynamic_shapes=({0: "batch"},), optimize=optimize, verbose=False,
            )  # fmt: skip
    return paths


LOST = "drops nothing at"


@pytest.mark.torch
def test_lost_dropout_is_told(
    norm_net: dict[bool, Path], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Only Dropout on the way to what the training model returns counts; the advice of the message ends it."""

    def messages(model: Any, batch_norm: Any, output: str = "y") -> str:
        caplog.clear()
        generate_artifacts(
            model,
            loss="cross_entropy",
            loss_input_names=[output],
            batch_norm=batch_norm,
            artifact_directory=tmp_path,
        )
        return caplog.text

    path = norm_net[False]
    text = messages(path, "training")
    assert "batch_norm='training' drops nothing at 2 place(s)" in text
    assert "has removed a Dropout module: first, last. Its ratio p is not in the file." in text
    assert "If p is 0 in the PyTorch network, nothing is missing" in text
    # The call that the message recommends.
    assert "model = onnxtrain.restore_dropout(model, p=0.1)" in text
    assert LOST not in messages(restore_dropout(path, p=0.1), "training")
    assert "at 2 place(s), where the exporter has removed a Dropout module: first, aside." in messages(
        path, "training", output="z"
    )
    # A trainer also returns the other output.
    caplog.clear()
    Trainer(path, "cross_entropy", batch_norm="training", loss_input_names="y")
    assert (
        "at 3 place(s), where the exporter has removed a Dropout module: first, last, aside." in caplog.text
    )
    # Modes by pattern: the first one that matches.
    assert (
        "batch_norm drops nothing at 1 place(s), where the exporter has removed a Dropout module: last."
        in (messages(path, {"[bf]*": "inference", "*": "training"}))
    )
    for quiet in ("as_exported", "inference", {"bn": "training"}, {"bn": "training", "*": "inference"}):
        assert LOST not in messages(path, quiet)


@pytest.mark.torch
def test_lost_dropout_is_told_where_nothing_can_be_switched(norm_net: dict[bool, Path]) -> None:
    model = onnx.load(norm_net[False])
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output[:1]))
    with pytest.raises(
        GraphBuildError, match=r"restore_dropout\(model, p\), which finds the place of first, last, aside\."
    ):
        Trainer(model, "cross_entropy", batch_norm="training", loss_input_names="y")
    # The optimizer of the exporter leaves no trace, and folds the BatchNormalization.
    with pytest.raises(GraphBuildError, match=r"restore_dropout\(model, p\)\. Else"):
        Trainer(norm_net[True], "cross_entropy", batch_norm="training", loss_input_names="y")


@pytest.mark.torch
def test_the_shell_is_told_of_lost_dropout(norm_net: dict[bool, Path], tmp_path: Path) -> None:
    """The command that the message recommends writes a file that no longer gets it."""

    def artifacts(model: str, directory: str, *options: str) -> str:
        command = [
            "artifacts",
            model,
            "--loss",
            "cross_entropy",
            "--loss-input",
            "y",
            "-o",
            directory,
            *options,
        ]
        result = subprocess.run(
            [sys.executable, "-m", "onnxtrain", *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return " ".join(result.stderr.split())

    shutil.copy(norm_net[False], tmp_path / "model.onnx")
    text = artifacts("model.onnx", "a", "--batch-norm", "training")
    assert "--batch-norm training drops nothing at 3 place(s)" in text
    assert LOST not in artifacts("model.onnx", "b", "--batch-norm", "inference")
    command = re.search(r'python -c "(.*?)"', text)
    assert command is not None
    subprocess.run([sys.executable, "-c", command[1]], cwd=tmp_path, check=True)
    assert LOST not in artifacts("with_dropout.onnx", "c", "--batch-norm", "training")


def test_a_single_name_may_stand_alone() -> None:
    """`frozen_params="w1"` is one parameter, not the two `w` and `1`."""
    problem = problems.classes()
    for options, moving in (({"frozen_params": "w1"}, {"b1", "w2", "b2"}), ({"requires_grad": "w1"}, {"w1"})):
        trainer = Trainer(problem.model, problem.loss, loss_input_names="logits", **options)
        assert {name for name, p in trainer.parameters if p.requires_grad} == moving
