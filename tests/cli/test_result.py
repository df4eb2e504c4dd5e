"""`train` shows and exports the same weights, and says which; options of the optimizer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch.nn import functional

import models
from cli.files import arrays_in
from onnxtrain.cli._optimizer import chosen_optimizer
from onnxtrain.cli._options import OptimizerOptions
from onnxtrain.errors import OnnxTrainError
from onnxtrain.optimizers import SGD, Adagrad, AdamW, Muon
from trainer.test_resume import dropout_model


@pytest.fixture
def overfit(tmp_path: Path) -> Path:
    """Few samples whose labels are noise: validation gets worse soon."""
    rng = np.random.default_rng(0)
    for name in ("data", "other"):
        x = rng.standard_normal((24, 4)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, y=rng.integers(0, 3, 24))
    onnx.save(models.mlp(hidden=64), tmp_path / "net.onnx")
    return tmp_path


def train(run: Any, folder: Path, *options: object) -> Any:
    result = run(
        *(
            "train",
            folder / "net.onnx",
            "--data",
            folder / "data.npz",
            "--loss",
            "cross_entropy",
            "--lr",
            0.05,
        ),
        *("--overwrite", "-o", folder / "run", *options),
    )
    assert result.code == 0, result.err
    return result


def loss_of_file(folder: Path, data: str) -> float:
    """Cross-entropy by torch of what the exported file gives."""
    arrays = arrays_in(folder / f"{data}.npz")
    logits = ort.InferenceSession(folder / "run" / "trained.onnx").run(None, {"x": arrays["x"]})[0]
    return float(functional.cross_entropy(torch.tensor(logits).double(), torch.tensor(arrays["y"])))


def shown(text: str) -> dict[str, float]:
    return {
        name: float(value) for name, value in re.findall(r"^│ (\w+) +│ +([\d.e-]+) │$", text, re.MULTILINE)
    }


def test_without_patience_the_last_epoch_is_shown(run: Any, overfit: Path) -> None:
    result = train(run, overfit, "--validation", overfit / "other.npz", "--epochs", 20)
    values = shown(result.out)
    assert values["loss"] == pytest.approx(loss_of_file(overfit, "data"), rel=1e-4)
    assert values["val_loss"] == pytest.approx(loss_of_file(overfit, "other"), rel=1e-4)
    assert "Exported weights: epoch 20, the last one" in result.out
    losses = [float(loss) for loss in re.findall(r"val_loss ([\d.]+)", result.err)]
    best = int(np.argmin(losses)) + 1
    assert best < 20
    found = re.search(
        r"Validation was best after epoch (\d+) \(val_loss ([\d.]+)\) and is worse after epoch 20 \(([\d.]+)\)",
        result.out,
    )
    assert found is not None
    assert int(found[1]) == best
    assert float(found[3]) == pytest.approx(loss_of_file(overfit, "other"), rel=1e-4)


def test_with_patience_the_best_epoch_is_shown(run: Any, overfit: Path) -> None:
    document = train(
        run, overfit, "--validation", overfit / "other.npz", "--epochs", 20, "--patience", 3, "--json"
    ).json()
    losses = [epoch["val_loss"] for epoch in document["epochs"]]
    exported = document["exported"]
    assert exported["epoch"] == document["best_epoch"] == np.argmin(losses) + 1 < len(losses)
    assert exported["val_loss"] == min(losses)
    assert exported["val_loss"] == pytest.approx(loss_of_file(overfit, "other"), rel=1e-5)
    assert exported["loss"] == pytest.approx(loss_of_file(overfit, "data"), rel=1e-5)
    result = train(run, overfit, "--validation", overfit / "other.npz", "--epochs", 20, "--patience", 3)
    values = shown(result.out)
    assert values["val_loss"] == pytest.approx(exported["val_loss"], rel=1e-4)
    assert (
        f"Exported weights: epoch {exported['epoch']}, of {len(losses)}, with the best val_loss" in result.out
    )
    assert "Validation was best" not in result.out
    more = run("train", overfit / "run", "--data", overfit / "data.npz", "--epochs", 2, "--json").json()
    assert len(losses) < more["exported"]["epoch"] <= len(losses) + 2  # counted over the life of the run


def test_training_values_are_those_of_the_weights_not_of_the_epoch(run: Any, overfit: Path) -> None:
    """With Dropout the mean over an epoch is another number; what was split off for validation is left out."""
    onnx.save(dropout_model(), overfit / "net.onnx")
    size = next(v.type.tensor_type.shape.dim[1].dim_value for v in dropout_model().graph.input)
    x = np.random.default_rng(1).standard_normal((60, size)).astype(np.float32)
    np.savez(overfit / "data.npz", x=x, y=np.arange(60) % 2)
    document = train(run, overfit, "--validation", 0.25, "--epochs", 3, "--json").json()
    whole = run("evaluate", overfit / "run", "--data", overfit / "data.npz", "--json").json()
    exported = document["exported"]
    assert abs(document["epochs"][-1]["loss"] - exported["loss"]) > 1e-4
    assert (45 * exported["loss"] + 15 * exported["val_loss"]) / 60 == pytest.approx(whole["loss"], rel=1e-5)


def test_optimizer_options(run: Any, overfit: Path) -> None:
    assert chosen_optimizer(OptimizerOptions("adamw", None, None)) == AdamW()
    assert chosen_optimizer(OptimizerOptions("adamw", 0.1, ["betas=0.8,0.9", "eps=1e-4"])) == AdamW(
        weight_decay=0.1, betas=(0.8, 0.9), eps=1e-4
    )
    assert chosen_optimizer(OptimizerOptions("sgd", None, ["momentum=0.9", "nesterov=true"])) == SGD(
        momentum=0.9, nesterov=True
    )
    assert chosen_optimizer(
        OptimizerOptions("muon", 0, ["ns_steps=3", "adjust_lr_fn=match_rms_adamw"])
    ) == Muon(weight_decay=0, ns_steps=3, adjust_lr_fn="match_rms_adamw")
    assert chosen_optimizer(OptimizerOptions("adagrad", None, ["initial_accumulator_value=1"])) == Adagrad(
        initial_accumulator_value=1
    )
    assert chosen_optimizer(OptimizerOptions("adafactor", None, ["eps=none,0.1"])).eps == (None, 0.1)
    for arguments, message in (
        (("adamw", None, ["momentum=0.9"]), "adamw has no setting 'momentum'. Its settings and their defaults: "
         "betas=0.9,0.999, eps=1e-08, weight_decay=0.01"),
        (("sgd", None, ["nesterov=1"]), "'nesterov=1' should be true or false"),
        (("sgd", None, ["momentum=high"]), "should be a number"),
        (("muon", None, ["ns_steps=2.5"]), "should be a whole number"),
        (("adamw", None, ["betas=0.9"]), "should be 2 numbers, such as 0.9,0.999"),
        (("adamw", None, ["eps"]), "should be NAME=VALUE"),
        (("adamw", 0.1, ["weight_decay=0.2"]), "--weight-decay 0.1 is given twice"),
        (("sparse_adam", 0.1, None), "--weight-decay 0.1 does not suit sparse_adam, which has none"),
        (("adamw", None, ["betas=0.9,1.5"]), "betas is (0.9, 1.5)"),
        (("nope", None, None), "choosing an optimizer: received 'nope'"),
    ):  # fmt: skip
        with pytest.raises(OnnxTrainError) as error:
            chosen_optimizer(OptimizerOptions(*arguments))  # type: ignore[arg-type]
        assert message in str(error.value)


def test_weight_decay_reaches_the_step(run: Any, overfit: Path) -> None:
    """Beside torch.optim.AdamW, one batch per epoch."""
    x, y = (arrays_in(overfit / "data.npz")[name] for name in ("x", "y"))
    train(
        run,
        overfit,
        "--batch-size",
        24,
        "--epochs",
        5,
        "--weight-decay",
        0.5,
        "--optimizer-option",
        "eps=0.001",
    )
    w = {
        t.name: torch.tensor(onnx.numpy_helper.to_array(t)).double().requires_grad_()
        for t in models.mlp(hidden=64).graph.initializer
    }
    optimizer = torch.optim.AdamW(w.values(), lr=0.05, weight_decay=0.5, eps=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        logits = torch.tanh(torch.tensor(x).double() @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]
        functional.cross_entropy(logits, torch.tensor(y)).backward()
        optimizer.step()
    trained = {
        t.name: onnx.numpy_helper.to_array(t)
        for t in onnx.load(overfit / "run" / "trained.onnx").graph.initializer
    }
    for name, value in w.items():
        np.testing.assert_allclose(trained[name], value.detach(), rtol=1e-3, atol=1e-5)
    again = run("train", overfit / "run", "--data", overfit / "data.npz", "--weight-decay", 0.1)
    assert "--weight-decay 0.1 (it was 0.5)" in again.err
