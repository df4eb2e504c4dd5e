"""`make test` and `make test-all` run all of their stages, and say which of them failed and what was left out."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import fresh_process

ROOT = Path(__file__).parents[1]
STAGES = {
    "test": ["lint", "format", "types", "imports", "spelling", "pytest"],
    "test-all": [
        "lint",
        "format",
        "types",
        "imports",
        "spelling",
        "pytest",
        "sanitizers",
        "flower",
        "gallery",
    ],
}
TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
case "$(basename "$0") $*" in
    $FAILS) echo "this one fails"; exit 1;;
esac
case "$*" in
    *--left-out*) echo 1,234 > "$LEFT_OUT";;
esac
echo "last line of $(basename "$0") $*"
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("target", "fails", "failed"),
    [
        ("test", "ruff check", ["lint"]),
        ("test", "python -m pytest -n*--dist worksteal -m not thorough*", ["pytest"]),
        ("test", "mypy *", ["types"]),
        ("test", "codespell README.md *", ["spelling"]),
        ("test", "nothing", []),
        ("test-all", "python -m pytest -n*--dist worksteal", ["pytest"]),
        ("test-all", "python -m pytest -n*tests/kernels", ["sanitizers"]),
        ("test-all", "python -m pytest*tests/integrations", ["flower"]),
        ("test-all", "python -m pytest*tests/test_gallery.py*", ["gallery"]),
        ("test-all", "nothing", []),
        ("test-all PART=1/4", "python -m pytest -n*--dist worksteal --part 1/4*", ["pytest"]),
        ("test-all PART=1/4", "nothing", []),
    ],
)
def test_every_stage_runs_whichever_fails(tmp_path: Path, target: str, fails: str, failed: list[str]) -> None:
    tools = tmp_path / "venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("ruff", "mypy", "lint-imports", "codespell", "python"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    (tmp_path / "venv" / ".installed").touch()
    # The variables with which an outer make was called are in its environment.
    outer = ("MAKE", "PART")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
    left_out = tmp_path / "build" / "left-out"
    done = subprocess.run(
        [
            "make",
            *target.split(),
            f"TEST_VENV={tmp_path / 'venv'}",
            f"FLOWER_VENV={tmp_path / 'venv'}",
            f"GALLERY_VENV={tmp_path / 'venv'}",
            f"SANITIZED={tmp_path / 'sanitized'}",
            f"LEFT_OUT={left_out}",
            "LIBASAN=/asan",
            "NODE=/none",
        ],
        cwd=ROOT,
        env={**environment, "LOG": str(tmp_path / "log"), "LEFT_OUT": str(left_out), "FAILS": fails},
        capture_output=True,
        text=True,
        check=False,
    )
    ran = (tmp_path / "log").read_text()
    target, _, part = target.partition(" ")
    commands = [
        "ruff check",
        "ruff format --check",
        "mypy",
        "lint-imports",
        "codespell README.md",
        "python -m pytest",
    ]
    further = ["tests/kernels", "tests/integrations", "tests/test_gallery.py"]
    assert [command for command in [*commands, *further] if command in ran] == (
        commands if target == "test" else commands + further
    )
    assert (done.returncode != 0) is bool(failed), done.stderr
    lines = done.stdout.splitlines()
    assert "No Node.js (/none): the npm package is not tested." in lines
    number = "the" if failed == ["pytest"] else "1,234"
    skipped = (
        f"Not run: sanitizers, flower, gallery, and {number} tests marked thorough. "
        '"make test-all" runs everything.'
    )
    assert (skipped in lines) is (target == "test")
    of_thorough = f'Not run: {number} tests marked thorough. "make test-all" runs everything.'
    assert (of_thorough in lines) is bool(part)
    assert f"Passed: {' '.join(stage for stage in STAGES[target] if stage not in failed)}" in lines
    assert (lines[-1] == f"FAILED: {' '.join(failed)}") is bool(failed)
    assert failed == ["pytest"] or any(line.startswith("last line of python -m pytest") for line in lines)


MATRIX = """
import pytest

@pytest.mark.sample(every=2)
@pytest.mark.parametrize("inner", [0, 1])
@pytest.mark.parametrize("outer", [0, 1, 2])
def test_sampled(outer, inner): pass

@pytest.mark.parametrize("value", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_marked(value): pass
"""
NOT_THOROUGH = ["sampled[0-0]", "sampled[1-1]", "sampled[2-0]", "marked[0]"]


@pytest.mark.parametrize(
    ("arguments", "collected"),
    [
        (["-m", "not thorough"], NOT_THOROUGH),
        (["-m", "not thorough", "-k", "1-"], ["sampled[1-1]"]),
        (["-k", "sampled and 1-"], ["sampled[1-0]", "sampled[1-1]"]),
        # Of the thorough tests, which are four here, each part has some, and all parts together have each once.
        (["--part", "0/3"], [*NOT_THOROUGH[:1], "sampled[0-1]", "sampled[1-0]", *NOT_THOROUGH[1:]]),
        (["--part", "1/3"], [*NOT_THOROUGH[:3], "sampled[2-1]", NOT_THOROUGH[3]]),
        (["--part", "2/3"], [*NOT_THOROUGH, "marked[1]"]),
    ],
)
def test_a_sample_has_every_value_of_each_parameter(
    tmp_path: Path, arguments: list[str], collected: list[str]
) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_matrix.py").write_text(MATRIX)
    done = fresh_process.python(
        *("-m", "pytest", "-p", "conftest", "-W", "ignore", "--collect-only", "-q", *arguments, tmp_path),
        path=(fresh_process.SOURCE, fresh_process.TESTS),
        cwd=tmp_path,
        PYTEST_ADDOPTS="",
    )
    found = [line.partition("::test_")[2] for line in done.stdout.splitlines() if "::" in line]
    assert found == collected


def test_files_that_are_looked_through_for_misspelled_words_exist() -> None:
    (names,) = [
        line.split("=")[1].split()
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith("SPELLED")
    ]
    assert [name for name in names if not (ROOT / name).exists()] == []
    assert {"README.md", "docs", "src", "tests"} <= set(names)
