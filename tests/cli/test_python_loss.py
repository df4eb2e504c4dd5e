"""`--loss FILE.py:NAME`: a loss in a Python file, traced once; and `FunctionLoss.save`, which writes it as a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import Trainer
from onnxtrain.losses import ModelLoss, TorchLoss

LOSSES = """
from pathlib import Path
import torch.nn.functional as F
from torch import nn
import beside

Path(__file__).with_name("ran").touch()

def joint(value, kind, reg, cls):
    return F.smooth_l1_loss(value, reg) + beside.SHARE * F.cross_entropy(kind, cls, label_smoothing=0.05)

def positive(value, present):
    return F.binary_cross_entropy_with_logits(value, present, reduction="none").sum(1)

criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
"""


def joint(value: Any, kind: Any, reg: Any, cls: Any) -> Any:
    return F.smooth_l1_loss(value, reg) + 0.5 * F.cross_entropy(kind, cls, label_smoothing=0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[n, 4] x) => (float[n, 1] value, float[n, 3] kind) {
            value = MatMul(x, a)  kind = MatMul(x, b)
        }"""
    )
    rng = np.random.default_rng(0)
    for name, width in (("a", 1), ("b", 3)):
        weight = rng.normal(size=(4, width)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    onnx.save(model, tmp_path / "net.onnx")
    (tmp_path / "losses.py").write_text(LOSSES)
    (tmp_path / "beside.py").write_text("SHARE = 0.5\n")
    np.savez(
        tmp_path / "data.npz",
        x=rng.normal(size=(24, 4)).astype(np.float32),
        reg=rng.normal(size=(24, 1)).astype(np.float32),
        cls=rng.integers(0, 3, 24),
    )
    return tmp_path


def _torch_losses(folder: Path, epochs: int) -> list[float]:
    """Trains the same weights by PyTorch's SGD on whole batches; returns the loss of each epoch."""
    data = {name: torch.tensor(array) for name, array in np.load(folder / "data.npz").items()}
    weights = [
        torch.tensor(onnx.numpy_helper.to_array(w).copy(), requires_grad=True)
        for w in onnx.load(folder / "net.onnx").graph.initializer
    ]
    found = []
    for _ in range(epochs):
        loss = joint(*(data["x"] @ w for w in weights), data["reg"], data["cls"])
        for w, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            w.data -= 0.1 * gradient
        found.append(loss.item())
    return found


def test_a_function_trains_as_in_torch_and_resuming_runs_no_python(run: Any, folder: Path) -> None:
    loss = f"{folder / 'losses.py'}:joint"
    words = ["--optimizer", "sgd", "--lr", 0.1, "--batch-size", 24, "-o", folder / "run"]
    first = run(
        "train", folder / "net.onnx", "--data", folder / "data.npz", "--loss", loss, "--epochs", 2, *words
    )
    assert first.code == 0, first.err
    (folder / "ran").unlink()
    (folder / "losses.py").write_text("raise SystemExit(3)")
    second = run("train", folder / "run", "--epochs", 2)
    assert second.code == 0, second.err
    assert not (folder / "ran").exists()
    expected = _torch_losses(folder, 4)
    np.testing.assert_allclose(Trainer.resume(folder / "run").history["loss"], expected, rtol=1e-5)
    # The options of the run leave the loss out, and a file of options with one is refused.
    config = folder / "run" / "run.toml"
    assert f"--loss {loss}" in config.read_text()
    assert "\nloss =" not in config.read_text()
    config.write_text(f"loss = {json.dumps(loss)}\n" + config.read_text())
    refused = run("train", "--config", config, "-o", folder / "again")
    assert refused.code == 1
    assert "which runs a Python file. Delete the line" in " ".join(refused.err.split())


def test_evaluate_and_criteria(run: Any, folder: Path) -> None:
    command = ["evaluate", folder / "net.onnx", "--data", folder / "data.npz", "--json", "--loss"]
    found = run(*command, f"{folder / 'losses.py'}:joint").json()["loss"]
    assert found == pytest.approx(_torch_losses(folder, 1)[0], rel=1e-5)
    summed = run(*command, f"{folder / 'losses.py'}:joint", "--loss-option", "reduction=sum")
    assert summed.code == 0, summed.err
    with np.load(folder / "data.npz") as data:
        x, cls = data["x"], data["cls"]
        np.savez(folder / "labels.npz", x=x, labels=cls)
    words = ["--loss-input", "kind", "--data", folder / "labels.npz"]
    of_criterion = run(*command, f"{folder / 'losses.py'}:criterion", *words)
    kind = ort.InferenceSession(folder / "net.onnx").run(["kind"], {"x": x})[0]
    expected = F.cross_entropy(torch.tensor(kind), torch.tensor(cls), label_smoothing=0.05).item()
    assert of_criterion.json()["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "content", "said"),
    [
        ("nothing.py:f", "", "there is no file 'nothing.py'"),
        ("own.py", "def f(s, y): return s", "is missing; it defines f. Pass e.g. --loss own.py:f"),
        ("own.py:g", "def f(s, y): return s", "'own.py' does not define 'g'; it defines f."),
        ("own.py:g", "", "it defines no function"),
        ("own.py:f", "1 / 0", "running the file raised ZeroDivisionError: division by zero"),
        ("own.py:f", "import missing_package_x", "the file imports 'missing_package_x', which is not installed"),
        ("own.py:f", "exit()", "running the file raised SystemExit"),
        ("own.py:f", "f = 3", "choosing a loss: received 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(
    run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, loss: str, content: str, said: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "own.py").write_text(content)
    shown = run("train", "net.onnx", "--data", "data.npz", "--loss", loss, "-o", "run")
    assert shown.code == 1
    assert said in " ".join(shown.err.split())
    assert not (folder / "run").exists()


def test_a_saved_loss_is_the_function(folder: Path) -> None:
    TorchLoss(joint).save(folder / "joint.onnx", folder / "net.onnx")
    model = onnx.load(folder / "joint.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert not model.functions
    assert [value.name for value in model.graph.input] == ["value", "kind", "reg", "cls"]
    data = dict(np.load(folder / "data.npz"))
    # Stock ONNX Runtime computes what PyTorch computes, for other batches, too.
    session = ort.InferenceSession(folder / "joint.onnx")
    net = ort.InferenceSession(folder / "net.onnx")
    for count in (1, 24):
        part = {name: array[:count] for name, array in data.items()}
        value, kind = net.run(None, {"x": part.pop("x")})
        found = session.run(None, {"value": value, "kind": kind, **part})[0]
        expected = joint(*map(torch.tensor, (value, kind, part["reg"], part["cls"]))).item()
        assert found == pytest.approx(expected, rel=1e-5)
    x = data.pop("x")
    for loss in (ModelLoss(folder / "joint.onnx"), str(folder / "joint.onnx")):
        trainer = Trainer(folder / "net.onnx", loss, optimizer="sgd", learning_rate=0.1)
        history = trainer.fit(x, data, epochs=3, batch_size=24, verbose=False)
        np.testing.assert_allclose(history["loss"], _torch_losses(folder, 3), rtol=1e-5)
    # BCE with logits stays finite, where torch.onnx.export writes the logarithm of a sigmoid.
    wide = TorchLoss(lambda value, present: F.binary_cross_entropy_with_logits(value, present))
    wide.save(folder / "bce.onnx", folder / "net.onnx", loss_input_names=["value"])
    big = {"value": np.float32([[500], [-500]]), "present": np.float32([[0], [1]])}
    assert ort.InferenceSession(folder / "bce.onnx").run(None, big)[0] == 500
