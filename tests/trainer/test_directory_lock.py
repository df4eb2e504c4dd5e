"""One trainer at a time in a directory, and nothing that a failed save leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxtrain
from onnxtrain import Trainer
from onnxtrain.errors import CheckpointError
from onnxtrain.trainer import Callback, ModelCheckpoint
from trainer.problems import AtEachStep, line

LINE = line()
LOCK = ".onnxtrain-lock"


def fit(trainer: Trainer, *callbacks: Callback) -> None:
    trainer.fit(LINE.x, LINE.y, batch_size=20, callbacks=callbacks, verbose=False)


def test_a_second_trainer_in_a_directory_is_an_error_while_the_first_one_trains(tmp_path: Path) -> None:
    path = tmp_path / "run"
    trainer, elsewhere = Trainer(LINE.model, "mse", directory=path), Trainer(LINE.model, "mse")
    trainer.save(path)
    other = Trainer.resume(path)
    seen: list[str] = []

    def disturb() -> None:
        for work in (
            lambda: fit(other),
            lambda: other.save(path),
            lambda: elsewhere.save(path),
            lambda: Trainer(LINE.model, "mse", directory=path, overwrite=True),
        ):
            with pytest.raises(
                CheckpointError, match=rf"process {os.getpid()}\) is training or saving in the dir"
            ):
                work()
        seen.append((path / LOCK).read_text())
        other.predict(LINE.x)  # to look on is no harm
        trainer.save(path)

    fit(trainer, AtEachStep(lambda *_: disturb()))
    assert seen == [f"{os.getpid()}\n"] * 2
    assert not (path / LOCK).exists()
    assert len(Trainer.resume(path).history.epochs) == 1


def test_what_another_trainer_has_saved_in_the_meantime_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "run"
    trainer = Trainer(LINE.model, "mse", directory=path)
    trainer.save(path)
    other = Trainer.resume(path)
    fit(other)
    for work in (lambda: fit(trainer), lambda: trainer.save(path)):
        with pytest.raises(CheckpointError, match=r"another Trainer has saved to .*Trainer\.resume"):
            work()
    fit(other)
    trainer.save(tmp_path / "copy")
    resumed = Trainer.resume(path)
    assert len(resumed.history.epochs) == 2
    np.testing.assert_array_equal(resumed.parameters["w"].data, other.parameters["w"].data)


KILLED = """
import os, sys
from trainer.problems import AtEachStep, line
from trainer.test_directory_lock import fit
from onnxtrain import Trainer

def end(trainer, loss):
    started, start = os.pipe()
    if sys.argv[2] == "fork":
        if os.fork() == 0:  # a worker that outlives its parent, as those of a DataLoader may
            os.close(1), os.close(2)
            os.write(start, b"1")
            os.read(0, 1)
            os._exit(0)
        os.read(started, 1)
    os.kill(os.getpid(), 9)

trainer = Trainer(line().model, "mse", directory=sys.argv[1])
trainer.save(sys.argv[1])
fit(trainer, AtEachStep(end))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("way", ["kill", "fork"])
def test_a_process_that_was_killed_leaves_the_directory_free(tmp_path: Path, way: str) -> None:
    path = os.pathsep.join([str(Path(onnxtrain.__file__).parents[1]), str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), way]
    # The forked worker ends when the pipe to its standard input is closed, at the end of the block.
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE) as process:
        assert process.wait() == -signal.SIGKILL
        assert (tmp_path / "run" / LOCK).exists()
        trainer = Trainer.resume(tmp_path / "run")
        fit(trainer)
        assert not (tmp_path / "run" / LOCK).exists()


def test_an_exception_leaves_the_directory_free(tmp_path: Path) -> None:
    path = tmp_path / "run"
    trainer = Trainer(LINE.model, "mse", directory=path)
    with pytest.raises(ZeroDivisionError):
        fit(trainer, AtEachStep(lambda *_: 1 // 0))
    assert not (path / LOCK).exists()
    Trainer(LINE.model, "mse", directory=path, overwrite=True)


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Lets no file of this process become larger than 100 bytes, which fails as a full disk does."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.skipif(sys.platform == "win32", reason="sets a limit of POSIX")
@pytest.mark.parametrize("keep", [None, 2])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, keep: int | None) -> None:
    trainer = Trainer(LINE.model, "mse")
    fit(trainer)

    def contents() -> list[Any]:
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))

    callback = ModelCheckpoint(tmp_path / "kept", monitor=None, keep=keep)
    with pytest.raises(CheckpointError, match="Saving the run to"), no_room():
        callback.on_epoch_end(trainer, trainer.history)
    assert contents() == ([] if keep is None else ["kept"])
    with pytest.raises(CheckpointError, match="Saving the run to"), no_room():
        trainer.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    callback.on_epoch_end(trainer, trainer.history)
    before = contents()
    with pytest.raises(CheckpointError, match="Saving the run to"), no_room():
        callback.on_epoch_end(trainer, trainer.history)
    assert contents() == before
