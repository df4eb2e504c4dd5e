"""The examples run, where the package that they are for is installed."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

from fresh_process import python

FOLDER = Path(__file__).parents[1] / "examples" / "ortmodule"
SOURCE = Path(__file__).parents[1] / "src"


def run(script: str, *arguments: str) -> str:
    path = [SOURCE, os.environ.get("PYTHONPATH", "")]
    return python(script, *arguments, cwd=FOLDER, path=path, OMP_NUM_THREADS="1").stdout


@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.parametrize(
    ("script", "packages", "epochs", "accuracy"),
    [
        ("plain_pytorch.py", [], 3, 0.95),
        pytest.param(
            *("huggingface_trainer.py", ["transformers", "accelerate"], 3, 0.6), marks=pytest.mark.thorough
        ),
        pytest.param("lightning_module.py", ["lightning"], 2, 0.9, marks=pytest.mark.thorough),
    ],
)
def test_example_learns_in_onnxruntime(
    script: str, packages: list[str], epochs: int, accuracy: float
) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    printed = run(script, "--epochs", str(epochs))
    last = re.findall(r"test accuracy (\d\.\d+)", printed)[-1]
    assert float(last) >= accuracy, printed
    report = printed[printed.index("graph    mode") :]
    assert "ONNX Runtime" in report
    assert "PyTorch" not in report, report


@pytest.mark.thorough
def test_a_pass_of_olive_fine_tunes_before_olive_quantizes() -> None:
    if importlib.util.find_spec("olive") is None:
        pytest.skip("needs olive-ai")
    script = FOLDER.parent / "olive" / "fine_tune.py"
    printed = python(script, "--epochs", "3", path=[SOURCE, os.environ.get("PYTHONPATH", "")]).stdout
    rows = re.findall(r"(fine-tuned|quantized): test accuracy (\d\.\d+), (\d+) kB", printed)
    (_, tuned, size), (_, quantized, small) = rows
    assert float(tuned) > 0.9, printed
    assert float(quantized) > 0.85, printed
    assert int(small) < int(size) / 2, printed
