"""Saves that are killed at random moments (ONNXTRAIN_KILLS times each), and what a kill at each step would leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import onnxtrain
from killing import AT_EACH_STEP, KINDS

KILLS = int(os.environ.get("ONNXTRAIN_KILLS", "12"))

MOSTLY_WRITING = ("checkpoint", "Trainer.save", "large export")
"""The others compute most of the time, so that a dozen kills may miss every save; copies at each step do not."""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")


def found(*arguments: str) -> dict[str, int]:
    path = os.pathsep.join([str(Path(onnxtrain.__file__).parents[1]), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-m", "killing", *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ONNXTRAIN_KERNELS": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, int] = json.loads(done.stdout)
    print(arguments[1], result)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_saves_leave_what_can_be_read(tmp_path: Path, kind: str) -> None:
    kills = KILLS if KILLS > 12 or kind in MOSTLY_WRITING else 4
    result = found("main", kind, str(tmp_path), str(kills), "0")
    assert (result["unreadable"], result["lost"]) == (0, 0), result["first problem"]
    assert result["kills"] == kills
    if KILLS >= 12 and kind in MOSTLY_WRITING:
        assert result["in the middle"] > 0  # otherwise no kill has hit a save and the test shows nothing


@pytest.mark.slow
@pytest.mark.parametrize("kind", AT_EACH_STEP)
def test_a_save_can_be_killed_at_each_of_its_steps(tmp_path: Path, kind: str) -> None:
    result = found("at_each_step", kind, str(tmp_path))
    assert result["unreadable"] == 0, result["first problem"]
    assert result["in the middle"] >= 3
    assert result["steps"] > 6
