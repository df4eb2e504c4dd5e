"""Folders of images from the shell."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
import pytest
from PIL import Image

from images.problems import CLASSES, network, write
from onnxtrain import ImageFolder, Trainer
from onnxtrain.images._metadata import PROPERTY

PLAIN = ("--mean", 0, "--std", 1)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write(tmp_path / "photos" / "train", 8)
    write(tmp_path / "photos" / "val", 3, seed=500)
    onnx.save(network(), tmp_path / "m.onnx")
    return tmp_path / "photos"


def train(run: Any, photos: Path, *options: object, model: str = "m.onnx") -> Any:
    return run(
        *("train", photos.parent / model, "--loss", "cross_entropy", "--lr", 0.01, "--epochs", 2, "--json"),
        *("--data", photos / "train", "-o", photos.parent / "run", *options),
    )


def test_train_evaluate_predict_and_resume(run: Any, photos: Path, tmp_path: Path) -> None:
    options = ("--validation", photos / "val", "--flip", "--crop", "0.4,0.9", *PLAIN)
    result = train(run, photos, *options)
    assert result.code == 0, result.err
    trainer = Trainer(network(), "cross_entropy", learning_rate=0.01)
    folder = ImageFolder(photos / "train", flip=True, crop=(0.4, 0.9), mean=0, std=1)
    history = trainer.fit(folder, validation=photos / "val", epochs=2, verbose=False)
    assert result.json()["epochs"] == history.epochs

    shown = run("evaluate", tmp_path / "run", "--data", photos / "val", "--json").json()
    expected = trainer.evaluate(photos / "val")
    assert {key: shown[key] for key in expected} == expected
    assert [row["class"] for row in shown["classes"]] == list(CLASSES)
    assert shown["confusion_matrix"] == trainer.confusion_matrix(photos / "val").tolist()

    assert run("predict", tmp_path / "run", "--data", photos / "val", "-o", tmp_path / "p.csv").code == 0
    frame = pd.read_csv(tmp_path / "p.csv")
    assert list(frame) == ["path", "class", *(f"probability_{name}" for name in CLASSES)]
    assert list(frame["path"]) == [str(path) for path in sorted((photos / "val").rglob("*.png"))]
    probability = trainer.predict_proba(photos / "val")
    np.testing.assert_allclose(frame.iloc[:, 2:], probability, rtol=1e-5)
    assert list(frame["class"]) == [CLASSES[index] for index in probability.argmax(axis=1)]

    # The run remembers the options, and the validation folder beside its data.
    more = run("train", tmp_path / "run", "--data", photos / "train", "--epochs", 1, "--json")
    assert more.code == 0, more.err
    assert "val_loss" in more.json()["epochs"][2]
    assert len(more.json()["epochs"]) == 3
    again = trainer.fit(folder, validation=photos / "val", epochs=1, verbose=False)
    assert more.json()["epochs"] == again.epochs
    refused = run("train", tmp_path / "run", "--data", photos / "train", "--mean", 0.5)
    assert "--mean 0.5 (it was 0)" in " ".join(refused.err.split())


@pytest.mark.thorough
def test_the_exported_file_predicts_the_same(run: Any, photos: Path, tmp_path: Path) -> None:
    assert train(run, photos, *PLAIN).code == 0
    flat = tmp_path / "flat"
    flat.mkdir()
    for index, path in enumerate(sorted((photos / "val").rglob("*.png"))):
        path.rename(flat / f"{index}.png")
    (flat / "broken.jpg").write_bytes(b"x")
    frames = []
    for name in ("run", "run/trained.onnx"):
        result = run("predict", tmp_path / name, "--data", flat, "-o", tmp_path / "p.csv")
        assert result.code == 0, result.err
        assert "1 of 10 images cannot be read and are skipped" in " ".join(result.err.split())
        frames.append(pd.read_csv(tmp_path / "p.csv"))
    assert list(frames[0]["path"]) == [str(flat / f"{index}.png") for index in range(9)]
    assert list(frames[0]["class"]) == list(frames[1]["class"])
    np.testing.assert_allclose(frames[0].iloc[:, 2:], frames[1].iloc[:, 2:], rtol=1e-4)
    # By ONNX Runtime alone, with what the file says.
    session = ort.InferenceSession(tmp_path / "run" / "trained.onnx")
    content = json.loads(session.get_modelmeta().custom_metadata_map[PROPERTY])
    with Image.open(flat / "0.png") as image:
        small = image.resize((int(24 * image.width / image.height), 24), Image.Resampling.BILINEAR)
    left = round((small.width - 24) / 2)
    x = np.moveaxis(np.asarray(small.crop((left, 0, left + 24, 24)), np.float32), -1, 0)[None] / 255
    (scores,) = session.run(None, {"x": x})
    assert content["classes"][scores[0].argmax()] == frames[0]["class"][0]


def test_a_resumed_run_reads_a_folder_only_if_it_is_passed(run: Any, photos: Path, tmp_path: Path) -> None:
    assert train(run, photos, *PLAIN).code == 0
    asked = run("train", tmp_path / "run", "--epochs", 1)
    assert asked.code == 1
    assert "was trained on the folder" in " ".join(asked.err.split())
    assert "Pass it with --data DIR" in " ".join(asked.err.split())
    again = run("train", tmp_path / "run", "--data", photos / "train", "--epochs", 1)
    assert again.code == 0, again.err


def test_a_trial_run_on_a_folder(run: Any, photos: Path) -> None:
    result = train(
        run, photos, *PLAIN, "--validation", photos / "val", "--batch-size", 4, "--limit-batches", 2
    )
    assert result.code == 0, result.err
    assert max(result.json()["differences"].values()) < 1e-5
    assert Trainer.resume(photos.parent / "run").global_step == 4


def test_a_picture_of_mistakes(run: Any, photos: Path, tmp_path: Path) -> None:
    assert train(run, photos, *PLAIN).code == 0
    arguments = ("evaluate", tmp_path / "run", "--data", photos / "val", "--mistakes")
    result = run(*arguments, tmp_path / "m.png")
    assert result.code == 0, result.err
    assert "m.png" in result.out
    with Image.open(tmp_path / "m.png") as image:
        assert image.format == "PNG"
        assert image.width > 400
    assert run(*arguments, tmp_path / "m.txt").code == 1
    assert "--mistakes" in run(*arguments, tmp_path / "m.txt").err


def test_evaluate_a_model_file(run: Any, photos: Path, tmp_path: Path) -> None:
    assert train(run, photos, *PLAIN).code == 0
    (photos / "val" / "circle" / "broken.png").write_bytes(b"no image")
    model = tmp_path / "run" / "trained.onnx"
    shown = run("evaluate", model, "--data", photos / "val", "--loss", "cross_entropy", "--json")
    assert shown.code == 0, shown.err
    expected = run("evaluate", tmp_path / "run", "--data", photos / "val", "--json").json()
    for key in ("loss", "accuracy"):
        assert shown.json()[key] == pytest.approx(expected[key], rel=1e-5)
    assert shown.json()["confusion_matrix"] == expected["confusion_matrix"]
    assert [row["class"] for row in shown.json()["classes"]] == list(CLASSES)
    # Without --loss there is none to print.
    assert "loss" not in run("evaluate", model, "--data", photos / "val", "--json").json()

    shutil.rmtree(photos / "val" / "circle")
    fewer = run("evaluate", model, "--data", photos / "val", "--json")
    assert fewer.code == 0, fewer.err
    (photos / "val" / "star").mkdir()
    shutil.copy(next((photos / "val" / CLASSES[1]).iterdir()), photos / "val" / "star")
    unknown = run("evaluate", model, "--data", photos / "val")
    assert unknown.code == 1
    assert "the subfolders star" in " ".join(unknown.err.split())


def test_evaluate_a_model_file_that_does_not_name_its_classes(run: Any, photos: Path, tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "plain.onnx")
    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": false, "do_rescale": true}')
    plain = run("evaluate", tmp_path / "plain.onnx", "--data", photos / "val", "--json")
    assert plain.code == 0, plain.err
    # The classes are the subfolders in sorted order.
    trainer = Trainer(network(), "cross_entropy")
    expected = trainer.evaluate(ImageFolder(photos / "val", mean=0, std=1))
    assert plain.json()["accuracy"] == pytest.approx(expected["accuracy"])
    shutil.rmtree(photos / "val" / CLASSES[0])
    fewer = run("evaluate", tmp_path / "plain.onnx", "--data", photos / "val")
    assert fewer.code == 1
    assert "does not name its classes" in " ".join(fewer.err.split())


def test_options_say_how_a_model_file_takes_images(run: Any, photos: Path, tmp_path: Path) -> None:
    model, options = tmp_path / "m.onnx", ("--mean", "0.5,0.4,0.3", "--std", 0.25, "--resize", 30)
    unknown = run("evaluate", model, "--data", photos / "val")
    assert unknown.code == 1
    message = " ".join(unknown.err.split())
    assert "--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 for most networks" in message
    assert "of `onnxtrain train`" not in message
    shown = run("evaluate", model, "--data", photos / "val", "--loss", "cross_entropy", "--json", *options)
    assert shown.code == 0, shown.err
    folder = ImageFolder(photos / "val", mean=(0.5, 0.4, 0.3), std=0.25, resize=30)
    trainer = Trainer(network(), "cross_entropy")
    assert shown.json()["loss"] == pytest.approx(trainer.evaluate(folder)["loss"], rel=1e-5)
    result = run("predict", model, "--data", photos / "val", *options, "-o", tmp_path / "p.npz")
    assert result.code == 0, result.err
    (scores,) = (array for array in dict(np.load(tmp_path / "p.npz")).values() if array.ndim == 2)
    np.testing.assert_allclose(scores, trainer.predict(folder), rtol=1e-4, atol=1e-6)


def test_a_run_prepares_images_as_in_training(run: Any, photos: Path, tmp_path: Path) -> None:
    assert train(run, photos, *PLAIN).code == 0
    for command in ("evaluate", "predict"):
        refused = run(command, tmp_path / "run", "--data", photos / "val", "--mean", 0.5)
        assert refused.code == 1
        assert "which has the size, mean and standard deviation of its training" in " ".join(
            refused.err.split()
        )
        np.savez(tmp_path / "x.npz", x=np.zeros((2, 3, 24, 24), np.float32), y=np.zeros(2, np.int64))
        refused = run(command, tmp_path / "m.onnx", "--data", tmp_path / "x.npz", "--std", 0.5)
        assert refused.code == 1
        assert "--std are for folders of images" in " ".join(refused.err.split())


def test_evaluate_a_model_file_with_a_single_score(run: Any, photos: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(photos / split / CLASSES[2])
    onnx.save(network(1), tmp_path / "one.onnx")
    assert train(run, photos, "--loss", "bce_with_logits", *PLAIN, model="one.onnx").code == 0
    expected = run("evaluate", tmp_path / "run", "--data", photos / "val", "--json").json()
    model = tmp_path / "run" / "trained.onnx"
    shown = run("evaluate", model, "--data", photos / "val", "--loss", "bce_with_logits", "--json")
    assert shown.code == 0, shown.err
    assert {key: shown.json()[key] for key in ("loss", "accuracy")} == pytest.approx(
        {key: expected[key] for key in ("loss", "accuracy")}, rel=1e-5
    )


@pytest.mark.thorough
def test_the_model_s_own_split_and_fractions(run: Any, photos: Path, tmp_path: Path) -> None:
    split = train(run, photos, *PLAIN, "--data", photos)
    assert split.code == 0
    assert "val_loss" in split.json()["epochs"][0]
    options = ("--validation", 0.25, "--stratify", "--class-weight", "circle=2", "--overwrite", *PLAIN)
    fraction = train(run, photos, *options, "--metric", "f1", "--positive", "square")
    assert fraction.code == 0, fraction.err
    assert "val_f1" in fraction.json()["epochs"][0]
    mixed = train(run, photos, "--mixup", 0.3, "--validation", photos / "val", "--overwrite", *PLAIN)
    assert mixed.code == 0, mixed.err


@pytest.mark.thorough
def test_files_beside_the_model_and_new_heads(run: Any, photos: Path, tmp_path: Path) -> None:
    config = {"mean": [0.0] * 3, "std": [1.0] * 3, "input_size": [3, 24, 24], "crop_pct": 1.0}
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": config}))
    by_file = train(run, photos)
    assert by_file.code == 0, by_file.err
    by_hand = train(
        run,
        photos,
        "--resize",
        24,
        "--interpolation",
        "bilinear",
        "--image-workers",
        2,
        "--overwrite",
        *PLAIN,
    )
    assert by_file.json()["epochs"] == by_hand.json()["epochs"]
    onnx.save(network(7), tmp_path / "seven.onnx")
    refused = train(run, photos, "--overwrite", model="seven.onnx")
    assert "Give it a new last layer with --replace-head 3" in " ".join(refused.err.split())
    assert train(run, photos, "--overwrite", "--replace-head", 3, model="seven.onnx").code == 0


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225"),
        (("--mean", "a", "--std", 1), "--mean is 'a'"),
        (("--mean", 0.5), "--mean is given without --std"),
        (("--image-size", "24,-1", *PLAIN), "--image-size is '24,-1'"),
        (("--image-size", 32, *PLAIN), "--image-size is 32 x 32"),
        (("--crop", 2, *PLAIN), "--crop must be the smallest share"),
        (("--sample-weight", "w", *PLAIN), "images of a folder have no weights"),
        (("--target", "class", *PLAIN), "are for tables"),
        (("--validation", "x.npz", *PLAIN), "no such file"),
        (("--class-weight", "dog=2", *PLAIN), "the classes are circle, square, triangle"),
    ],
)
def test_what_does_not_fit_is_refused(run: Any, photos: Path, options: Any, words: str) -> None:
    result = train(run, photos, *options)
    assert result.code == 1
    assert words in " ".join(result.err.split())
    assert not (photos.parent / "run").exists()


def test_options_for_images_need_a_folder(run: Any, mlp: Path, data: Path) -> None:
    result = run("train", mlp, "--data", data, "--loss", "cross_entropy", "--flip", "--image-size", 24)
    assert result.code == 1
    assert "--image-size, --flip are for folders of images" in " ".join(result.err.split())


def test_a_table_does_not_fit_a_run_on_images(run: Any, photos: Path, tmp_path: Path) -> None:
    assert train(run, photos, *PLAIN).code == 0
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    refused = run("evaluate", tmp_path / "run", "--data", tmp_path / "a.csv")
    assert refused.code == 1
    assert "was not trained on a table" in " ".join(refused.err.split())


def test_export_includes_the_preprocessing(run: Any, photos: Path, tmp_path: Path) -> None:
    assert train(run, photos, *PLAIN).code == 0
    whole = tmp_path / "whole.onnx"
    assert run("export", tmp_path / "run", "--include-preprocessing", "-o", whole).code == 0
    assert onnx.load(whole).graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8
    tables = []
    for source in (tmp_path / "run", whole):
        assert run("predict", source, "--data", photos / "train", "-o", tmp_path / "out.csv").code == 0
        with open(tmp_path / "out.csv") as file:
            tables.append(list(csv.DictReader(file)))
    assert len(tables[0]) > 5
    for ours, theirs in zip(*tables, strict=True):
        assert (ours["path"], ours["class"]) == (theirs["path"], theirs["class"])
