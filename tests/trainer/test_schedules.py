"""The schedule of a trainer: one per fit, or one over several; saved with the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxtrain import History, ReduceLROnPlateau, Trainer
from onnxtrain.api import CheckpointState
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.schedules import MultiStep, OneCycle, Step
from trainer import problems
from trainer.problems import AtEachStep
from trainer.test_resume import InterruptAt, state


def each_rate() -> AtEachStep:
    return AtEachStep(lambda trainer, _: trainer.current_learning_rate)


FIT: dict[str, Any] = {"batch_size": 16, "validation": 0.2, "verbose": False}  # 3 batches


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("options", [{}, {"warmup_steps": 4}, {"warmup_ratio": 0.3}], ids=str)
@pytest.mark.parametrize("scheduler", ["one_cycle", "cosine", Step(3, 0.5)], ids=str)
@pytest.mark.parametrize("how", ["schedule_epochs", "total_steps"])
def test_two_fits_of_five_epochs_are_one_of_ten(how: str, scheduler: Any, options: dict[str, Any]) -> None:
    problem = problems.images()
    straight = Trainer(problem.model, problem.loss, learning_rate=1e-2, scheduler=scheduler, **options)
    straight.fit(problem.x, problem.y, epochs=10, **FIT)
    of_trainer = {"total_steps": 20} if how == "total_steps" else {}  # 24 samples are two steps
    of_fit = {"schedule_epochs": 10} if how == "schedule_epochs" else {}
    twice = Trainer(
        problem.model, problem.loss, learning_rate=1e-2, scheduler=scheduler, **options, **of_trainer
    )
    for _ in range(2):
        twice.fit(problem.x, problem.y, epochs=5, **of_fit, **FIT)
    assert state(twice) == state(straight)
    assert twice.history == straight.history


@pytest.mark.parametrize("how", ["schedule_epochs", "total_steps"])
def test_resumed_between_and_within_fits(how: str, tmp_path: Path) -> None:
    problem = problems.classes()
    options: dict[str, Any] = {"scheduler": OneCycle(pct_start=0.2, div_factor=7.0), "learning_rate": 0.02}
    straight = Trainer(problem.model, problem.loss, **options)
    straight.fit(problem.x, problem.y, epochs=6, **FIT)
    of_trainer = {"total_steps": 18} if how == "total_steps" else {}
    of_fit = {"schedule_epochs": 6} if how == "schedule_epochs" else {}
    first = Trainer(problem.model, problem.loss, **options, **of_trainer, directory=tmp_path / "run")
    first.fit(problem.x, problem.y, epochs=2, **of_fit, **FIT)
    second = Trainer.resume(tmp_path / "run")
    second.fit(problem.x, problem.y, epochs=4, callbacks=[InterruptAt(5)], **of_fit, **FIT)
    third = Trainer.resume(tmp_path / "run")
    assert third.resumes_fit
    third.fit(problem.x, problem.y, epochs=4, **of_fit, **FIT)
    assert state(third) == state(straight)
    assert third.history == straight.history


def test_without_it_each_fit_has_its_own() -> None:
    problem = problems.line()
    rates = each_rate()
    trainer = Trainer(problem.model, "mse", learning_rate=0.1, scheduler="linear")
    for _ in range(2):
        trainer.fit(problem.x, problem.y, epochs=2, batch_size=20, callbacks=[rates], verbose=False)
    np.testing.assert_allclose(rates.seen, [0.1, 0.075, 0.05, 0.025] * 2, rtol=1e-6)


def test_milestones_are_epochs_of_the_fit() -> None:
    problem = problems.line()
    rates = each_rate()
    trainer = Trainer(problem.model, "mse", learning_rate=0.1, scheduler=MultiStep([1, 2]), warmup_steps=2)
    trainer.fit(problem.x, problem.y, epochs=3, batch_size=20, callbacks=[rates], verbose=False)
    np.testing.assert_allclose(rates.seen, [0.05, 0.1, 0.01, 0.01, 0.001, 0.001], rtol=1e-6)


def test_a_schedule_too_short_for_the_fit() -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", scheduler="cosine")
    trainer.fit(problem.x, problem.y, epochs=2, schedule_epochs=3, verbose=False)
    with pytest.raises(
        InputError, match=r"schedule_epochs=3 is the total .* at least 4, the last epoch of this call"
    ):
        trainer.fit(problem.x, problem.y, epochs=2, schedule_epochs=3, verbose=False)
    both = Trainer(problem.model, "mse", scheduler="cosine", total_steps=10)
    with pytest.raises(InputError, match="already has total_steps"):
        both.fit(problem.x, problem.y, schedule_epochs=3, verbose=False)
    with pytest.raises(InputError, match="total_steps must be an integer >= 1, received 0"):
        Trainer(problem.model, "mse", total_steps=0)


def test_damaged_parameters_are_errors(tmp_path: Path) -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", scheduler=Step(2), directory=tmp_path)
    trainer.fit(problem.x, problem.y, verbose=False)
    text = str(trainer.state.properties["onnxtrain.trainer"])
    trainer.state.properties["onnxtrain.trainer"] = text.replace('"step_size": 2', '"step_size": 0')
    CheckpointState.save_checkpoint(trainer.state, tmp_path / "checkpoint", include_optimizer_state=True)
    with pytest.raises(CheckpointError, match="its schedule cannot be restored"):
        Trainer.resume(tmp_path)


def test_more_steps_than_the_schedule_has(caplog: pytest.LogCaptureFixture) -> None:
    problem = problems.line()
    rates = each_rate()
    trainer = Trainer(problem.model, "mse", learning_rate=0.1, scheduler="linear", total_steps=4)
    trainer.fit(problem.x, problem.y, epochs=2, batch_size=20, callbacks=[rates], verbose=False)
    assert not caplog.records
    trainer.fit(problem.x, problem.y, batch_size=20, callbacks=[rates], verbose=False)
    assert "The schedule has total_steps=4, but this fit ends with step 6" in caplog.text
    np.testing.assert_allclose(rates.seen, [0.1, 0.075, 0.05, 0.025, 0.0, 0.0], rtol=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("patience", [1, 2, 4])
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("min_delta", [0.0, 0.05])
def test_plateau_is_that_of_pytorch(patience: int, mode: Any, min_delta: float) -> None:
    """Whose patience is one less: it lowers the rate when it has been exceeded."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode, 0.3, patience - 1, min_delta, "abs", min_lr=1e-3, eps=0.0
    )
    ours = ReduceLROnPlateau("loss", 0.3, patience, 1e-3, min_delta, mode)
    history = History()
    trainer: Any = SimpleNamespace(history=history, fit_start=0, learning_rate=1.0, metrics=[])
    values = np.random.default_rng(0).random(40) * np.linspace(1.0, 0.6, 40)
    for epoch, value in enumerate(values if mode == "min" else -values, start=1):
        history.epochs.append({"epoch": epoch, "loss": float(value)})
        ours.on_epoch_end(trainer, history)
        reference.step(float(value))
        assert trainer.learning_rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    assert trainer.learning_rate < 1.0
