"""The command line, run in this process."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import models
from onnxtrain.cli import main


class Result:
    """The output and the exit code of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> Any:
        return json.loads(self.out)


class Runner:
    """Runs commands as `onnxtrain ...` in this process, for fixtures that outlive a test."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def __call__(self, *arguments: object) -> Result:
        self._patch.setattr(sys, "argv", ["onnxtrain", *map(str, arguments)])
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            main()
        return Result(int(end.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command as `onnxtrain ...` in this process."""

    def command(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["onnxtrain", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return Result(int(end.value.code or 0), captured.out, captured.err)

    return command


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    path = tmp_path / "mlp.onnx"
    onnx.save(models.mlp(), path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=x[:, :3].argmax(axis=1))
    return tmp_path / "data.npz"
