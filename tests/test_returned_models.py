"""Functions over models return an IR model for an IR model, else a proto that `onnx.save` takes, with its weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import models
from onnxtrain import Trainer, differentiate, make_batch_dynamic, replace_head, restore_dropout
from onnxtrain.functional import hessian_vector_product, jvp, per_sample_gradients, vjp
from onnxtrain.passes.io import save as saving


def scalar() -> onnx.ModelProto:
    """x [1, 3] -> loss [], of weights large enough for a file of their own."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[1, 3] x) => (float loss)
        { a = MatMul(x, w) b = Tanh(a) loss = ReduceMean<keepdims=0>(b) }"""
    )
    w = np.random.default_rng(0).standard_normal((3, 500)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    return model


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[], onnx.ModelProto]]] = {
    "replace_head": (lambda model: replace_head(model, 5), lambda: models.mlp(hidden=300)),
    "make_batch_dynamic": (make_batch_dynamic, lambda: models.mlp(hidden=300)),
    "restore_dropout": (
        lambda model: restore_dropout(model, 0.5, before="w2"),
        lambda: models.mlp(hidden=300),
    ),
    "differentiate": (lambda model: differentiate(model, "loss", ["w"]), scalar),
    "vjp": (lambda model: vjp(model, ["loss"], ["w"]), scalar),
    "jvp": (lambda model: jvp(model, ["loss"], ["w"]), scalar),
    "hessian_vector_product": (lambda model: hessian_vector_product(model, "loss", ["w"]), scalar),
    "per_sample_gradients": (
        lambda model: per_sample_gradients(model, "loss", ["w"]),
        scalar,
    ),
}


def answer(model: onnx.ModelProto | str) -> list[np.ndarray]:
    """The outputs for inputs that are drawn by their shapes."""
    session = ort.InferenceSession(model if isinstance(model, str) else model.SerializeToString())
    rng = np.random.default_rng(1)
    feeds = {
        value.name: rng.standard_normal([d if isinstance(d, int) else 2 for d in value.shape]).astype(
            np.float32
        )
        for value in session.get_inputs()
    }
    return session.run(None, feeds)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_form_of_what_was_given(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path whose weights lie beside it, too: the result is saved elsewhere, and has them with it."""
    function, make = FUNCTIONS[name]
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    path = tmp_path / "source" / "net.onnx"
    onnx.save_model(make(), path, save_as_external_data=True, location="net.data", size_threshold=100)
    assert (tmp_path / "source" / "net.data").exists()
    monkeypatch.chdir(tmp_path)
    given: list[Any] = [str(path), path, onnx.load(path), make(), ir.load(path)]
    results = [function(model) for model in given]
    assert [isinstance(result, ir.Model) for result in results] == [False] * 4 + [True]
    answers = []
    for index, result in enumerate(results[:4]):
        target = tmp_path / "target" / f"{index}.onnx"
        onnx.save(result, target)
        answers.append(target)
    ir.save(results[4], tmp_path / "target" / "4.onnx")
    answers.append(tmp_path / "target" / "4.onnx")
    os.rename(tmp_path / "source", tmp_path / "gone")
    expected = answer(str(answers[0]))
    if name != "restore_dropout":  # it draws
        for target in answers[1:]:
            for value, reference in zip(answer(str(target)), expected, strict=True):
                np.testing.assert_array_equal(value, reference)


def test_one_after_the_other(tmp_path: Path) -> None:
    model = restore_dropout(replace_head(make_batch_dynamic(models.mlp()), 5), 0.5, before="w2")
    assert isinstance(model, onnx.ModelProto)
    onnx.save(model, tmp_path / "net.onnx")
    trainer = Trainer(tmp_path / "net.onnx", "cross_entropy")
    assert sorted(name for name, _ in trainer.parameters) == ["b1", "b2", "w1", "w2"]  # not the ratio


def test_what_is_too_large_for_a_proto_says_what_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "DEFAULT_EXTERNAL_DATA_THRESHOLD", 100)
    with pytest.raises(Exception, match=r"pass onnx_ir.load\(path\) instead of the path"):
        replace_head(models.mlp(), 5)
    assert isinstance(replace_head(ir.from_proto(models.mlp()), 5), ir.Model)
