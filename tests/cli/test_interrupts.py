"""Ctrl-C at many moments of a command: one line that says what was saved, which then exists and can be resumed."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cli.processes import ROOT, environment
from onnxtrain import Trainer

EPOCHS = 2


class PressAt:
    """Presses Ctrl-C at given calls of functions of this package, or at that of a name; counts the calls."""

    def __init__(self, *calls: int, name: str | None = None) -> None:
        self._left = list(calls)
        self._name = name
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        # At the call of `main` itself nothing of the package can be asked to look, and CPython ignores what is raised
        # while a generator is closed.
        ours = module.startswith("onnxtrain.") and module != "onnxtrain.cli"
        if event != "call" or not ours or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        self.calls += 1
        if frame.f_code.co_name == self._name:
            self._name = None
            signal.raise_signal(signal.SIGINT)
        if self._left and self.calls >= self._left[0]:
            del self._left[0]
            signal.raise_signal(signal.SIGINT)


def watched(run: Any, press: PressAt, *arguments: object) -> Any:
    sys.setprofile(press)
    try:
        return run(*arguments)
    finally:
        sys.setprofile(None)


def train(mlp: Path, data: Path) -> list[object]:
    return [
        "train",
        mlp,
        "--data",
        data,
        "--loss",
        "cross_entropy",
        "--epochs",
        EPOCHS,
        "-o",
        mlp.with_name("run"),
    ]


def check(result: Any, run: Any, directory: Path, data: Path) -> str:
    """The line on the screen, which is true of what is in the directory."""
    assert result.code == 130, (result.out, result.err)
    lines = [line for line in result.err.splitlines() if not line.startswith("epoch ")]
    assert len(lines) == 1, result.err
    line = lines[0]
    assert line.startswith("Interrupted")
    if "Nothing was saved" in line or "No file was written" in line:
        assert not directory.exists()
        return "nothing"
    trainer = Trainer.resume(directory)
    if "with all its epochs" in line:
        assert len(trainer.history) == EPOCHS
        assert run("export", directory, "-o", directory / "again.onnx").code == 0
        return "all"
    assert f"onnxtrain train {directory} resumes it" in line
    saved = re.search(r"as it was after (\d+) of 2 epochs", line)
    if saved is not None:
        assert len(trainer.history) == int(saved[1])
    else:
        in_fit = re.search(r"Interrupted in epoch (\d) after (\d) of 7 batches", line)
        assert in_fit is not None or "after 0 epochs" in line, line
        assert in_fit is None or len(trainer.history) == int(in_fit[1]) - 1
    again = run("train", directory, "--json")
    assert again.code == 0, again.err
    assert len(again.json()["epochs"]) == EPOCHS
    return "part"


def test_at_many_moments_of_training(run: Any, mlp: Path, data: Path) -> None:
    directory = mlp.with_name("run")
    assert run(*train(mlp, data)).code == 0  # imports, which take calls too, are done
    shutil.rmtree(directory)
    counted = PressAt()
    assert watched(run, counted, *train(mlp, data)).code == 0
    kinds = set()
    for moment in range(6):
        for second in (None, 40) if moment == 4 else (None,):
            shutil.rmtree(directory, ignore_errors=True)
            first = 1 + moment * counted.calls // 6
            press = PressAt(first, *([] if second is None else [first + second]))
            result = watched(run, press, *train(mlp, data))
            if result.code == 0:  # in the last step or after it, where nothing is left to interrupt
                assert len(Trainer.resume(directory).history) == EPOCHS
                continue
            kinds.add(check(result, run, directory, data))
    assert {"nothing", "part"} <= kinds
    shutil.rmtree(directory)
    result = watched(run, PressAt(name="print_result"), *train(mlp, data))
    assert check(result, run, directory, data) == "all"


@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_other_commands_end_with_one_line(run: Any, mlp: Path, data: Path, command: str) -> None:
    assert run(*train(mlp, data)).code == 0
    output = mlp.with_name("output.npz" if command == "predict" else "output.onnx")
    arguments = {
        "evaluate": ["evaluate", mlp.with_name("run"), "--data", data],
        "predict": ["predict", mlp.with_name("run"), "--data", data, "-o", output],
        "export": ["export", mlp.with_name("run"), "-o", output],
    }[command]
    assert run(*arguments).code == 0  # imports, which take calls too, are done
    counted = PressAt()
    assert watched(run, counted, *arguments).code == 0
    output.unlink(missing_ok=True)
    for moment in (1, counted.calls // 2):
        result = watched(run, PressAt(moment), *arguments)
        assert (result.code, result.out) == (130, "")
        assert result.err == "Interrupted. No file was written.\n"
        assert not output.exists()


def test_while_modules_are_imported() -> None:
    """A second of the command: a process that gets Ctrl-C there, by a module that presses it while it is imported."""
    code = (
        "import sys, signal, types\n"
        "class Press:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'onnxtrain.cli._app': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Press())\n"
        "sys.argv = ['onnxtrain', 'ops']\n"
        "from onnxtrain.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted. No file was written.\n")


def test_handlers_stay_what_they_were(run: Any, mlp: Path, data: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert threading.current_thread() is threading.main_thread()
    assert watched(run, PressAt(1), *train(mlp, data)).code == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert os.getpid()
