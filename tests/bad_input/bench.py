"""Runs wrong uses in a fresh process and reports the exception of each: `python -c RUN directory name...`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from onnx import helper

import models
import onnxtrain
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import generate_artifacts

X = np.random.default_rng(0).normal(0, 1, (5, 4)).astype(np.float32)
Y = np.array([0, 1, 2, 1, 0])
node = helper.make_node

_PACKAGE = str(Path(onnxtrain.__file__).parent)


class Bench:
    """The surroundings of a case: a directory of its own with the artifacts of `models.mlp()`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        os.chdir(directory)

    @cached_property
    def run(self) -> Path:
        """Directory of the artifacts, which the case may damage."""
        target = self.directory / "run"
        shutil.copytree(_artifacts(self.directory.parent, "mlp", models.mlp(), "adamw"), target)
        return target

    @cached_property
    def other(self) -> Path:
        """Directory of the artifacts of another model."""
        return _artifacts(self.directory.parent, "other", models.mlp(hidden=9), "adamw")

    @cached_property
    def sgd(self) -> Path:
        """Directory of the artifacts of the same model with another optimizer."""
        return _artifacts(self.directory.parent, "sgd", models.mlp(), "sgd")

    @cached_property
    def state(self) -> CheckpointState:
        return CheckpointState.load_checkpoint(self.run / "checkpoint")

    def module(self, evaluation: bool = True, **options: Any) -> Module:
        evaluated = {"eval_model_uri": self.run / "eval_model.onnx"} if evaluation else {}
        return Module(self.run / "training_model.onnx", self.state, **evaluated, **options)

    def optimizer(self, module: Module | None = None) -> Optimizer:
        return Optimizer(self.run / "optimizer_model.onnx", module or self.module())

    def generate(self, model: Any = None, **options: Any) -> None:
        generate_artifacts(
            models.mlp() if model is None else model,
            **{
                "loss": "cross_entropy",
                "optimizer": "adamw",
                "artifact_directory": self.directory / "generated",
            }
            | options,
        )

    def model_file(self, external: bool = False) -> Path:
        """A model file, with its weights in `weights.bin` beside it if `external`."""
        path = self.directory / "model.onnx"
        beside = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
        onnx.save(models.mlp(), path, **(beside if external else {}))
        return path


def _artifacts(directory: Path, name: str, model: onnx.ModelProto, optimizer: str) -> Path:
    target = directory / f"artifacts-{name}"
    if not target.exists():
        generate_artifacts(model, loss="cross_entropy", optimizer=optimizer, artifact_directory=target)
    return target


Use = Callable[[Bench], object]
CASES: dict[str, Use] = {}
"""By what was wrong, the use."""


def cases(uses: dict[str, Use]) -> None:
    """Add wrong uses to :data:`CASES`."""
    assert not uses.keys() & CASES.keys(), uses.keys() & CASES.keys()
    CASES.update(uses)


def case(what: str) -> Callable[[Use], None]:
    """Add the decorated function to :data:`CASES`."""
    return lambda function: cases({what: function})


def truncate(path: Path, use: Callable[[], object]) -> None:
    """Cut a file to several sizes; see `damage`."""
    content = path.read_bytes()
    sizes = [0, 1, *(len(content) * part // 100 for part in (1, 10, 50, 99)), len(content) - 8]
    damage(path, [content[:size] for size in sizes], use)


def corrupt(path: Path, use: Callable[[], object]) -> None:
    """Overwrite a file's middle with noise, and its start, and then all of it; see `damage`."""
    content = path.read_bytes()
    noise = np.random.default_rng(0).integers(0, 256, len(content), dtype=np.uint8).tobytes()
    third = len(content) // 3
    middle = content[:third] + noise[third : 2 * third] + content[2 * third :]
    zeros, ones = b"\0" * len(content), b"\xff" * len(content)
    damage(path, [middle, noise[:16] + content[16:], zeros, noise, ones], use)


def damage(path: Path, contents: list[bytes], use: Callable[[], object]) -> None:
    """Use a file with each of these contents. Each must give the same exception; the last one is raised."""
    raised = set()
    for number, content in enumerate(contents):
        path.write_bytes(content)
        try:
            use()
        except Exception as error:
            raised.add(type(error))
            last = error
        else:
            raise AssertionError(f"{path.name}, damaged ({number}, {len(content)} bytes), was accepted")
    if len(raised) > 1:
        raise AssertionError(f"{path.name}, damaged: {raised}")
    raise last


def _where(traceback: TracebackType | None) -> str:
    """Returns the public function at which an exception left the package, as the table writes it."""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        # A decorator of public functions is none of them.
        if code.co_filename.startswith(_PACKAGE) and not code.co_filename.endswith("_dialects.py"):
            name: str = code.co_qualname
            # The table names classes as users call them: Trainer is written in three.
            for parts in (("Training.", "Trainer."), ("TrainedModel.", "Trainer."), (".__init__", "")):
                name = name.replace(*parts)
            return name.replace("Module.__call__", "module()")
        traceback = traceback.tb_next
    return "the call"


def main(directory: str, names: list[str]) -> None:
    """Prints one line of JSON per case as soon as it has ended; a crash leaves the rest without."""
    for name in names:
        report: dict[str, Any] = {"case": name}
        try:
            CASES[name](Bench(Path(directory) / f"case-{list(CASES).index(name)}"))
        except Exception as error:
            report |= {
                "exception": type(error).__name__,
                "bases": [c.__name__ for c in type(error).__mro__],
                "message": str(error.args[0]) if isinstance(error, KeyError) else str(error),
                "where": _where(error.__traceback__),
            }
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
