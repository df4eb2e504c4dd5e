"""The benchmarks of elementwise chains and of rows compute PyTorch's values; the page has their tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path += [str(Path(__file__).parents[1] / "benchmarks" / name) for name in ("", "common")]

import elementwise
import page_tables
import rows

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "notes" / "performance.md"
PROGRAMS = {"elementwise": elementwise, "rows": rows}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "lines"),
    [("elementwise", len(elementwise.QUICK)), ("rows", len(rows.CASES) * len(rows.KINDS))],
)
def test_values(program: str, lines: int, tmp_path: Path) -> None:
    """The programs end with an error where values differ from those of PyTorch in float64."""
    command = [sys.executable, BENCHMARKS / f"{program}.py", "--quick", "--values"]
    ran = subprocess.run([*command, "--results", tmp_path / "none.json"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 1 + lines
    assert not list(tmp_path.iterdir())


def test_wrong_values_are_found(tmp_path: Path) -> None:
    """A value of one element that is off by two units in the last place of the largest, where all ops are exact."""
    import numpy as np

    exact = np.linspace(0, 100, 1000)
    about = {name: {"ops": {"Add": 1}} for name in ("separate", "programs")}
    for name in ("exact", "programs", "separate", "eager"):
        np.save(tmp_path / f"{name}.npy", exact if name == "exact" else exact.astype(np.float32))
    errors = elementwise.check(tmp_path, about, "add")
    assert errors["programs"] == errors["eager"] <= 0.5
    values = exact.astype(np.float32)
    values[7] += 2 * np.spacing(np.float32(100))
    np.save(tmp_path / "programs.npy", values)
    with pytest.raises(SystemExit, match="add: errors in ulp"):
        elementwise.check(tmp_path, about, "add")
    values[7] = np.nextafter(exact.astype(np.float32)[7], np.float32(0))
    np.save(tmp_path / "programs.npy", values)
    with pytest.raises(SystemExit, match="exact ops differ"):
        elementwise.check(tmp_path, about, "add")


def times(programs: float, other: float) -> dict[str, dict[str, float]]:
    engines = dict.fromkeys(("Inductor", "eager", "separate"), other) | dict.fromkeys(
        ("programs", "programs again"), programs
    )
    return {name: {"median": us, "min": us / 2} for name, us in engines.items()}


def test_summary_of_chains() -> None:
    ops = {"separate": {"Mul": 2, "Add": 1}, "programs": {"Elementwise0_float": 1}}
    found = {
        "1000": {"ops": ops, "us": times(3, 2)},
        "100000": {"ops": ops, "us": times(13, 10)},
        "1000000": {"ops": ops, "us": times(50, 100)},
    }
    results = {"threads": {"1": {"two_ops": found}}}
    lines = elementwise.tables(results)["elementwise-1"].splitlines()
    assert lines[2] == "| two ops | 3 -> 1 | 1.50 / 1.50 | 1.30 / 1.30 | 0.50 / 0.50 |"
    summary = elementwise.summary(results)
    assert "median / Inductor, from 100000: median 0.90, 1 of 2 <= 1.2; else two_ops 100000 (1.30)" in summary
    assert "min / separate, from 0: median 1.30, 1 of 3 <= 1.0" in summary


def test_summary_of_rows() -> None:
    def case(ours: float, theirs: float) -> dict[str, Any]:
        both = {"forward": {"median": theirs, "min": theirs}, "both": {"median": 2 * theirs, "min": theirs}}
        mine = {"forward": {"median": ours, "min": ours}, "both": {"median": ours, "min": ours}}
        return {"us": {"kernels": mine, "kernels again": mine, "eager": both, "stock": both}}

    results = {
        "threads": {
            "2": {"embedding, 10000, 16, sorted": case(3, 2), "embedding, 100000, 1, sorted": case(1, 2)}
        }
    }
    assert rows.table(results, "2").splitlines()[2] == "| embedding | sorted | 1.50 / 0.75 | 0.50 / 0.25 |"
    assert "forward, median / eager: median 1.00, 1 of 2 <= 1.0; worst: embedding, 10000, 16" in rows.summary(
        results
    )


def expected_tables(program: ModuleType, path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    results = json.loads(path.read_text())
    if program is elementwise:
        return elementwise.tables(results)
    return {f"rows-{threads}": rows.table(results, threads) for threads in results["threads"]}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_page_has_the_tables(name: str) -> None:
    """Without results the places are empty."""
    tables = expected_tables(PROGRAMS[name], BENCHMARKS / "results" / f"{name}.json")
    for threads in (1, 2):
        shown = page_tables.place(f"{name}-{threads}").search(PAGE.read_text(encoding="utf-8"))
        assert shown, f"notes/performance.md has no place for the table '{name}-{threads}'"
        assert shown[1] == tables.get(f"{name}-{threads}")
