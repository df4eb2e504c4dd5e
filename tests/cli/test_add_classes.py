"""`--add-classes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from images.problems import draw, network
from onnxtrain import ImageFolder, Trainer, add_classes


def outputs_of(path: Path, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def test_the_option_does_what_the_function_does(run: Any, mlp: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 4)).astype(np.float32)
    np.savez(tmp_path / "five.npz", x=x, y=rng.integers(0, 5, 90))
    options = (
        "--add-classes",
        2,
        "--train",
        "added.*",
        "--loss",
        "cross_entropy",
        "--epochs",
        2,
        "--seed",
        3,
    )
    trained = run("train", mlp, "--data", tmp_path / "five.npz", *options, "-o", tmp_path / "run")
    assert trained.code == 0, trained.err
    trainer = Trainer(add_classes(mlp, 2, seed=3), "cross_entropy", requires_grad="added.*", seed=3)
    with np.load(tmp_path / "five.npz") as data:
        trainer.fit(data["x"], data["y"], epochs=2, verbose=False)
    found = outputs_of(tmp_path / "run" / "trained.onnx", x)
    np.testing.assert_array_equal(found, trainer.predict(x))
    np.testing.assert_array_equal(found[:, :3], outputs_of(mlp, x))
    again = run("train", tmp_path / "run", "--data", tmp_path / "five.npz", "--add-classes", 1)
    assert "--add-classes 1 (it was 2)" in again.err


@pytest.mark.parametrize("command", ["train", "artifacts", "plan"])
def test_a_new_and_a_wider_head_exclude_each_other(
    run: Any, mlp: Path, data: Path, tmp_path: Path, command: str
) -> None:
    more = {
        "train": ("--data", data, "-o", tmp_path / "x"),
        "artifacts": ("-o", tmp_path / "x"),
        "plan": ("--memory", "1GB"),
    }[command]
    options = ("--loss", "cross_entropy", "--replace-head", 4, "--add-classes", 2)
    refused = run(command, mlp, *options, *more)
    assert refused.code == 1
    assert "--replace-head makes a new last layer, and --add-classes keeps it" in " ".join(
        refused.err.split()
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.thorough
def test_old_classes_of_images_keep_their_places(run: Any, tmp_path: Path) -> None:
    for name in ("circle", "square", "triangle"):
        (tmp_path / "all" / name).mkdir(parents=True)
        for index in range(8):
            draw(name, index).save(tmp_path / "all" / name / f"{index}.png")
    (tmp_path / "two").mkdir()
    for name in ("circle", "triangle"):
        (tmp_path / "two" / name).symlink_to(tmp_path / "all" / name)
    onnx.save(network(2), tmp_path / "m.onnx")
    how = ("--loss", "cross_entropy", "--mean", "0.5", "--std", "0.5", "--epochs", 1)
    assert run("train", tmp_path / "m.onnx", "--data", tmp_path / "two", *how, "-o", tmp_path / "a").code == 0
    old = tmp_path / "a" / "trained.onnx"
    more = ("--data", tmp_path / "all", "--add-classes", 1, "--train", "added.*", "-o", tmp_path / "b")
    trained = run("train", old, *how[:2], "--epochs", 3, *more)
    assert trained.code == 0, trained.err
    new = tmp_path / "b" / "trained.onnx"
    metadata = {entry.key: entry.value for entry in onnx.load(new).metadata_props}
    assert json.loads(metadata["onnxtrain.images"])["classes"] == ["circle", "triangle", "square"]
    x = np.random.default_rng(0).normal(size=(3, 3, 24, 24)).astype(np.float32)
    np.testing.assert_array_equal(outputs_of(new, x)[:, :2], outputs_of(old, x))
    # Labels follow: the loss of each image is that of its own class.
    trainer = Trainer.resume(tmp_path / "b")
    values = trainer.evaluate(tmp_path / "all")
    folder = ImageFolder(tmp_path / "all")
    proba = trainer.predict_proba(folder)
    places = np.array([["circle", "triangle", "square"].index(name) for name in folder.classes])
    truth = places[np.asarray(folder.labels)]
    expected = -np.log(proba[np.arange(len(truth)), truth].astype(np.float64)).mean()
    assert values["loss"] == pytest.approx(expected, rel=1e-4)
    assert values["accuracy"] == (proba.argmax(axis=1) == truth).mean()
