"""Every command, reader and estimator on folders of runs that a stranger has made: nothing outside changes, all end."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import models
from hostile.cases import Watch
from hostile.folders import FOLDERS
from onnxtrain import CSVLogger, EarlyStopping, OnnxClassifier, Trainer
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.cli import main
from onnxtrain.errors import OnnxTrainError
from onnxtrain.lora import load_adapter
from onnxtrain.trainer import ModelCheckpoint, TensorBoardLogger

SECONDS = 60  # that one use may take; a tenth of a second is usual
# Each folder is given to the two uses that read and write most, and to every fifth of the others; "all" takes minutes.
ALL = os.environ.get("ONNXTRAIN_RECEIVED") == "all"
ALWAYS = ("train as remembered", "fit")
SECRET = b"secret-of-the-victim"
X = np.random.default_rng(0).normal(0, 1, (12, 4)).astype(np.float32)
Y = np.arange(12) % 3

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="makes links and pipes, and listens to inotify"),
]


class Place:
    """A folder with a hostile `run`, the `outside` that it points to, a `home`, and `out` for what users name."""

    def __init__(self, root: Path) -> None:
        self.root, self.run, self.out = root, root / "run", root / "out"
        self.outside, self.home, self.data = root / "outside", root / "home", root / "data.npz"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with every file that a run can have, made by the command line and trained on in Python."""
    root = tmp_path_factory.mktemp("good")
    onnx.save(models.mlp(), root / "net.onnx")
    np.savez(root / "data.npz", x=X, y=Y)
    run = root / "run"
    command(
        "train", root / "net.onnx", "--data", root / "data.npz", "--loss", "cross_entropy", "--epochs", 1,
        "--threads", 1, "--batch-size", 4, "--ema-decay", 0.9, "--log", run / "log.csv", "-o", run,
    )  # fmt: skip
    callbacks = [
        EarlyStopping("loss", restore_best=True),
        ModelCheckpoint(run / "checkpoints", every_n_steps=1, keep=1),
    ]
    Trainer.resume(run).fit(X, Y, batch_size=4, callbacks=callbacks, verbose=False)
    shutil.copy(run / "best", run / "swa")
    np.savez(run / "predictions-1-1.npz", prediction=X, target=Y)
    return root


@pytest.fixture
def place(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place(tmp_path)
    shutil.copytree(good / "run", made.run)
    shutil.copytree(good / "run", made.outside)
    shutil.copytree(good / "run", made.outside / "twin")
    shutil.copy(good / "data.npz", made.data)
    for path in (made.outside / "precious.txt", made.home / ".bashrc", made.home / "deep" / "notes.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(SECRET)
    (made.outside / "x.0123456789ab.data").write_bytes(SECRET)
    made.out.mkdir()
    monkeypatch.setenv("HOME", str(made.home))
    monkeypatch.chdir(made.out)
    return made


def command(*arguments: object) -> str:
    """Runs a command in this process; returns what it printed."""
    printed = io.StringIO()
    before, sys.argv = sys.argv, ["onnxtrain", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main()
    except SystemExit as end:
        if end.code not in (None, 0, 1):
            raise AssertionError(f"exit code {end.code}: {printed.getvalue()}") from end
    finally:
        sys.argv = before
    return printed.getvalue()


def fit(at: Place) -> None:
    trainer = Trainer.resume(at.run)
    trainer.abandon_fit()
    logs = [CSVLogger(at.run / "log.csv"), TensorBoardLogger(at.run / "tensorboard")]
    saves = [ModelCheckpoint(at.run / "checkpoints", every_n_steps=1, keep=1)]
    options: dict[str, Any] = {"batch_size": 6, "validation": (X, Y), "evaluate_every": 1, "verbose": False}
    trainer.fit(X, Y, callbacks=[*logs, *saves, EarlyStopping(restore_best=True)], **options)


def use(at: Place) -> None:
    trainer = Trainer.resume(at.run)
    trainer.evaluate(X, Y)
    trainer.predict(X)
    trainer.export(at.run / "trained.onnx")
    trainer.save_parameters(at.run / "best")
    trainer.model_card(at.run, "card")
    trainer.save(at.out / "copy")
    trainer.save(at.run)


def device(at: Place) -> None:
    state = CheckpointState.load_checkpoint(at.run / "checkpoint")
    module = Module(at.run / "training_model.onnx", state, at.run / "eval_model.onnx")
    optimizer = Optimizer(at.run / "optimizer_model.onnx", module)
    module(X, Y)
    optimizer.step()
    module.eval()(X, Y)


def estimate(at: Place) -> None:
    OnnxClassifier(at.run / "inference_model.onnx", epochs=1, batch_size=6).fit(X, Y).save(
        at.out / "fitted.onnx"
    )


# What a user names may be a link, e.g. into a cache: then it is read, and only the others read nothing outside.
NAMING_FILES = {
    "device", "estimator", "check", "artifacts", "merge", "predict with a model", "train anew",
    "train without overwrite",
}  # fmt: skip

USES: dict[str, Callable[[Place], object]] = {
    "inspect": lambda at: command("inspect", at.run, "--parameters"),
    "inspect --json": lambda at: command("inspect", at.run, "--json"),
    "train": lambda at: command("train", at.run, "--data", at.data, "--epochs", 1),
    "train as remembered": lambda at: command("train", at.run, "--data", at.data),
    "train and save": lambda at: command("train", at.run, "--data", at.data, "--save-every", 1, "--keep", 1),
    "train anew": lambda at: command(
        "train", at.run / "inference_model.onnx", "--data", at.data, "--loss", "cross_entropy", "--epochs", 1,
        "-o", at.run, "--overwrite",
    ),
    "train without overwrite": lambda at: command(
        "train", at.run / "inference_model.onnx", "--data", at.data, "--loss", "cross_entropy", "-o", at.run
    ),
    "evaluate": lambda at: command("evaluate", at.run, "--data", at.data),
    "predict": lambda at: command("predict", at.run, "--data", at.data, "-o", at.out / "p.npz"),
    "predict into the run": lambda at: command("predict", at.run, "--data", at.data, "-o", at.run / "predictions.npz"),
    "predict with a model": lambda at: command(
        "predict", at.run / "trained.onnx", "--data", at.data, "-o", at.out / "q.npz"
    ),
    "export": lambda at: command("export", at.run, "-o", at.out / "m.onnx"),
    "export into the run": lambda at: command("export", at.run, "-o", at.run / "trained.onnx"),
    "check": lambda at: command("check", at.run / "inference_model.onnx"),
    "artifacts": lambda at: command(
        "artifacts", at.run / "inference_model.onnx", "--loss", "cross_entropy", "-o", at.run
    ),
    "merge": lambda at: command("merge", at.run / "inference_model.onnx", at.run, "-o", at.out / "merged.onnx"),
    "load_adapter": lambda at: load_adapter(at.run, models.mlp()),
    "resume": use,
    "fit": fit,
    "device": device,
    "estimator": estimate,
}  # fmt: skip


def copy_with_nodes(source: Path, target: Path) -> None:
    """Copies a folder with its links and pipes."""

    def copy(one: str, other: str) -> None:
        if Path(one).is_fifo():
            os.mkfifo(other)
        else:
            shutil.copy2(one, other, follow_symlinks=False)

    shutil.copytree(source, target, symlinks=True, copy_function=copy)


def contents(at: Place) -> dict[str, tuple[object, ...]]:
    """Type, rights, time of change and content of everything but the run and what users name."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(at.root):
        if Path(folder) == at.root:
            folders[:] = [name for name in folders if name not in ("run", "out")]
        for name in (*folders, *files):
            path = Path(folder, name)
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found[str(path.relative_to(at.root))] = (
                status.st_mode,
                status.st_mtime_ns,
                status.st_nlink,
                content,
            )
    return found


class Expired(BaseException):
    """A use has taken too long. TimeoutError would be an OSError, which readers of files handle."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def expired(*_: object) -> None:
        raise Expired(f"it took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(act: Callable[[Place], object], at: Place) -> str:
    """Uses the run once; returns what was printed, or the message of the error."""
    with limited(SECONDS):
        try:
            return str(act(at) or "")
        except OnnxTrainError as error:
            return str(error)
        except FileNotFoundError as error:  # of a file that users name
            return str(error)


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_outside_changes_and_all_end(place: Place, folder: str) -> None:
    pristine = place.root / "hostile"
    FOLDERS[folder](place.run, place.outside)
    os.rename(place.run, pristine)
    before = contents(place)
    turn = list(FOLDERS).index(folder)
    for index, (name, act) in enumerate(USES.items()):
        if not ALL and name not in ALWAYS and (index + turn) % 5:
            continue
        # A fresh copy: what one use has written must not shield the next.
        copy_with_nodes(pristine, place.run)
        watch = [Watch(path) for path in (place.outside, place.outside / "twin", place.home)]
        told = outcome(act, place)
        touched = any(each.touched() for each in watch)
        for each in watch:
            each.close()
        assert "Traceback" not in told, (name, told)
        after = contents(place)
        assert after == before, (
            name,
            [key for key in {**before, **after} if before.get(key) != after.get(key)],
        )
        assert not touched or name in NAMING_FILES, f"{name} opened a file outside: {told}"
        shutil.rmtree(place.run)
