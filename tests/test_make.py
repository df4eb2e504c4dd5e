"""`make test` and `make test-all` run all of their stages, and say which of them failed and what was left out."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import fresh_process

ROOT = Path(__file__).parents[1]
STAGES = ["lint", "format", "types", "imports", "spelling", "pytest"]
FURTHER = {
    "sanitizers": "-q tests/kernels{part}\n",
    "levels": "-q tests/kernels -k level or baseline or avx{part}\n",
    "flower": "tests/integrations",
    "gallery": "tests/test_gallery.py",
}
"""The stages of `make test-all` behind those of `make test`, and which tests they run; `{part}` is of PART."""
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


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@needs_make
@pytest.mark.parametrize(
    ("target", "fails", "failed"),
    [
        ("test", "ruff check", ["lint"]),
        ("test", "python -m pytest -n*--dist worksteal -m not thorough*", ["pytest"]),
        ("test", "mypy *", ["types"]),
        ("test", "codespell README.md *", ["spelling"]),
        ("test", "nothing", []),
        ("test-all", "python -m pytest -n*--dist worksteal", ["pytest"]),
        ("test-all", "python -m pytest -n*-q tests/kernels", ["sanitizers"]),
        ("test-all", "python -m pytest -n*tests/kernels -k*", ["levels"]),
        ("test-all", "python -m pytest*tests/integrations", ["flower"]),
        ("test-all", "python -m pytest*tests/test_gallery.py*", ["gallery"]),
        ("test-all", "nothing", []),
        ("test-all PART=1/4", "python -m pytest -n*--dist worksteal --part 1/4*", ["pytest"]),
        ("test-all PART=1/4", "nothing", []),
        ("test-all FURTHER=flower", "nothing", []),
        ("test-all PART=1/4 FURTHER=levels", "nothing", []),
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
    outer = ("MAKE", "PART", "FURTHER")
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
            "CXX=true",
            "NODE=/none",
        ],
        cwd=ROOT,
        env={**environment, "LOG": str(tmp_path / "log"), "LEFT_OUT": str(left_out), "FAILS": fails},
        capture_output=True,
        text=True,
        check=False,
    )
    ran = (tmp_path / "log").read_text()
    target, *variables = target.split()
    chosen = dict(variable.split("=") for variable in variables)
    further = [] if target == "test" else chosen.get("FURTHER", " ".join(FURTHER)).split()
    part = f" --part {chosen['PART']}" if "PART" in chosen else ""
    tests = {name: command.format(part=part) for name, command in FURTHER.items()}
    commands = [
        "ruff check",
        "ruff format --check",
        "mypy",
        "lint-imports",
        "codespell README.md",
        "python -m pytest",
    ]
    assert [command for command in [*commands, *tests.values()] if command in ran] == [
        *commands,
        *(tests[name] for name in further),
    ]
    assert (done.returncode != 0) is bool(failed), done.stderr
    lines = done.stdout.splitlines()
    assert "No Node.js (/none): the npm package is not tested." in lines
    skipped = [name for name in FURTHER if name not in further]
    if target == "test" or "PART" in chosen:
        skipped.append(f"{'the' if failed == ['pytest'] else '1,234'} tests marked thorough")
    *first, last = skipped or [""]
    left_out = (
        f"{', '.join(first)}, and {last}" if first and last.endswith("thorough") else ", ".join(skipped)
    )
    assert [line for line in lines if line.startswith("Not run")] == (
        [f'Not run: {left_out}. "make test-all" runs everything.'] if skipped else []
    )
    assert f"Passed: {' '.join(stage for stage in [*STAGES, *further] if stage not in failed)}" in lines
    assert (lines[-1] == f"FAILED: {' '.join(failed)}") is bool(failed)
    assert failed == ["pytest"] or any(line.startswith("last line of python -m pytest") for line in lines)


@needs_make
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_commit_chooses_what_the_ci_runs(tmp_path: Path) -> None:
    """Of 32 consecutive commits each runs another part with another stage."""
    for name, tool in (("git", 'echo "$COMMIT"'), ("make", 'echo "$*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{tool}\n")
        (tmp_path / name).chmod(0o755)
    ran = set()
    for number in range(32):
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "COMMIT": f"{number + 9:08x}"}
        done = subprocess.run(
            [ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=True
        )
        ran.add(done.stdout.strip())
    assert ran == {f"test-all PART={part}/8 FURTHER={name}" for part in range(8) for name in FURTHER}


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


@pytest.mark.sample(every=3)
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
