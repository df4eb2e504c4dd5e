"""Stopping and going on is bit-equal to not having stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtrain import Callback, CheckpointState, EarlyStopping, ReduceLROnPlateau, Trainer
from onnxtrain.errors import CheckpointError, InputError
from trainer import problems


class InterruptAt(Callback):
    """Presses Ctrl-C in a given step."""

    def __init__(self, step: int) -> None:
        self.left = step

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def state(trainer: Trainer) -> dict[str, Any]:
    """Everything that training changes."""
    store = trainer.state._store
    tensors = {f"parameter/{name}": p.data.tobytes() for name, p in trainer.parameters}
    tensors |= {f"statistic/{name}": p.data.tobytes() for name, p in trainer.state.statistics}
    tensors |= {
        f"{m}/{name}": b.read().tobytes() for m, group in store.moments.items() for name, b in group.items()
    }
    return {**tensors, "optimizer": vars(store.optimizer), "rate": trainer.learning_rate}


def make_trainer(problem: problems.Problem, directory: Path | None = None) -> Trainer:
    return Trainer(
        problem.model,
        problem.loss,
        learning_rate=1e-2,
        scheduler="cosine",
        warmup_steps=3,
        directory=directory,
    )


FIT: dict[str, Any] = {"epochs": 5, "batch_size": 8, "accumulate": 2, "validation": 0.2, "verbose": False}


def callbacks() -> list[Callback]:
    return [ReduceLROnPlateau("loss", patience=1, min_delta=0.05), EarlyStopping("val_loss", patience=4)]


@pytest.mark.parametrize("make", [problems.classes, problems.images], ids=["mlp", "batch-norm"])
@pytest.mark.parametrize("step", [1, 2, 3, 6, 7])
def test_interrupt_and_resume_is_bit_equal(make: Any, step: int, tmp_path: Path) -> None:
    problem = make()
    straight = make_trainer(problem)
    straight.fit(problem.x, problem.y, callbacks=callbacks(), **FIT)

    stopped = make_trainer(problem, tmp_path / "run")
    history = stopped.fit(problem.x, problem.y, callbacks=[*callbacks(), InterruptAt(step)], **FIT)
    assert history.stopped == "interrupted"
    assert len(history) < 5
    del stopped

    resumed = Trainer.resume(tmp_path / "run")
    assert resumed.resumes_fit
    history = resumed.fit(problem.x, problem.y, callbacks=callbacks(), **FIT)
    assert state(resumed) == state(straight)
    assert history == straight.history
    assert not resumed.resumes_fit


def test_same_process_goes_on_too() -> None:
    problem = problems.classes()
    straight = make_trainer(problem)
    straight.fit(problem.x, problem.y, **FIT)
    stopped = make_trainer(problem)
    stopped.fit(problem.x, problem.y, callbacks=[InterruptAt(4)], **FIT)
    history = stopped.fit(problem.x, problem.y, **FIT)
    assert state(stopped) == state(straight)
    assert history == straight.history


def test_saved_between_fits(tmp_path: Path) -> None:
    problem = problems.classes()
    straight = Trainer(problem.model, problem.loss)
    straight.fit(problem.x, problem.y, epochs=3, verbose=False)
    first = Trainer(problem.model, problem.loss)
    first.fit(problem.x, problem.y, epochs=1, verbose=False)
    first.save(tmp_path / "saved")
    second = Trainer.resume(tmp_path / "saved")
    np.testing.assert_array_equal(second.predict(problem.x), first.predict(problem.x))
    second.fit(problem.x, problem.y, epochs=2, verbose=False)
    assert state(second) == state(straight)
    assert second.history == straight.history


def test_second_interrupt_is_immediate() -> None:
    class Twice(Callback):
        def on_step_end(self, trainer: Trainer, loss: float) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    problem = problems.classes()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(problem).fit(problem.x, problem.y, callbacks=[Twice()], verbose=False)
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupted_temporary_run_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss)
    finished = trainer.directory
    trainer.fit(problem.x, problem.y, verbose=False)
    del trainer
    assert not finished.exists()

    trainer = Trainer(problem.model, problem.loss)
    trainer.fit(problem.x, problem.y, epochs=3, callbacks=[InterruptAt(1)])
    kept = trainer.directory
    assert f"Trainer.resume('{kept}')" in capsys.readouterr().err
    del trainer
    assert Trainer.resume(kept).resumes_fit
    for path in kept.iterdir():
        path.unlink()
    kept.rmdir()


def test_directory_is_saved_after_every_epoch(tmp_path: Path) -> None:
    problem = problems.classes()
    steps = []

    class Look(Callback):
        def on_fit_end(self, trainer: Trainer, history: Any) -> None:
            steps.append(CheckpointState.load_checkpoint(tmp_path / "checkpoint")._store.optimizer.step)

    trainer = Trainer(problem.model, problem.loss, directory=tmp_path)
    trainer.fit(problem.x, problem.y, epochs=2, batch_size=20, callbacks=[Look()], verbose=False)
    assert steps == [6]


def test_other_data_in_the_middle_of_an_epoch_is_refused(tmp_path: Path) -> None:
    problem = problems.classes()
    trainer = make_trainer(problem, tmp_path)
    trainer.fit(problem.x, problem.y, callbacks=[InterruptAt(1)], **FIT)
    with pytest.raises(InputError, match="interrupted in the middle of epoch 1"):
        Trainer.resume(tmp_path).fit(problem.x, problem.y, epochs=5, batch_size=4, verbose=False)


def test_functions_have_to_be_passed_again(tmp_path: Path) -> None:
    def bias(prediction: np.ndarray, target: np.ndarray) -> float:
        return float((prediction - target).mean())

    problem = problems.line()
    trainer = Trainer(
        problem.model, "mse", metrics=["mae", bias], scheduler=lambda s, t: 1.0, directory=tmp_path
    )
    trainer.fit(problem.x, problem.y, verbose=False)
    with pytest.raises(InputError, match="metrics included a function"):
        Trainer.resume(tmp_path)
    with pytest.raises(InputError, match="scheduler included a function"):
        Trainer.resume(tmp_path, metrics=["mae", bias])
    resumed = Trainer.resume(tmp_path, metrics=["mae", bias], scheduler=lambda s, t: 1.0)
    assert resumed.history == trainer.history


def test_directory_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    problem = problems.line()
    Trainer(problem.model, "mse", directory=tmp_path)
    with pytest.raises(CheckpointError, match=r"holds a training run already. Go on with Trainer.resume"):
        Trainer(problem.model, "mse", directory=tmp_path)


def test_resume_from_nothing_and_from_damage(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no file 'checkpoint'"):
        Trainer.resume(tmp_path)
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", directory=tmp_path / "run")
    trainer.fit(problem.x, problem.y, verbose=False)
    trainer.state.properties["onnxtrain.trainer"] = '{"version": 9}'
    CheckpointState.save_checkpoint(
        trainer.state, tmp_path / "run" / "checkpoint", include_optimizer_state=True
    )
    with pytest.raises(CheckpointError, match="not a trainer's state"):
        Trainer.resume(tmp_path / "run")


def test_resume_trains_plain_artifacts(tmp_path: Path) -> None:
    from onnxtrain import generate_artifacts

    problem = problems.classes(samples=200)
    generate_artifacts(
        problem.model,
        loss=problem.loss,
        optimizer="adamw",
        artifact_directory=tmp_path,
        additional_output_names=["logits"],
    )
    trainer = Trainer.resume(tmp_path)
    trainer.learning_rate = 2e-2
    history = trainer.fit(problem.x, problem.y, epochs=10, verbose=False)
    assert history.last["accuracy"] > 0.9
