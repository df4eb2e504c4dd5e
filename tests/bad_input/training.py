"""Wrong calls of `Trainer`."""

from __future__ import annotations

from typing import Any

import numpy as np

import models
from bad_input.bench import Bench, X, Y, case
from onnxtrain import Callback, Trainer
from onnxtrain.api import CheckpointState
from onnxtrain.errors import DivergenceError


def trainer(bench: Bench, **options: Any) -> Trainer:
    return Trainer(models.mlp(), "cross_entropy", "sgd", directory=bench.directory / "trainer", **options)


@case("learning rate of a trainer is NaN")
def _(bench: Bench) -> None:
    trainer(bench, learning_rate=float("nan"))


@case("name of an input is unknown")
def _(bench: Bench) -> None:
    trainer(bench).fit({"z": X}, Y, verbose=False)


@case("data has the wrong number of inputs")
def _(bench: Bench) -> None:
    trainer(bench).fit({"x": X, "z": X}, Y, verbose=False)


@case("data has the wrong shape")
def _(bench: Bench) -> None:
    trainer(bench).fit(X[:, :3], Y, verbose=False)


@case("data has the wrong dtype")
def _(bench: Bench) -> None:
    trainer(bench).fit(X.astype("U"), Y, verbose=False)


@case("samples and targets differ in number")
def _(bench: Bench) -> None:
    trainer(bench).fit(X, Y[:3], verbose=False)


@case("class label in the data is out of range")
def _(bench: Bench) -> None:
    trainer(bench).fit(X, Y + 1, verbose=False)


@case("targets are missing")
def _(bench: Bench) -> None:
    trainer(bench).fit(X, verbose=False)


@case("a run cannot be saved")
def _(bench: Bench) -> None:
    (bench.directory / "afile").touch()
    trainer(bench).save("afile")


@case("schedule gives no number")
def _(bench: Bench) -> None:
    trainer(bench, scheduler=lambda step, total: "0.5").fit(X, Y, verbose=False)


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


@case("a fit inside of a fit, or in another thread")
def _(bench: Bench) -> None:
    trainer(bench).fit(X, Y, callbacks=[_Again()], verbose=False)


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


@case("another trainer has saved to the directory since")
def _(bench: Bench) -> None:
    run = trainer(bench)
    run.save(run.directory)
    Trainer.resume(run.directory).fit(X, Y, verbose=False)
    run.fit(X, Y, verbose=False)
