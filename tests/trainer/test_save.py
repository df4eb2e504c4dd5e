"""`Trainer.save` writes changed files and leaves files of others alone."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

import models
from onnxtrain import ModelCheckpoint, Trainer
from onnxtrain.runtime.atomic import FileSet
from trainer import problems


def test_a_save_writes_what_has_changed_and_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problems.line()
    here, copy = tmp_path / "here", tmp_path / "copy"
    here.mkdir()
    onnx.save(problem.model, here / "mine.onnx")
    (here / "notes.data").write_text("private")
    trainer = Trainer(here / "mine.onnx", loss="mse", directory=here)
    written = []
    opened = FileSet.open
    monkeypatch.setattr(FileSet, "open", lambda files, name: (written.append(name), opened(files, name))[1])
    for _ in range(3):
        trainer.fit(
            problem.x, problem.y, epochs=1, verbose=False, callbacks=[ModelCheckpoint(copy, monitor=None)]
        )
    models = [
        "training_model.onnx",
        "eval_model.onnx",
        "inference_model.onnx",
        "optimizer_model.onnx",
        "manifest.json",
    ]
    assert sorted(written[:5]) == sorted(models)
    assert set(written[5:]) == {"checkpoint"}
    assert sorted(os.listdir(copy)) == sorted([*models, "checkpoint"])
    np.testing.assert_array_equal(
        Trainer.resume(copy).predict(problem.x), Trainer.resume(here).predict(problem.x)
    )
    # A file of the copy that somebody has changed is put right; so is a whole other run.
    (copy / "eval_model.onnx").write_bytes(b"damaged")
    (copy / "best").write_bytes(b"of another run")
    trainer.save(copy)
    assert Trainer.resume(copy).evaluate(problem.x, problem.y) == trainer.evaluate(problem.x, problem.y)
    assert not (copy / "best").exists()
    other = Trainer(problems.classes().model, loss="cross_entropy", directory=tmp_path / "other")
    other.save(copy)
    assert len(Trainer.resume(copy).parameters) == len(other.parameters)
    trainer.save(copy)
    assert Trainer.resume(copy).evaluate(problem.x, problem.y) == trainer.evaluate(problem.x, problem.y)


def test_external_data_of_the_models_is_saved_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problems.line()
    monkeypatch.setattr("onnxtrain.passes.io.save.DEFAULT_EXTERNAL_DATA_THRESHOLD", 1000)
    values = {"table": np.arange(1200, dtype=np.int64), "w": np.ones((3, 1), np.float32)}
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["m"]),
        onnx.helper.make_node("ReduceSum", ["table"], ["t"], keepdims=0),
        onnx.helper.make_node("Cast", ["t"], ["c"], to=1),
        onnx.helper.make_node("Add", ["m", "c"], ["y"]),
    ]
    model = models.make_model(nodes, {"x": ["n", 3]}, {"y": ["n", 1]}, values)
    trainer = Trainer(model, loss="mse", directory=tmp_path / "run")
    trainer.save(tmp_path / "copy")
    assert sorted(os.listdir(tmp_path / "copy")) == sorted(os.listdir(tmp_path / "run"))
    np.testing.assert_array_equal(
        Trainer.resume(tmp_path / "copy").predict(problem.x), trainer.predict(problem.x)
    )
