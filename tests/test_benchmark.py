"""`benchmarks/run.py` on its smallest net gives PyTorch's losses; every file below `benchmarks/` serves a page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
RUN = BENCHMARKS / "run.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the first run leaves the net and its artifacts."""
    return tmp_path_factory.mktemp("files")


def run(files: Path, results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = ["--files", files, "--results", results]
    command = [sys.executable, RUN, "tiny", *arguments, *places, "--busy", "warn", "--rounds", "1"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.thorough
def test_our_engines_beside_pytorch(files: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    ran = run(files, results, "--engine", "torch", "device", "ortmodule")
    assert ran.returncode == 0, ran.stderr
    measured = json.loads(results.read_text())["tiny"]["steps"]["engines"]
    assert list(measured) == ["device", "ortmodule", "torch", "torch again"]
    for engine in measured.values():
        assert engine["losses"] == pytest.approx(measured["torch"]["losses"], rel=2e-3)
        assert engine["losses"][-1] < engine["losses"][0]
        assert 0 < engine["step_ms"]["min"] <= engine["step_ms"]["median"] <= engine["step_ms"]["q3"]
        halves = engine["gradients_ms"]["min"] + engine["update_ms"]["min"]
        assert halves <= engine["step_ms"]["min"] + 2e-4  # each is rounded
    assert measured["device"]["base_mb"] < measured["torch"]["base_mb"] / 2, "the device has imported PyTorch"


@pytest.mark.thorough
def test_the_first_step_is_merged_and_an_absent_engine_named(files: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"tiny": {"first": {"engines": {"torch": {"first_step_s": 2.5}}}}}))
    ran = run(files, results, "--first", "--engine", "device", "ortmodule", "onnxsim")
    assert ran.returncode == 0, ran.stderr
    assert "onnxsim is left out" in ran.stderr
    first = json.loads(results.read_text())["tiny"]["first"]["engines"]
    assert first.pop("torch") == {"first_step_s": 2.5}
    assert {name: found["first_step_s"] > 0 for name, found in first.items()} == {
        "device": True,
        "ortmodule": True,
    }


def test_engines_whose_losses_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ours ends the run; one of others is left out, with the reason."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from steps.measure import LossesDiffer, _other_losses

    def running(**losses: list[float]) -> dict[str, Any]:
        return {name: SimpleNamespace(first={"losses": found}) for name, found in losses.items()}

    learning, constant = [2.0, 1.5, 1.2, 1.0], [2.0, 2.0, 2.0, 2.0]
    assert _other_losses("tiny", running(torch=learning, compile=learning, device=learning)) == {}
    assert list(_other_losses("tiny", running(torch=learning, compile=constant, device=learning))) == [
        "compile"
    ]
    with pytest.raises(LossesDiffer, match="losses of device"):
        _other_losses("tiny", running(torch=learning, compile=constant, device=constant))


def test_ratios_of_the_summary(files: Path, tmp_path: Path) -> None:
    """Against the best of PyTorch, with times from which the ratios can be read off."""

    def engine(median: float, least: float, peak: float) -> dict[str, object]:
        return {"step_ms": {"median": median, "min": least}, "peak_mb": peak}

    engines = {
        "torch": engine(20.0, 9.0, 300.4),
        "torch again": engine(22.0, 9.0, 301),
        "compile": engine(10.0, 8.0, 400),
        "device": engine(15.0, 4.0, 90),
        "device-kernels": engine(5.0, 2.0, 80.6),
    }
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"tiny": {"steps": {"engines": engines}}}))
    ran = run(files, results, "--summary")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[2:] == [
        "| tiny | 10 | 0.50 (0.25) |  | 1.50 (0.50) |  | 1.10 | 300 /  / 81 |",
        "device, kernels: 0.50 to 0.50, median 0.50",
        "device, stock: 1.50 to 1.50, median 1.50",
    ]


def test_every_file_of_benchmarks_serves_a_page() -> None:
    """Pages name programs by path, or by name if only one file has it; programs name the modules and results they use.

    A program that loads all modules of a folder, e.g. of `architectures/zoo`, names the folder.
    """
    pages = "".join(
        page.read_text(encoding="utf-8")
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "notes").rglob("*.md")]
    )
    on_pages = set(re.findall(r"[\w./-]*\w", pages))
    listed = subprocess.run(
        ["git", "ls-files", "benchmarks"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    unused = {path for line in listed.stdout.splitlines() if (path := ROOT / line).is_file()}
    names = Counter(path.name for path in unused)
    found = {
        path
        for path in unused
        if str(path.relative_to(ROOT)) in on_pages or (path.name in on_pages and names[path.name] == 1)
    }
    in_programs: set[str] = set()
    while found:
        unused -= found
        for path in found:
            if path.suffix == ".py":
                in_programs.update(re.findall(r"[\w.-]*\w", path.read_text(encoding="utf-8")))
        found = {
            path
            for path in unused
            if path.name in in_programs
            or (path.suffix == ".py" and path.stem in in_programs)
            or (path.parents[2] == BENCHMARKS and path.parent.name in in_programs)
        }
    assert sorted(str(path.relative_to(ROOT)) for path in unused) == []
