"""`onnxtrain inspect` of a run: what was trained on what, its best epoch, its files, and what to do next."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest

import models
from cli.files import arrays_in
from cli.test_resuming import InterruptAt
from onnxtrain import Trainer
from onnxtrain.cli._inspect_run import best_key

OPTIONS = [
    "--loss",
    "cross_entropy",
    "--lr",
    0.1,
    "--epochs",
    6,
    "--validation",
    0.25,
    "--schedule",
    "linear",
]


def shown(text: str) -> dict[str, str]:
    """The names and values of the table with a frame."""
    return dict(re.findall(r"^│ (.+?) +│ +(.+?) │$", text, re.MULTILINE))


def test_a_finished_run(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    options = [*OPTIONS, "--freeze", "w1", "--save-every", 10, "--metric", "accuracy"]
    trained = run("train", mlp, "--data", data, *options, "-o", tmp_path / "run", "--json").json()
    result = run("inspect", tmp_path / "run")
    assert result.code == 0, result.err
    rows = shown(result.out)
    assert rows["model"] == str(mlp)
    assert rows["data"] == str(data)
    assert rows["trained parameters"] == "35 of 67"
    assert rows["loss"] == "CrossEntropyLoss"
    assert rows["optimizer"].startswith("AdamW, learning rate 0.1, linear")
    assert rows["samples"] == "150, and 0.25 of all to validate with, in batches of 32"
    assert rows["progress"] == "finished, 6 epochs"
    assert rows["steps"] == str(6 * 5)
    values = [epoch["val_loss"] for epoch in trained["epochs"]]
    best = 1 + int(np.argmin(values))
    assert f"best epoch: {best}, by val_loss" in result.out
    assert "last epoch: 6" in result.out
    line = re.search(r"^ val_loss +(\S+) +(\S+)$", result.out, re.MULTILINE)
    assert line is not None
    assert line.groups() == (f"{min(values):.5g}", f"{values[-1]:.5g}")
    size = (tmp_path / "run" / "trained.onnx").stat().st_size
    assert re.search(
        rf"^ trained.onnx +{size:,} +trained model, for any ONNX Runtime$", result.out, re.MULTILINE
    )
    assert re.search(r"^ checkpoints +[\d,]+ +checkpoints of --save-every$", result.out, re.MULTILINE)
    # Parameters on request alone.
    assert "float32" not in result.out
    assert re.search(r"^ w1 +float32 ", run("inspect", tmp_path / "run", "--parameters").out, re.MULTILINE)


def test_its_commands_run(
    run: Any, mlp: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("train", mlp, "--data", data, *OPTIONS, "-o", tmp_path / "run").code == 0
    monkeypatch.chdir(tmp_path)
    document = run("inspect", tmp_path / "run", "--json").json()
    commands = document["run"]["next"]
    assert next(iter(commands)) == "train further"
    assert len(commands) == 5
    printed = run("inspect", tmp_path / "run").out
    for purpose, command in commands.items():
        assert f"{purpose}: {command}" in printed
        words = shlex.split(command.replace("FILE", str(data)).replace("-o DIR", "-o again"))
        assert words[0] == "onnxtrain"
        result = run(*words[1:])
        assert result.code == 0, (command, result.err)


def test_an_interrupted_run(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    arrays = arrays_in(data)
    trainer = Trainer(mlp, "cross_entropy", directory=tmp_path / "run")
    trainer.fit(
        arrays["x"], arrays["y"], epochs=4, validation=(arrays["x"], arrays["y"]), callbacks=[InterruptAt(9)],
        verbose=False,
    )  # fmt: skip
    result = run("inspect", tmp_path / "run")
    rows = shown(result.out)
    assert rows["progress"] == "interrupted after 1 of 4 epochs and 2 batches"
    assert rows["samples"] == "200, and 200 others to validate with, in batches of 32"
    # Python writes no file of options: neither the model nor the data is known.
    assert "model" not in rows
    assert f"finish the interrupted training: onnxtrain train {tmp_path / 'run'} --data FILE" in result.out
    assert "repeat the run" not in result.out


def test_a_run_on_a_table(run: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60).round(3), "b": rng.choice(["x", "y", "z"], 60)})
    frame["y"] = np.where(frame["a"] > 0, "yes", "no")
    frame.to_csv(tmp_path / "t.csv", index=False)
    onnx.save(models.mlp(features=4, classes=2), tmp_path / "net.onnx")
    command = ("train", tmp_path / "net.onnx", "--data", tmp_path / "t.csv", "--target", "y", "--one-hot")
    command = (
        *command,
        "--metric",
        "f1",
        "--save-best",
        "--monitor",
        "val_f1_macro",
        "--loss",
        "cross_entropy",
    )
    trained = run(
        *command, "--validation", 0.3, "--lr", 0.1, "--epochs", 5, "-o", tmp_path / "run", "--json"
    ).json()
    result = run("inspect", tmp_path / "run")
    rows = shown(result.out)
    assert (rows["target"], rows["classes"]) == ("y", "no, yes")
    assert re.search(r"^ a +number$", result.out, re.MULTILINE)
    assert re.search(r"^ b +3 categories, one-hot$", result.out, re.MULTILINE)
    assert f"best epoch: {trained['exported']['epoch']}, by val_f1_macro" in result.out


def test_artifacts_of_a_trainer_that_has_not_trained(run: Any, mlp: Path, tmp_path: Path) -> None:
    trainer = Trainer(mlp, "cross_entropy", directory=tmp_path / "run")
    trainer.save(tmp_path / "run")
    result = run("inspect", tmp_path / "run")
    assert result.code == 0, result.err
    assert shown(result.out)["progress"] == "not trained yet"


def test_a_damaged_record_is_one_message_and_a_damaged_file_of_options_none(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    assert run("train", mlp, "--data", data, *OPTIONS, "-o", tmp_path / "run").code == 0
    (tmp_path / "run" / "run.toml").write_bytes(b"\xff = [")
    rows = shown(run("inspect", tmp_path / "run").out)
    assert "model" not in rows
    trainer = Trainer.resume(tmp_path / "run")
    trainer.state.properties["onnxtrain.cli"] = "no JSON"
    trainer.save(tmp_path / "run")
    assert run("inspect", tmp_path / "run").code == 0
    trainer.state.properties["onnxtrain.table"] = json.dumps({"version": 9})
    trainer.save(tmp_path / "run")
    damaged = run("inspect", tmp_path / "run")
    assert damaged.code == 1
    assert "is not an encoding of a table (version 9)" in damaged.err


def test_the_best_epoch_is_that_of_a_value_of_every_epoch() -> None:
    epochs = [{"epoch": 1.0, "loss": 0.5}, {"epoch": 2.0, "loss": 0.4, "val_loss": 0.6}]
    assert best_key("val_f1", epochs) == "loss"
    assert best_key(None, []) is None
