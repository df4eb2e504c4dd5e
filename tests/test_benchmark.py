"""`benchmarks/run.py` on its smallest net: our engines run, and their losses are those of PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the first run leaves the net and its artifacts."""
    return tmp_path_factory.mktemp("files")


def run(files: Path, results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = ["--files", files, "--results", results]
    command = [sys.executable, RUN, "tiny", *arguments, *places, "--busy", "warn", "--rounds", "1"]
    return subprocess.run(command, capture_output=True, text=True)


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
