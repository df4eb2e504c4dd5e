"""Each line of `docs/reference/error-messages.md`, tried in another process; and files with random damage."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import onnxtrain
from bad_input import building, changing, files, running, training
from bad_input.bench import CASES
from fresh_process import SOURCE, TESTS, python

ROOT = Path(__file__).parents[1]
SETTINGS: dict[str, Any] = {"path": (SOURCE, TESTS), "PYTHONIOENCODING": "utf-8"}
MODULES = (building, changing, files, running, training)

RUN = """
import logging, sys
from bad_input import bench, building, changing, files, running, training
logging.disable(logging.WARNING)  # what is reported is the exception
bench.main(sys.argv[1], sys.argv[2:])
"""


@dataclass(frozen=True)
class Line:
    """One line of the page."""

    section: str
    what: str
    where: str
    exception: str
    message: str

    def pattern(self) -> str:
        """A regular expression for the message, in which `…` stands for anything."""
        return ".*".join(re.escape(part) for part in self.message.split("…"))


def lines_of_the_page() -> list[Line]:
    lines, section = [], ""
    for text in (ROOT / "docs" / "reference" / "error-messages.md").read_text(encoding="utf-8").splitlines():
        if text.startswith("## "):
            section = text[3:]
        elif text.startswith("| ") and not text.startswith("| mistake |"):
            what, where, exception, message = text.removeprefix("| ").removesuffix(" |").split(" | ")
            lines.append(Line(section, what, where.strip("`"), exception.strip("`"), message[1:-1]))
    return lines


LINES = {line.what: line for line in lines_of_the_page()}


@functools.cache
def reports(section: str) -> dict[str, dict[str, Any]]:
    """Runs the lines of a section in one process, and after a crash the ones behind it in another."""
    names = [line.what for line in LINES.values() if line.section == section]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        while names:
            result = python("-c", RUN, tempfile.mkdtemp(dir=directory), *names, **SETTINGS, code=None)
            done = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
            found |= {report["case"]: report for report in done}
            names = names[len(done) :]
            if names:
                found[names.pop(0)] = {"crash": f"exit status {result.returncode}: {result.stderr[-2000:]}"}
    return found


def test_page_and_tests_have_the_same_lines() -> None:
    assert len(LINES) == len(lines_of_the_page()), "a line is there twice"
    assert sorted(LINES) == sorted(CASES)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("what", LINES)
def test_wrong_use_raises_what_the_page_says(what: str) -> None:
    line, report = LINES[what], reports(LINES[what].section)[what]
    assert "crash" not in report, report["crash"]
    assert "exception" in report, "it was not noticed"
    assert (report["exception"], report["where"]) == (line.exception, line.where), report["message"]
    assert re.fullmatch(line.pattern(), report["message"], re.DOTALL), report["message"]
    known = {*onnxtrain.errors.__all__, "KeyError", "TypeError", "ValueError"}
    assert known & set(report["bases"])


DAMAGE = """
import collections, sys
from pathlib import Path
import numpy as np
import onnxruntime
from bad_input.bench import X, Y, Bench
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import OnnxTrainError

onnxruntime.set_default_logger_severity(4)
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
run = Bench(Path(sys.argv[1]) / "damage").run
path = run / sys.argv[2]
content = path.read_bytes()


def opened():
    state = CheckpointState.load_checkpoint(run / "checkpoint")
    return Module(run / "training_model.onnx", state, run / "eval_model.onnx", session_options=options)


whole = opened()
for seed in range(120):
    rng = np.random.default_rng(seed)
    damaged = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        damaged[rng.integers(len(damaged))] = rng.integers(256)
    path.write_bytes(damaged)
    try:
        module = whole if path.name == "optimizer_model.onnx" else opened()
        module.train()
        module(X, Y)
        Optimizer(run / "optimizer_model.onnx", module).step()
        module.eval()
        module(X, Y)
        module.export_model_for_inferencing(run / "trained.onnx", ["logits"])
        print("unnoticed")
    except OnnxTrainError as error:
        print("noticed")
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "file", ["training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"]
)
def test_random_damage_never_ends_the_process(tmp_path: Path, file: str) -> None:
    """Bytes that hold numbers or text may change unnoticed; all else is an error of the package."""
    result = python("-c", DAMAGE, tmp_path, file, **SETTINGS)
    outcomes = result.stdout.split()
    assert len(outcomes) == 120
    assert outcomes.count("noticed") > 60
