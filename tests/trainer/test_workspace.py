"""The directory of a run, and the threads of its sessions."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import psutil
import pytest

from onnxtrain import EarlyStopping, Trainer
from onnxtrain.errors import CheckpointError, GraphBuildError, InputError
from trainer import problems
from trainer.test_resume import InterruptAt


def old_run(directory: Path) -> Trainer:
    """With all files that a run can have."""
    problem = problems.line()

    def bias(prediction: np.ndarray, target: np.ndarray) -> float:
        return float((prediction - target).mean())

    trainer = Trainer(problem.model, "mse", metrics=[bias], ema_decay=0.9, directory=directory)
    callbacks = [EarlyStopping("loss", restore_best=True), InterruptAt(3)]
    trainer.fit(problem.x, problem.y, epochs=3, batch_size=20, callbacks=callbacks, verbose=False)
    (directory / "notes.txt").write_text("the user's own")
    names = {path.name for path in directory.iterdir()}
    assert {"best", "average", "predictions-1-1.npz", "checkpoint"} <= names
    return trainer


def test_a_run_is_not_overwritten_unless_asked_for(tmp_path: Path) -> None:
    old = old_run(tmp_path)
    problem = problems.classes()
    message = (
        r"Go on with Trainer.resume\('.*'\), choose another directory, or replace the run with overwrite=True"
    )
    with pytest.raises(CheckpointError, match=message):
        Trainer(problem.model, problem.loss, directory=tmp_path)
    assert Trainer.resume(tmp_path, metrics=old.metrics).resumes_fit

    new = Trainer(problem.model, problem.loss, directory=tmp_path, overwrite=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert not {"best", "average", "predictions-1-1.npz"} & names
    assert (tmp_path / "notes.txt").read_text() == "the user's own"
    assert len(Trainer.resume(tmp_path).history) == 0
    new.fit(problem.x, problem.y, epochs=2, verbose=False)
    resumed = Trainer.resume(tmp_path)
    np.testing.assert_array_equal(resumed.predict(problem.x), new.predict(problem.x))


def test_a_run_that_cannot_begin_leaves_the_old_one(tmp_path: Path) -> None:
    old_run(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    problem = problems.classes()
    for arguments, error in (
        ({"requires_grad": ["nothing"]}, GraphBuildError),
        ({"ema_decay": 2.0}, InputError),
    ):
        with pytest.raises(error):
            Trainer(problem.model, problem.loss, directory=tmp_path, overwrite=True, **arguments)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_overwrite_of_nothing(tmp_path: Path) -> None:
    problem = problems.line()
    Trainer(problem.model, "mse", directory=tmp_path / "new", overwrite=True)
    assert (tmp_path / "new" / "checkpoint").is_file()


def threads_of(make: object) -> int:
    """Count the threads that the process has more than before."""
    gc.collect()
    before = psutil.Process().num_threads()
    kept = make()  # type: ignore[operator]
    count = psutil.Process().num_threads() - before
    del kept
    gc.collect()
    return count


def test_threads_are_those_of_all_sessions(tmp_path: Path) -> None:
    """A session of n threads starts n - 1 beside the caller's: training, eval and optimizer model, then prediction."""
    problem = problems.line()

    def make(threads: int, directory: Path | None = None) -> Trainer:
        trainer = Trainer(problem.model, "mse", threads=threads, directory=directory)
        trainer.fit(problem.x, problem.y, verbose=False)
        trainer.predict(problem.x)
        return trainer

    assert threads_of(lambda: make(1)) == 0
    assert threads_of(lambda: make(3, tmp_path)) == 4 * 2
    assert threads_of(lambda: Trainer.resume(tmp_path)) == 3 * 2
    assert threads_of(lambda: Trainer.resume(tmp_path, threads=2)) == 3
    resumed = Trainer.resume(tmp_path, threads=2)
    resumed.save(tmp_path)
    assert threads_of(lambda: Trainer.resume(tmp_path)) == 3


def test_threads_of_the_loss_of_an_incomplete_batch() -> None:
    problem = problems.line(batch=16)

    def make() -> Trainer:
        trainer = Trainer(problem.model, "mse", threads=3)
        trainer.evaluate(problem.x, problem.y)
        return trainer

    assert threads_of(make) == 4 * 2


@pytest.mark.parametrize("threads", [0, -1, True, 1.5])
def test_impossible_numbers_of_threads_are_errors(threads: int) -> None:
    with pytest.raises(InputError, match="threads must be an integer >= 1"):
        Trainer(problems.line().model, "mse", threads=threads)
