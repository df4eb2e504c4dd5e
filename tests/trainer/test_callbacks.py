"""Callbacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxtrain import Callback, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau, Trainer
from onnxtrain.errors import InputError
from trainer import problems


def overfitting() -> tuple[Trainer, dict]:
    """A net and few samples with random labels: the validation loss soon rises."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((24, 4)).astype(np.float32), rng.integers(0, 3, 24)
    trainer = Trainer(problems.classes().model, "cross_entropy", learning_rate=0.05)
    data = {"inputs": x[:16], "targets": y[:16], "validation": (x[16:], y[16:]), "verbose": False}
    return trainer, data


def test_early_stopping_waits_and_restores_the_best() -> None:
    trainer, data = overfitting()
    history = trainer.fit(**data, epochs=100, callbacks=[EarlyStopping(patience=4, restore_best=True)])
    losses = history["val_loss"]
    best = int(np.argmin(losses))
    assert history.stopped == "early"
    assert len(losses) == best + 5
    assert trainer.evaluate(*data["validation"])["loss"] == pytest.approx(losses[best], rel=1e-6)
    assert losses[-1] > losses[best]


def test_early_stopping_without_improvement_by_min_delta() -> None:
    trainer, data = overfitting()
    trainer.learning_rate = 0.0
    history = trainer.fit(**data, epochs=100, callbacks=[EarlyStopping("loss", patience=3)])
    assert len(history) == 4


def test_accuracy_counts_upwards() -> None:
    problem = problems.classes(samples=200)
    trainer = Trainer(problem.model, problem.loss, learning_rate=1e-2)
    history = trainer.fit(
        problem.x, problem.y, epochs=6, callbacks=[EarlyStopping("accuracy", patience=2)], verbose=False
    )
    assert history.stopped is None
    assert history["accuracy"][-1] > history["accuracy"][0]


def test_reduce_on_plateau() -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", "sgd", learning_rate=1e-12)
    callback = ReduceLROnPlateau("loss", factor=0.5, patience=2, min_lr=3e-13)
    history = trainer.fit(
        problem.x, problem.y, epochs=8, batch_size=40, shuffle=False, callbacks=[callback], verbose=False
    )
    expected = [1e-12] * 3 + [5e-13] * 2 + [3e-13] * 3
    np.testing.assert_allclose(history["learning_rate"], expected)


def test_model_checkpoint_keeps_the_best(tmp_path: Path) -> None:
    trainer, data = overfitting()
    history = trainer.fit(**data, epochs=30, callbacks=[ModelCheckpoint(tmp_path / "best")])
    best = int(np.argmin(history["val_loss"]))
    saved = Trainer.resume(tmp_path / "best")
    assert len(saved.history) == best + 1
    assert saved.evaluate(*data["validation"])["loss"] == pytest.approx(history["val_loss"][best], rel=1e-6)


def test_model_checkpoint_after_every_epoch(tmp_path: Path) -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss)
    trainer.fit(problem.x, problem.y, epochs=3, callbacks=[ModelCheckpoint(tmp_path, None)], verbose=False)
    saved = Trainer.resume(tmp_path)
    assert len(saved.history) == 3
    assert not saved.resumes_fit


def test_order_of_calls() -> None:
    calls: list[str] = []

    class Log(Callback):
        def on_fit_begin(self, trainer: Trainer) -> None:
            calls.append("begin")

        def on_step_end(self, trainer: Trainer, loss: float) -> None:
            calls.append("step")

        def on_epoch_end(self, trainer: Trainer, history: object) -> None:
            calls.append("epoch")
            if calls.count("epoch") == 2:
                trainer.stop_training()

        def on_fit_end(self, trainer: Trainer, history: object) -> None:
            calls.append("end")

    problem = problems.line(samples=10)
    trainer = Trainer(problem.model, "mse")
    history = trainer.fit(problem.x, problem.y, epochs=9, batch_size=5, callbacks=[Log()], verbose=False)
    assert calls == ["begin", "step", "step", "epoch", "step", "step", "epoch", "end"]
    assert history.stopped == "early"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping(patience=0), "patience must be an integer >= 1"),
        (lambda: EarlyStopping(mode="down"), "mode must be 'auto', 'min' or 'max'"),
        (lambda: ReduceLROnPlateau(factor=2.0), "expected 0 < factor < 1"),
    ],
)
def test_bad_settings(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


def test_monitor_that_is_not_recorded() -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse")
    with pytest.raises(
        InputError, match="'val_loss' will not be recorded in this fit, which records loss, mae, rmse"
    ):
        trainer.fit(problem.x, problem.y, callbacks=[EarlyStopping()], verbose=False)
