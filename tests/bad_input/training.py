"""Wrong calls of `Trainer`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import models
from bad_input.bench import Bench, X, Y, case, cases
from onnxtrain import Callback, Trainer
from onnxtrain.api import CheckpointState
from onnxtrain.errors import DivergenceError


def trainer(bench: Bench, **options: Any) -> Trainer:
    return Trainer(models.mlp(), "cross_entropy", "sgd", directory=bench.directory / "trainer", **options)


cases(
    {
        "learning rate of a trainer is NaN": lambda b: trainer(b, learning_rate=float("nan")),
        "name of an input is unknown": lambda b: trainer(b).fit({"z": X}, Y, verbose=False),
        "data has the wrong number of inputs": lambda b: trainer(b).fit({"x": X, "z": X}, Y, verbose=False),
        "data has the wrong shape": lambda b: trainer(b).fit(X[:, :3], Y, verbose=False),
        "data has the wrong dtype": lambda b: trainer(b).fit(X.astype("U"), Y, verbose=False),
        "samples and targets differ in number": lambda b: trainer(b).fit(X, Y[:3], verbose=False),
        "class label in the data is out of range": lambda b: trainer(b).fit(X, Y + 1, verbose=False),
        "targets are missing": lambda b: trainer(b).fit(X, verbose=False),
        "schedule does not return a number": lambda b: trainer(b, scheduler=lambda step, total: "0.5").fit(
            X, Y, verbose=False
        ),
        "`fit` is already running": lambda b: trainer(b).fit(X, Y, callbacks=[_Again()], verbose=False),
    }
)


@case("run cannot be saved")
def _(bench: Bench) -> None:
    (bench.directory / "afile").touch()
    trainer(bench).save("afile")


@case("run is saved under the name of a model")
def _(bench: Bench) -> None:
    trainer(bench).save("trained.onnx")


@case("directory contains other files with the names of a run's files")
def _(bench: Bench) -> None:
    (bench.directory / "mine").mkdir()
    (bench.directory / "mine" / "best").touch()
    Trainer(models.mlp(), "cross_entropy", directory=bench.directory / "mine")


@case("manifest.json of a different program")
def _(bench: Bench) -> None:
    (bench.directory / "app").mkdir()
    (bench.directory / "app" / "manifest.json").write_text("{}")
    Trainer(models.mlp(), "cross_entropy", directory=bench.directory / "app", overwrite=True)


@case("file of a run is a symbolic link to a file outside")
def _(bench: Bench) -> None:
    trainer(bench)
    path = bench.directory / "trainer" / "checkpoint"
    path.rename(bench.directory / "elsewhere")
    path.symlink_to(bench.directory / "elsewhere")
    Trainer.resume(bench.directory / "trainer")


@case("file of a run is a pipe")
def _(bench: Bench) -> None:
    trainer(bench)
    path = bench.directory / "trainer" / "eval_model.onnx"
    path.unlink()
    os.mkfifo(path)
    Trainer.resume(bench.directory / "trainer")


@case("lock file of a directory is a symbolic link")
def _(bench: Bench) -> None:
    run = trainer(bench)
    (bench.directory / "trainer" / ".onnxtrain-lock").symlink_to(bench.directory / "elsewhere")
    run.fit(X, Y, verbose=False)


@case("loss becomes NaN or infinite")
def _(bench: Bench) -> None:
    """It is raised once, and the state before the step is in the trainer's directory, complete and finite."""
    model = models.make_model(
        [models.helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        {"x": ["n", 4]},
        {"y": ["n", 1]},
        {"w": np.ones((4, 1), np.float32), "b": np.zeros(1, np.float32)},
    )
    run = Trainer(model, "mse", "sgd", learning_rate=1e4, directory=bench.directory / "trainer")
    try:
        run.fit(X, X[:, :1], epochs=100, verbose=False)
    except DivergenceError:
        state = CheckpointState.load_checkpoint(bench.directory / "trainer" / "checkpoint")
        for name, parameter in state.parameters:
            assert np.isfinite(parameter.data).all(), name
            assert np.array_equal(parameter.data, run.parameters[name].data), name
        raise


class _Again(Callback):
    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        trainer.fit(X, Y, verbose=False)


class _Beside(Callback):
    def __init__(self, other: Trainer) -> None:
        self.other = other

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        self.other.fit(X, Y, verbose=False)


@case("two trainers in one directory")
def _(bench: Bench) -> None:
    run = trainer(bench)
    run.save(run.directory)
    run.fit(X, Y, callbacks=[_Beside(Trainer.resume(run.directory))], verbose=False)


@case("another trainer has saved to the directory")
def _(bench: Bench) -> None:
    run = trainer(bench)
    run.save(run.directory)
    Trainer.resume(run.directory).fit(X, Y, verbose=False)
    run.fit(X, Y, verbose=False)
