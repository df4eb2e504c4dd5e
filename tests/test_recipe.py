"""`Recipe`: its checks, and the functions that take one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models
from fresh_process import python
from onnxtrain import OnnxClassifier, Recipe, Trainer, generate_artifacts, plan_training
from onnxtrain.errors import GraphBuildError, InputError


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"requires_grad": 3}, TypeError, "requires_grad is a int; pass a list of strings"),
        ({"frozen_params": ["a", 1]}, TypeError, "frozen_params contains 1; pass a list"),
        ({"dropout": 1.0}, InputError, "dropout must be a number in \\[0, 1\\)"),
        ({"precision": "fp16"}, ValueError, "precision='fp16' is unknown; pass one of 'fp32', 'bf16'"),
        (
            {"activations": "int8"},
            ValueError,
            "activations='int8' is unknown; pass one of 'float', 'deployed'",
        ),
        ({"profile": "web"}, ValueError, "profile='web' is unknown; pass one of 'default', 'portable'"),
        ({"recompute": "all"}, ValueError, "recompute='all' is unknown; pass True, False or 'cheap'"),
        ({"profile": "portable", "precision": "bf16"}, GraphBuildError, "cannot be combined"),
        ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, GraphBuildError, "clip_grad_value, not both"),
    ],
)
def test_a_wrong_field_is_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Recipe(**fields)


def test_a_single_name_needs_no_list() -> None:
    recipe = Recipe(requires_grad="fc.*", loss_input_names=("logits",))
    assert (recipe.requires_grad, recipe.loss_input_names) == (["fc.*"], ["logits"])
    assert dataclasses.replace(recipe, precision="bf16").requires_grad == ["fc.*"]


def test_importing_it_imports_no_onnx() -> None:
    code = "import sys, onnxtrain; onnxtrain.Recipe(loss='mse'); assert 'onnx' not in sys.modules"
    python("-c", code)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_a_recipe_and_arguments_write_the_same_files(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "loss": "cross_entropy",
        "optimizer": "sgd",
        "requires_grad": ["w2", "b*"],
        "additional_output_names": ["logits"],
        "recompute": True,
    }
    generate_artifacts(models.mlp(), artifact_directory=tmp_path / "a", **fields)
    generate_artifacts(models.mlp(), artifact_directory=tmp_path / "b", recipe=Recipe(**fields))
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_the_optimizer_of_a_recipe_clips(tmp_path: Path) -> None:
    recipe = Recipe(loss="cross_entropy", clip_grad_norm=0.5)
    generate_artifacts(models.mlp(), artifact_directory=tmp_path, recipe=recipe)
    entry = json.loads((tmp_path / "manifest.json").read_text())["optimizer"]
    assert entry["type"] == "AdamW"
    assert "0.5" in json.dumps(entry)


@pytest.mark.parametrize(
    "call",
    [
        lambda **given: generate_artifacts(models.mlp(), **given),
        lambda **given: plan_training(models.mlp(), "1GB", **given),
        lambda **given: Trainer(models.mlp(), **given),
    ],
    ids=["generate_artifacts", "plan_training", "Trainer"],
)
def test_a_field_beside_the_recipe_is_an_error(call: Any) -> None:
    with pytest.raises(
        TypeError, match=r"pass precision in the recipe or as an argument, not both: a recipe sets all"
    ):
        call(recipe=Recipe(), precision="bf16")
    with pytest.raises(TypeError, match=r"recipe is a dict; pass an onnxtrain.Recipe"):
        call(recipe={"loss": "mse"})


def data() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 4)).astype(np.float32)
    return x, x[:, :3].argmax(1)


def test_a_trainer_trains_by_a_recipe() -> None:
    fields: dict[str, Any] = {"loss": "cross_entropy", "optimizer": "sgd", "frozen_params": ["w1"]}
    histories = [
        Trainer(models.mlp(), **given).fit(*data(), epochs=2, verbose=False).epochs
        for given in (fields, {"recipe": Recipe(**fields)})
    ]
    assert histories[0] == histories[1]


def test_a_trainer_returns_further_outputs_of_a_recipe() -> None:
    trainer = Trainer(models.mlp(), recipe=Recipe(loss="cross_entropy", additional_output_names="h"))
    assert trainer.prediction == "logits"
    # A fit with sample weights builds the models again.
    trainer.fit(*data(), sample_weight=np.ones(40), epochs=1, verbose=False)
    assert trainer.manifest.outputs == ("loss", "logits", "h")


def test_an_estimator_trains_by_a_recipe() -> None:
    x, y = data()
    recipe = Recipe(optimizer="sgd", clip_grad_norm=0.1)
    slow = OnnxClassifier(recipe=recipe, epochs=3, random_state=0).fit(x, y)
    fast = OnnxClassifier(optimizer="sgd", epochs=3, random_state=0).fit(x, y)
    assert slow.history_["loss"] != fast.history_["loss"]
    with pytest.raises(TypeError, match="pass optimizer in the recipe or as an argument"):
        OnnxClassifier(optimizer="sgd", recipe=recipe).fit(x, y)
