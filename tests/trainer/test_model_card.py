"""The model card, read by the package of the Hugging Face Hub."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from huggingface_hub import ModelCard

import onnxtrain
from onnxtrain import Trainer
from trainer import problems


@pytest.fixture
def trainer() -> Trainer:
    problem = problems.classes(samples=50)
    trainer = Trainer(
        problem.model, problem.loss, "sgd", 0.1, scheduler="cosine", seed=7, metrics=["accuracy", "f1"]
    )
    trainer.fit(
        problem.x, problem.y, epochs=2, batch_size=8, validation=0.2, class_weight="balanced", verbose=False
    )
    return trainer


def rows(text: str) -> dict[str, str]:
    """Read the tables of two columns."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def test_the_hub_reads_what_was_measured(trainer: Trainer, tmp_path: Path) -> None:
    problem = problems.classes(samples=50)
    title = 'Three: "features" | of four'
    results = {"the test set": trainer.evaluate(problem.x, problem.y) | {"odd": float("nan")}}
    trainer.model_card(
        tmp_path,
        title,
        description="Says *which* is largest.",
        license="mit",
        tags=["tabular"],
        results=results,
    )
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "onnx"
    assert card.data.license == "mit"
    assert card.data.tags == ["onnx", "onnxtrain", "tabular"]
    assert card.data.model_name == title
    read = {(r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    assert read == {
        ("the test set", key): value for key, value in results["the test set"].items() if key != "odd"
    }
    assert card.text.strip().startswith(f"# {title}\n\nSays *which* is largest.\n")


def test_it_tells_data_options_and_versions(trainer: Trainer, tmp_path: Path) -> None:
    trainer.model_card(tmp_path / "card.md", "digits", model="digits.onnx")
    text = (tmp_path / "card.md").read_text(encoding="utf-8")
    told = rows(text)
    expected: dict[str, Any] = {
        "samples": 40,
        "validation": "0.2 of the samples, split off",
        "optimizer steps": 10,
        "optimizer": "SGD",
        "learning rate": 0.1,
        "scheduler": "cosine",
        "seed": 7,
        "batch size": 8,
        "epochs": 2,
        "class weight": trainer.last_fit.class_weight,  # type: ignore[union-attr]
        "onnxtrain": onnxtrain.__version__,
        "onnxruntime": ort.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
    }
    for key, value in expected.items():
        assert told[key] == str(value), key
    assert "| loss | CrossEntropyLoss |" in text
    for key in ("loss", "accuracy", "f1", "val_loss", "val_accuracy", "val_f1"):
        assert key in text
    assert float(told["val_loss"]) == pytest.approx(trainer.history.last["val_loss"], abs=1e-3)
    assert "| x | float32 | [batch, 4] |" in text
    parameters = sum(parameter.data.size for _, parameter in trainer.parameters)
    assert f"{parameters:,} parameters, of which {parameters:,} were trained" in text


def test_its_example_runs(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer.export("net.onnx")
    trainer.model_card(".", "net", model="net.onnx")
    code = Path("README.md").read_text(encoding="utf-8").split("```")[1].removeprefix("python\n")
    x = problems.classes(samples=5).x
    names: dict[str, Any] = {"x": x}
    exec(code.replace("...", "x"), names)
    np.testing.assert_allclose(names["outputs"][0], trainer.predict(x), rtol=1e-5)
