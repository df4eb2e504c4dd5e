"""Saves that are killed at random moments (ONNXTRAIN_KILLS times each), and what a kill at each step would leave."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from fresh_process import SOURCE, TESTS, python
from saving import AT_EACH_STEP, KINDS

KILLS = int(os.environ.get("ONNXTRAIN_KILLS", "12"))

MOSTLY_WRITING = ("checkpoint", "Trainer.save", "large export")
"""The others compute most of the time, so that a dozen kills may miss every save; copies at each step do not."""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")


OF_EACH = {
    **dict.fromkeys(MOSTLY_WRITING, KILLS),
    **{kind: KILLS if KILLS > 12 else 4 for kind in KINDS if kind not in MOSTLY_WRITING},
}
"""Number of kills by kind of save."""


def found(way: str, kinds: Iterable[str], *arguments: object) -> dict[str, dict[str, Any]]:
    """Run `killing`; return its findings by kind."""
    command = ("-m", "killing", way, ",".join(kinds), *map(str, arguments))
    done = python(*command, path=(SOURCE, TESTS), OMP_NUM_THREADS="1")
    result: dict[str, dict[str, Any]] = json.loads(done.stdout)
    print(result)
    return result


def _numbers_of_kills() -> list[Any]:
    """Returns the numbers in OF_EACH, and marks all but the smallest thorough."""
    least, *more = sorted(set(OF_EACH.values()))
    return [least, *(pytest.param(kills, marks=pytest.mark.thorough) for kills in more)]


@pytest.mark.parametrize("kills", _numbers_of_kills())
def test_killed_saves_leave_what_can_be_read(tmp_path: Path, kills: int) -> None:
    kinds = [kind for kind in KINDS if OF_EACH[kind] == kills]
    for kind, result in found("at_random", kinds, tmp_path, kills, 0).items():
        assert (result["unreadable"], result["lost"]) == (0, 0), f"{kind}: {result['first problem']}"
        assert result["kills"] == kills
        if KILLS >= 12 and kind in MOSTLY_WRITING:
            # Otherwise no kill has hit a save and the test shows nothing.
            assert result["in the middle"] > 0, kind


@pytest.mark.thorough
@pytest.mark.parametrize("half", [0, 1])
def test_a_save_can_be_killed_at_each_of_its_steps(tmp_path: Path, half: int) -> None:
    kinds = list(AT_EACH_STEP)[half::2]
    for kind, result in found("at_each_step", kinds, tmp_path).items():
        assert result["unreadable"] == 0, f"{kind}: {result['first problem']}"
        assert result["in the middle"] >= 3, kind
        assert result["steps"] > 6, kind
