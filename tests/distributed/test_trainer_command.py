"""`onnxtrain train --workers` gives what the command gives in one process."""

from __future__ import annotations

import json
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
    """A table with a validation set, best parameters and sharded moments; the run then goes on in one process."""
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard-optimizer"], "--shard-optimizer given without --workers"),
        (["--workers", "2", "--loss", "unknown"], "unknown"),
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
