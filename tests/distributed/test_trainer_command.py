"""`onnxtrain train --workers` gives what the command gives in one process."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import fresh_process
from trainer.problems import classes

pytestmark = pytest.mark.torch


def train(folder: Path, *arguments: str, code: int = 0) -> Any:
    """Runs the command in a folder; returns its JSON document, or what it wrote to standard error."""
    # A shell may be inside of a job of SLURM, whose variables would make it a worker.
    done = fresh_process.python("-m", "onnxtrain", "train", *arguments, "--json", code=code, cwd=folder)
    return done.stderr if code else json.loads(done.stdout)


def weights(path: Path) -> list[np.ndarray[Any, Any]]:
    tensors = [onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer]
    # The names of the classes are texts.
    return [tensor for tensor in tensors if tensor.dtype.kind == "f"]


def test_workers_give_the_model_of_one_process(tmp_path: Path) -> None:
    """A table with a validation set, best parameters and sharded moments; the run is then resumed in one process."""
    problem = classes(90)
    onnx.save(problem.model, tmp_path / "net.onnx")
    lines = [
        "a,b,c,d,labels",
        *(f"{','.join(map(str, x))},{'xyz'[y]}" for x, y in zip(problem.x, problem.y, strict=True)),
    ]
    (tmp_path / "data.csv").write_text("\n".join(lines))
    common = [
        "net.onnx",
        "--data",
        "data.csv",
        "--target",
        "labels",
        "--loss",
        "cross_entropy",
        "--learning-rate",
        "0.01",
    ]
    common += [
        "--epochs",
        "3",
        "--batch-size",
        "16",
        "--validation",
        "0.2",
        "--patience",
        "2",
        "--metric",
        "f1",
    ]
    alone = train(tmp_path, *common, "--output", "alone")
    group = train(
        tmp_path, *common, "--output", "group", "--workers", "2", "--shard-optimizer", "--restarts", "0"
    )
    assert group["directory"] == "group"
    assert [epoch.keys() for epoch in group["epochs"]] == [epoch.keys() for epoch in alone["epochs"]]
    for ours, theirs in zip(group["epochs"], alone["epochs"], strict=True):
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        weights(tmp_path / "group/trained.onnx"), weights(tmp_path / "alone/trained.onnx"), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    further = train(tmp_path, "group", "--data", "data.csv", "--epochs", "1")
    assert len(further["epochs"]) == len(group["epochs"]) + 1
    assert further["epochs"][: len(group["epochs"])] == group["epochs"]


@pytest.mark.thorough
def test_callbacks_and_files_are_those_of_one_process(tmp_path: Path) -> None:
    """Averages of epochs, logs, saves and run.toml are written by one worker, with the content of one process."""
    problem = classes(90)
    onnx.save(problem.model, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=problem.x, labels=problem.y)
    common = (
        "net.onnx --data data.npz --loss cross_entropy --lr 0.01 --epochs 4 --batch-size 16 --validation 0.2 "
        "--swa-start 2 --swa-lr 0.005 --clip-value 0.01 --drop-last --no-shuffle --steps-per-epoch 3 "
        "--save-every 5"
    )
    results = {}
    for name, workers in (("alone", []), ("group", ["--workers", "2", "--restarts", "0"])):
        logs = ["--log", f"{name}.csv", "--tensorboard", f"{name}-logs", "--output", name]
        results[name] = train(tmp_path, *common.split(), *logs, *workers)
    alone, group = results["alone"], results["group"]
    np.testing.assert_allclose(
        list(group["exported"].values()), list(alone["exported"].values()), rtol=1e-5, atol=1e-5
    )
    for ours, theirs in zip(
        weights(tmp_path / "group/trained.onnx"), weights(tmp_path / "alone/trained.onnx"), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    # The second epoch has the rate of --swa-lr, so the averaging did begin.
    assert [epoch["learning_rate"] for epoch in group["epochs"]] == [0.01, 0.005, 0.005, 0.005]
    listed = {name: sorted(path.name for path in (tmp_path / name).rglob("*")) for name in results}
    assert listed["group"] == listed["alone"]
    for end in (".csv", ".steps.csv"):
        rows = {name: (tmp_path / f"{name}{end}").read_text().splitlines() for name in results}
        # A header, and one row per epoch or step.
        assert len(rows["group"]) == len(rows["alone"]) == {".csv": 5, ".steps.csv": 13}[end]
    assert len(list((tmp_path / "group-logs").iterdir())) == 1
    options = {name: tomllib.loads((tmp_path / name / "run.toml").read_text()) for name in results}
    different = {key for key in options["group"] if options["group"][key] != options["alone"].get(key)}
    assert different == {"workers", "restarts", "log", "tensorboard"}
    # The file repeats the run, workers included.
    again = train(tmp_path, "--config", "group/run.toml", "--output", "again")
    assert again["exported"] == group["exported"]


@pytest.mark.thorough
def test_mixed_samples_and_the_best_epoch_on_workers(tmp_path: Path) -> None:
    """Each worker mixes the samples of its share, alike in each run; all export the same best epoch."""
    problem = classes(90)
    onnx.save(problem.model, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=problem.x, y=problem.y)
    common = (
        "net.onnx --data data.npz --loss cross_entropy --lr 0.05 --epochs 4 --batch-size 16 --validation 0.2 "
        "--mixup 0.4 --sam 0.05 --save-best --monitor val_accuracy --seed 3 --workers 2 --restarts 0 --output"
    )
    first, second = (train(tmp_path, *common.split(), name) for name in ("first", "second"))
    assert first["exported"] == second["exported"]
    scores = [epoch["val_accuracy"] for epoch in first["epochs"]]
    assert first["exported"]["val_accuracy"] == max(scores)
    for ours, theirs in zip(
        weights(tmp_path / "first/trained.onnx"), weights(tmp_path / "second/trained.onnx"), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    evaluated = fresh_process.python(
        "-m", "onnxtrain", "evaluate", "first", "--data", "data.npz", cwd=tmp_path
    )
    assert "loss" in evaluated.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard-optimizer"], "--shard-optimizer given without --workers"),
        pytest.param(["--workers", "2", "--loss", "unknown"], "unknown", marks=pytest.mark.thorough),
        (["--workers", "2", "--hosts", "local", "--loss", "mse"], "--json cannot be combined with --hosts"),
    ],
)
def test_a_wrong_command_is_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    problem = classes(20)
    onnx.save(problem.model, tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=problem.x, labels=problem.y)
    error = train(tmp_path, "net.onnx", "--data", "data.npz", *arguments, code=1)
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "net-trained").exists()
