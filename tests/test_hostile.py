"""Damaged and hostile files of every kind: ONNXTRAIN_HOSTILE cases, from the seed ONNXTRAIN_HOSTILE_SEED on."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fresh_process import SOURCE, TESTS, python

CASES = int(os.environ.get("ONNXTRAIN_HOSTILE", "220"))
SEED = int(os.environ.get("ONNXTRAIN_HOSTILE_SEED", "0"))
PROCESSES = 2
MEMORY = 300  # MB that a case may need on top of what the process had

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc and listens to inotify")


def hostile_cases(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = ("-m", "hostile.cases", *map(str, arguments))
    return python(*command, path=(SOURCE, TESTS), OMP_NUM_THREADS="1", **options)


def reports(directory: Path, first: int, count: int, step: int) -> list[dict[str, Any]]:
    """Runs `count` cases in one process, and after a crash the ones behind it in another."""
    found: list[dict[str, Any]] = []
    while count > 0:
        result = hostile_cases(directory, first, count, step, code=None)
        lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
        found += [line for line in lines if "case" in line]
        begun = sum("begins" in line for line in lines)
        if begun == sum("case" in line for line in lines):
            assert result.returncode == 0, result.stderr[-2000:]
            break
        crashed = lines[-1]["begins"]
        crash = f"crash, exit status {result.returncode}: {result.stderr[-500:]}"
        found.append({"case": crashed, "kind": "?", "outcome": crash, "memory": 0, "outside": False})
        first, count = crashed + step, count - begun
    return found


@pytest.mark.thorough
def test_hostile_files_are_errors_or_harmless(tmp_path: Path) -> None:
    hostile_cases("prepare", tmp_path / "base")
    with ThreadPoolExecutor(PROCESSES) as pool:
        parts = [
            pool.submit(reports, tmp_path / "base", SEED + n, CASES // PROCESSES, PROCESSES)
            for n in range(PROCESSES)
        ]
        found = [report for part in parts for report in part.result()]
    assert len(found) == CASES // PROCESSES * PROCESSES
    summary = collections.Counter((r["kind"], r["outcome"].partition(":")[0]) for r in found)
    for (kind, outcome), number in sorted(summary.items()):
        print(f"{number:6d}  {kind}: {outcome}")
    largest = max(found, key=lambda r: r["memory"])
    print(f"most memory: {largest['memory']} MB (case {largest['case']}, {largest['kind']})")
    wrong = [r for r in found if not r["outcome"].startswith(("noticed ", "used"))]
    for report in wrong:
        print(report)
    assert not wrong, wrong[:20]
    assert not [r for r in found if r["outside"]], [r for r in found if r["outside"]][:20]
    assert largest["memory"] <= MEMORY, [r for r in found if r["memory"] > MEMORY][:20]
    noticed = sum(r["outcome"].startswith("noticed") for r in found)
    assert CASES < 100 or 0.4 * CASES < noticed < CASES
