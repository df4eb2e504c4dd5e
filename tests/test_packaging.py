"""Dependencies of the wheel, and the message if ONNX Runtime is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from fresh_process import python

ROOT = Path(__file__).parents[1]


def requirements(tmp_path: Path, **variables: str) -> list[str]:
    """Builds the wheel offline and returns what it depends on without extras."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
    environment = {k: v for k, v in os.environ.items() if k != "ONNXTRAIN_ONNXRUNTIME"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tree,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(name).decode())
    return sorted(r for r in metadata.get_all("Requires-Dist") or [] if "extra ==" not in r)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "onnxruntime>=1.20"),
        ({"ONNXTRAIN_ONNXRUNTIME": "onnxruntime-gpu"}, "onnxruntime-gpu>=1.20"),
        ({"ONNXTRAIN_ONNXRUNTIME": "onnxruntime-gpu==1.23.2"}, "onnxruntime-gpu==1.23.2"),
        ({"ONNXTRAIN_ONNXRUNTIME": ""}, None),
    ],
)
def test_one_build_of_onnxruntime_is_depended_on(
    tmp_path: Path, variables: dict[str, str], expected: str | None
) -> None:
    others = ["numpy>=1.26.4", "safetensors>=0.4.3"]
    assert requirements(tmp_path, **variables) == sorted([*others, *([expected] if expected else [])])


def test_a_variable_that_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="expected a name as 'onnxruntime-gpu'"):
        requirements(tmp_path, ONNXTRAIN_ONNXRUNTIME="-gpu")


def test_the_lowest_versions_are_the_tested_ones() -> None:
    """Lower bounds of pyproject.toml and hatch_build.py are what `make test-oldest` installs."""
    text = (ROOT / "pyproject.toml").read_text()
    runtime = re.search(r'MINIMUM = "(.+)"', (ROOT / "hatch_build.py").read_text())
    assert runtime
    declared = dict(re.findall(r'"([\w-]+)>=([\d.]+)', text)) | {"onnxruntime": runtime[1]}
    oldest = dict(
        line.split("==")
        for line in (ROOT / "tests" / "oldest.txt").read_text().splitlines()
        if line[0] != "#"
    )
    device = {"numpy", "onnxruntime", "safetensors"}
    assert device | {"onnx", "onnx-ir", "ml_dtypes", "rich", "typer", "onnxscript"} <= set(oldest)
    assert set(oldest) - set(declared) == {"pyparsing"}  # of matplotlib
    for name in oldest.keys() & declared.keys():
        bound = [int(part) for part in declared[name].split(".")]
        assert [int(part) for part in oldest[name].split(".")][: len(bound)] == bound, name


def test_the_torch_versions_that_are_tested_are_the_lowest_and_the_newest() -> None:
    """The bounds of pyproject.toml are what `make test-torch` installs."""
    bounds = re.search(r'"torch>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    tested = re.search(r"^TORCHES := ([\d.]+) ([\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert bounds
    assert tested
    assert tested[1] == bounds[1]
    newest, beyond = ([int(part) for part in text.split(".")[:2]] for text in (tested[2], bounds[2]))
    assert [newest[0], newest[1] + 1] == beyond


def test_where_onnxruntime_is_missing_the_way_is_named(tmp_path: Path) -> None:
    block = "import sys, importlib.abc\nclass Block(importlib.abc.MetaPathFinder):\n"
    block += "    def find_spec(self, name, path=None, target=None):\n"
    block += (
        "        if name == 'onnxruntime':\n            raise ModuleNotFoundError('No module', name=name)\n"
    )
    block += "sys.meta_path.insert(0, Block())\nimport onnxtrain.api\n"
    done = python("-c", block, code=1)
    assert "pip install onnxruntime, or onnxruntime-gpu for CUDA" in done.stderr
