"""BatchNormalization and Dropout that cannot train as they are to: said, not passed over."""

from __future__ import annotations

import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

import models
from cli.conftest import Runner
from onnxtrain import (
    CheckpointState,
    Module,
    Trainer,
    generate_artifacts,
    make_batch_dynamic,
    restore_dropout,
)
from onnxtrain.errors import GraphBuildError, InputError
from onnxtrain.lora import LoraConfig
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
        GraphBuildError, match=r"exported with a batch of 1. .*onnxtrain.make_batch_dynamic\(model\)"
    ):
        Trainer(model, "cross_entropy", batch_norm="training", directory=tmp_path / "run")
    with pytest.raises(GraphBuildError, match="exported with a batch of 1"):
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
    assert "exported with a batch of 1: each optimizer step sees a single sample" in caplog.text
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
    with pytest.raises(GraphBuildError, match="batch_norm='training' has no effect"):
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


LOST = "The exporter removed"


@pytest.mark.torch
def test_removed_dropout_is_told(
    norm_net: dict[bool, Path], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """By default and with `batch_norm`; only Dropout on the way to what the training model returns counts."""

    def messages(batch_norm: Any, output: str = "y", **options: Any) -> str:
        caplog.clear()
        generate_artifacts(
            norm_net[False], loss="cross_entropy", loss_input_names=[output], batch_norm=batch_norm,
            artifact_directory=tmp_path, **options,
        )  # fmt: skip
        return caplog.text

    for batch_norm in ("as_exported", "training", {"bn": "training"}):
        text = messages(batch_norm)
        assert "removed 2 Dropout module(s), so these places drop nothing in training: first, last." in text
        assert "Pass dropout=0.1, with the p of the PyTorch network" in text
        assert "or dropout=0.0 to train without it, e.g. because p is 0 in the network" in text
    assert "nothing in training: first, aside." in messages("training", output="z")
    # Modes by pattern: the first one that matches.
    assert "nothing in training: last." in messages({"[bf]*": "inference", "*": "training"})
    assert "nothing in training: last." in messages("training", dropout={"first": 0.1})
    for quiet in ("inference", {"bn": "training", "*": "inference"}):
        assert LOST not in messages(quiet)
    for dropout in (0, 0.1, {"first": 0.0, "l*": 0.1}):
        assert LOST not in messages("training", dropout=dropout)
    # A trainer also returns the other output.
    caplog.clear()
    Trainer(norm_net[False], "cross_entropy", batch_norm="training", loss_input_names="y")
    assert "nothing in training: first, last, aside." in caplog.text


@pytest.mark.torch
def test_removed_dropout_is_told_where_nothing_can_be_switched(norm_net: dict[bool, Path]) -> None:
    model = onnx.load(norm_net[False])
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            node.CopyFrom(onnx.helper.make_node("Identity", node.input[:1], node.output[:1]))
    with pytest.raises(
        GraphBuildError, match=r"Pass dropout=0.1 for the removed Dropout of first, last, aside\."
    ):
        Trainer(model, "cross_entropy", batch_norm="training", loss_input_names="y")
    # The optimizer of the exporter leaves no trace, and folds the BatchNormalization.
    with pytest.raises(GraphBuildError, match=r"restore_dropout\(model, p, before=\[...\]\)\. Otherwise"):
        Trainer(norm_net[True], "cross_entropy", batch_norm="training", loss_input_names="y")
    with pytest.raises(GraphBuildError, match=r"dropout=0.1 has no effect.*optimize=False.*before="):
        Trainer(norm_net[True], "cross_entropy", dropout=0.1, loss_input_names="y")
    Trainer(norm_net[True], "cross_entropy", dropout=0, loss_input_names="y")
    with pytest.raises(
        GraphBuildError, match=r"no Dropout matches 'head\*' of dropout; the model has first, last"
    ):
        Trainer(norm_net[False], "cross_entropy", dropout={"head*": 0.1}, loss_input_names="y")
    for wrong in (1, -0.1, True, "0.1", {"*": 1.0}):
        with pytest.raises(InputError, match=r"dropout must be a number in \[0, 1\), or one per"):
            Trainer(norm_net[False], "cross_entropy", dropout=wrong)  # type: ignore[arg-type]


@pytest.mark.torch
def test_the_shell_is_told_of_removed_dropout(
    norm_net: dict[bool, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The options that the message recommends drop elements, or end the message; a run remembers them."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(norm_net[False], tmp_path / "model.onnx")
    given = ["--loss", "cross_entropy", "--loss-input", "y"]

    def said(code: int, *arguments: str) -> str:
        result = Runner(monkeypatch)(*arguments)
        assert result.code == code, result.err
        return " ".join(result.err.split())

    def ratios(directory: str) -> list[float]:
        graph = onnx.load(tmp_path / directory / "training_model.onnx").graph
        values = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
        return [round(float(values[n.input[1]]), 6) for n in graph.node if n.op_type == "Dropout"]

    text = said(0, "artifacts", "model.onnx", *given, "-o", "a")
    assert "Pass --dropout 0.1, with the p" in text
    assert "or --dropout 0.0 to train without it" in text
    assert ratios("a") == []
    assert LOST not in said(0, "artifacts", "model.onnx", *given, "-o", "b", "--dropout", "0.0")
    assert ratios("b") == []
    assert LOST not in said(0, "artifacts", "model.onnx", *given, "-o", "c", "--dropout", "0.1")
    assert ratios("c") == [0.1, 0.1, 0.1]
    by_pattern = ["--dropout", "first=0.25", "--dropout", "a*=0", "--dropout", "*=0.5"]
    np.savez("data.npz", x=np.ones((4, 4), np.float32), labels=np.zeros(4, np.int64))
    train = ["train", "model.onnx", "--data", "data.npz", *given, "-o", "run", "--batch-norm", "training"]
    assert LOST not in said(0, *train, "--epochs", "1", *by_pattern)
    assert sorted(ratios("run")) == [0.25, 0.5]
    assert "--dropout 0.3 (it was first=0.25 a*=0 *=0.5)" in said(
        1, "train", "run", "--data", "data.npz", "--dropout", "0.3"
    )
    for wrong in ("one", "1", "-0.1", "=0.1", "first=", "nan"):
        assert f"--dropout is '{wrong}'; give a number in [0, 1)" in said(
            1, "artifacts", "model.onnx", *given, f"--dropout={wrong}"
        )


class Wide(torch.nn.Module):
    """A layer of many features between two Dropout modules, the second with another module name."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.fc, self.end = torch.nn.Dropout(0.5), torch.nn.Linear(16, 3000), torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.fc(self.drop(x)))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Wide, dict[str, onnx.ModelProto]]:
    """The module, and its files: with traces of Dropout, with nodes in inference mode, and with nodes that train."""
    path = tmp_path_factory.mktemp("wide") / "net.onnx"
    torch.manual_seed(0)
    net = Wide().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(
            net, (torch.randn(2, 16),), str(path), input_names=["x"], output_names=["y"],
            dynamic_shapes=({0: "batch"},), optimize=False, verbose=False,
        )  # fmt: skip
    in_training = restore_dropout(onnx.load(path), p=0.9)
    in_inference = onnx.ModelProto()
    in_inference.CopyFrom(in_training)
    for node in in_inference.graph.node:
        if node.op_type == "Dropout":
            del node.input[2:]
    return net, {"traces": onnx.load(path), "inference": in_inference, "training": in_training}


@pytest.mark.torch
@pytest.mark.parametrize("profile", ["default", "portable"])
@pytest.mark.parametrize("kind", ["traces", "inference", "training"])
def test_dropout_is_pytorchs(
    wide: tuple[Wide, dict[str, onnx.ModelProto]], kind: str, profile: Any, tmp_path: Path
) -> None:
    """Share and scale of what is kept; gradients are PyTorch's of the same mask; evaluation drops nothing."""
    net, files = wide
    # The number wins over the ratio of the file, and `dropout` over `batch_norm`.
    generate_artifacts(
        files[kind], loss="mse", artifact_directory=tmp_path, additional_output_names=["y"],
        batch_norm="inference", dropout={"drop": 0, "*": 0.25}, profile=profile,
    )  # fmt: skip
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((4, 16)).astype(np.float32), np.zeros((4, 3000), np.float32)
    loss, y = module(x, target)
    plain = net(torch.tensor(x))
    mask = torch.tensor(y != 0)
    # Four standard deviations of the share of 12,000 elements.
    assert abs(float(mask.float().mean()) - 0.75) < 4 * (0.25 * 0.75 / mask.numel()) ** 0.5
    expected = plain * mask / 0.75
    np.testing.assert_allclose(y, expected.detach(), rtol=1e-5, atol=1e-6)
    net.zero_grad()
    wanted = expected.square().mean()
    wanted.backward()
    np.testing.assert_allclose(loss, wanted.detach(), rtol=1e-5)
    gradients = {name: b.read() for name, b in state._store.gradients.items()}
    assert net.fc.weight.grad is not None
    np.testing.assert_allclose(gradients["fc.weight"], net.fc.weight.grad, rtol=1e-4, atol=1e-7)
    # Another step, another mask.
    assert (np.asarray(module(x, target)[1] != 0) != mask.numpy()).any()
    module.eval()
    file = onnx.ModelProto()
    file.CopyFrom(files["traces"])
    session = ort.InferenceSession(file.SerializeToString())
    (deployed,) = session.run(["y"], {"x": x})
    np.testing.assert_array_equal(module(x, target)[1], deployed)


def test_the_mean_over_masks_is_the_output_without(
    wide: tuple[Wide, dict[str, onnx.ModelProto]], tmp_path: Path
) -> None:
    """Of Dropout in front of the layer, too, whose expectation is the layer's output."""
    net, files = wide
    generate_artifacts(
        files["traces"], loss="mse", artifact_directory=tmp_path, additional_output_names=["y"],
        dropout={"drop": 0.5, "*": 0.0},
    )  # fmt: skip
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    # Each row is a draw of its own.
    x = np.tile(np.random.default_rng(0).standard_normal((1, 16)).astype(np.float32), (2000, 1))
    y = np.asarray(module(x, np.zeros((2000, 3000), np.float32))[1])
    plain = net(torch.tensor(x[:1])).detach().numpy()
    error = (y.mean(0) - plain[0]) / (y.std(0) / 2000**0.5)
    # 3,000 features that share 16 draws: of standard normal errors.
    assert abs(error.mean()) < 1
    assert 0.5 < error.std() < 1.6


def test_adapters_keep_their_own_dropout(
    wide: tuple[Wide, dict[str, onnx.ModelProto]], tmp_path: Path
) -> None:
    """`dropout` and `batch_norm` choose the modes of the network's own layers."""
    _, files = wide
    config = LoraConfig(r=2, target_modules=["fc"], lora_dropout=0.5)
    for options in ({"dropout": 0.0}, {"dropout": 0.25}, {"batch_norm": "inference"}):
        generate_artifacts(files["traces"], loss="mse", artifact_directory=tmp_path, lora=config, **options)
        graph = onnx.load(tmp_path / "training_model.onnx").graph
        values = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
        ratios = sorted(float(values[n.input[1]]) for n in graph.node if n.op_type == "Dropout")
        assert ratios == ([0.25, 0.25, 0.5] if options == {"dropout": 0.25} else [0.5])
        evaluation = onnx.load(tmp_path / "eval_model.onnx").graph.node
        assert not [n for n in evaluation if n.op_type == "Dropout" and len(n.input) > 2]


def test_a_single_name_may_stand_alone() -> None:
    """`frozen_params="w1"` is one parameter, not the two `w` and `1`."""
    problem = problems.classes()
    for options, moving in (({"frozen_params": "w1"}, {"b1", "w2", "b2"}), ({"requires_grad": "w1"}, {"w1"})):
        trainer = Trainer(problem.model, problem.loss, loss_input_names="logits", **options)
        assert {name for name, p in trainer.parameters if p.requires_grad} == moving


def test_equal_layers_keep_their_own_modes(tmp_path: Path) -> None:
    """Two calls of one layer with the same input are equal nodes of the file, until their modes differ."""
    model = norm_model("batch")
    norm, graph = model.graph.node[1], model.graph
    norm.name = "frozen"
    second = onnx.helper.make_node("BatchNormalization", norm.input, ["n2"], name="live")
    nodes = [*graph.node[:2], second, onnx.helper.make_node("Add", ["n", "n2"], ["sum"]), graph.node[2]]
    nodes[-1].input[0] = "sum"
    del graph.node[:]
    graph.node.extend(nodes)
    generate_artifacts(
        model, loss="mse", batch_norm={"frozen": "inference", "live": "training"}, artifact_directory=tmp_path
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((6, 4)).astype(np.float32), np.ones((6, 2), np.float32)
    loss = Module(tmp_path / "training_model.onnx", state)(x, target)

    tensors = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in graph.initializer}
    mean, var = tensors.pop("mean"), tensors.pop("var")
    for tensor in tensors.values():
        tensor.requires_grad_()
    w, s, b, v = (tensors[name] for name in ("w", "s", "b", "v"))
    hidden = torch.tensor(x) @ w
    # Clones, because the second call updates the statistics, which the backward pass of the first one reads.
    frozen = torch.nn.functional.batch_norm(hidden, mean.clone(), var.clone(), s, b)
    live = torch.nn.functional.batch_norm(hidden, mean, var, s, b, training=True)
    expected = torch.nn.functional.mse_loss((frozen + live) @ v, torch.tensor(target))
    expected.backward()
    np.testing.assert_allclose(loss, expected.detach(), rtol=1e-5)
    for name, tensor in tensors.items():
        assert tensor.grad is not None
        np.testing.assert_allclose(state._store.gradients[name].read(), tensor.grad, rtol=1e-4, atol=1e-6)
    for name, statistic in (("mean", mean), ("var", var)):
        np.testing.assert_allclose(state.statistics[name].data, statistic, rtol=1e-5, atol=1e-7)


class Chained(torch.nn.Module):
    """Two Dropout modules of one value, and one directly behind another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Dropout(0.5) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.ones(2000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        return torch.cat([self.b(x), self.c(self.a(x))], -1)


@pytest.mark.torch
def test_dropout_behind_dropout_and_twice_of_one_value(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(
            Chained().eval(), (torch.ones(2, 2000),), str(tmp_path / "net.onnx"), input_names=["x"],
            output_names=["y"], dynamic_shapes=({0: "batch"},), optimize=False, verbose=False,
        )  # fmt: skip
    generate_artifacts(
        tmp_path / "net.onnx", loss="mse", additional_output_names=["y"], artifact_directory=tmp_path,
        dropout={"a": 0.2, "b": 0.3, "c": 0.4},
    )  # fmt: skip
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    x = np.ones((4, 2000), np.float32)
    _, y = module(x, np.concatenate([x, x], -1))
    once, twice = np.split(np.asarray(y), 2, -1)
    for values, kept in ((once, 0.7), (twice, 0.8 * 0.6)):
        np.testing.assert_allclose(values[values != 0], 1 / kept, rtol=1e-5)
        assert abs(np.mean(values != 0) - kept) < 4 * (kept * (1 - kept) / values.size) ** 0.5
    # The masks are drawn independently of each other.
    both = np.mean((once != 0) & (twice != 0))
    assert abs(both - 0.7 * 0.48) < 4 * (0.34 * 0.66 / once.size) ** 0.5
