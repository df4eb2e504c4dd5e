"""The directory of a run, and the threads of its sessions."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from fresh_process import python
from onnxtrain import CSVLogger, EarlyStopping, Trainer
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.errors import CheckpointError, GraphBuildError, InputError
from onnxtrain.trainer import ModelCheckpoint
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
    message = r"Resume with Trainer.resume\('.*'\), choose another directory, or replace the run with overwrite=True"
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


OWN = ("best", "swa", "average", "predictions-1-1.npz", "checkpoint", "training_model.onnx", "manifest.json")


@pytest.mark.parametrize("name", OWN)
def test_a_new_run_takes_no_file_of_the_user(tmp_path: Path, name: str) -> None:
    problem = problems.line()
    (tmp_path / name).write_text("mine")
    (tmp_path / "predictions-test.npz").write_text("mine")
    for begin in (
        lambda: Trainer(problem.model, "mse", directory=tmp_path),
        lambda: Trainer(problem.model, "mse").save(tmp_path),
    ):
        with pytest.raises(CheckpointError, match=rf"contains '{name}', and no manifest.json shows"):
            begin()
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
            name: "mine",
            "predictions-test.npz": "mine",
        }


def test_overwrite_replaces_files_of_the_user_only_by_files_of_the_run(tmp_path: Path) -> None:
    problem = problems.line()
    for name in ("best", "checkpoint", "notes", "predictions-test.npz"):
        (tmp_path / name).write_text("mine")
    trainer = Trainer(problem.model, "mse", directory=tmp_path, overwrite=True)
    trainer.fit(problem.x, problem.y, verbose=False)
    for name in ("best", "notes", "predictions-test.npz"):
        assert (tmp_path / name).read_text() == "mine"
    assert len(Trainer.resume(tmp_path).history) == 1
    trainer.fit(problem.x, problem.y, callbacks=[EarlyStopping("loss", restore_best=True)], verbose=False)
    assert (tmp_path / "best").read_bytes()[:4] != b"mine"


def test_a_manifest_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    problem = problems.line()
    text = '{"name": "My web app", "start_url": "."}'
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"was not written by onnxtrain, and overwrite=True replaces only training runs"
    ):
        Trainer(problem.model, "mse", directory=tmp_path, overwrite=True)
    with pytest.raises(GraphBuildError, match=r"already exists and was not written by onnxtrain"):
        generate_artifacts(problem.model, loss="mse", optimizer="adamw", artifact_directory=tmp_path)
    assert os.listdir(tmp_path) == ["manifest.json"]
    assert (tmp_path / "manifest.json").read_text() == text
    generate_artifacts(
        problem.model, loss="mse", optimizer="adamw", artifact_directory=tmp_path, prefix="net_"
    )
    assert (tmp_path / "manifest.json").read_text() == text


def test_a_run_stays_where_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the working directory has changed everything goes to the first one, as if it had not."""
    import onnx

    problem = problems.line()
    monkeypatch.chdir(tmp_path)
    onnx.save(problem.model, "line.onnx")
    (tmp_path / "other").mkdir()
    trainer = Trainer("line.onnx", "mse", directory="run")
    callbacks = [CSVLogger("log.csv"), ModelCheckpoint("best-run", "loss")]
    monkeypatch.chdir("other")
    trainer.fit(problem.x, problem.y, callbacks=callbacks, verbose=False)
    trainer.fit(problem.x, problem.y, sample_weight=np.ones(len(problem.x), np.float32), verbose=False)
    trainer.predict(problem.x)
    trainer.export("exported.onnx", ["loss"])
    monkeypatch.chdir(tmp_path)
    resumed = Trainer.resume("run")
    monkeypatch.chdir("other")
    assert len(resumed.fit(problem.x, problem.y, epochs=2, verbose=False)) == 4
    assert sorted(os.listdir(tmp_path)) == [
        "best-run",
        "line.onnx",
        "log.csv",
        "log.steps.csv",
        "other",
        "run",
    ]
    assert os.listdir() == ["exported.onnx"]
    saved = Trainer.resume(tmp_path / "run")
    assert len(saved.history) == 4
    np.testing.assert_array_equal(saved.parameters["w"].data, resumed.parameters["w"].data)


FORKED = """
import os, sys
from onnxtrain import Trainer
from trainer.problems import line
problem = line()
trainer = Trainer(problem.model, loss="mse")
trainer.fit(problem.x, problem.y, verbose=False)
if os.fork() == 0:
    import weakref
    weakref.finalize._exitfunc()  # as at the end of sys.exit; onnxruntime itself hangs there in a forked process
    os._exit(0)
os.wait()
trainer.predict(problem.x), trainer.save(sys.argv[1]), trainer.fit(problem.x, problem.y, verbose=False)
print(trainer.directory)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_process_that_ends_leaves_the_run(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    source = Path(sys.modules["onnxtrain"].__file__ or "").parents[1]
    done = python("-W", "ignore::DeprecationWarning", "-c", FORKED, tmp_path / "saved", path=(source, tests))
    assert not Path(done.stdout.strip()).exists()
    assert len(Trainer.resume(tmp_path / "saved").history) == 1


def test_names_of_models_are_no_names_of_runs(tmp_path: Path) -> None:
    problem = problems.line()
    trainer, path = Trainer(problem.model, "mse"), tmp_path / "net.onnx"
    for write, instead in (
        (lambda: trainer.save(path), r"Trainer.export\('.*net.onnx'\) writes the trained model"),
        (lambda: trainer.save_parameters(path), r"Trainer.export\('.*net.onnx'\) writes the trained model"),
        (lambda: ModelCheckpoint(path), r"Trainer.export\('.*net.onnx'\) writes the trained model"),
        (lambda: Trainer(problem.model, "mse", directory=path), "that is a model file's name"),
    ):
        with pytest.raises(InputError, match=instead):
            write()
    assert not list(tmp_path.iterdir())
