"""Folders of images as data of a trainer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from images.problems import CLASSES, draw, network, write
from onnxtrain import Callback, ImageFolder, Trainer
from onnxtrain.errors import InputError
from onnxtrain.images._metadata import PROPERTY
from onnxtrain.losses import CrossEntropyLoss
from onnxtrain.trainer import MixUp

# Uint8 inputs take no mean, all others of these networks do.
PLAIN = {"mean": 0.0, "std": 1.0}


def pixels(path: Path, side: int = 24) -> np.ndarray:
    """An input of the network, float32 [3, side, side], by Pillow."""
    with Image.open(path) as image:
        width, height = image.size
        assert width > height
        image = image.convert("RGB").resize((int(side * width / height), side), Image.Resampling.BILINEAR)
        left = round((image.width - side) / 2)
        array = np.asarray(image.crop((left, 0, left + side, side)), np.float32)
    return np.moveaxis(array / np.float32(255), -1, 0)


def arrays(root: Path) -> tuple[np.ndarray, np.ndarray]:
    paths = [(path, index) for index, name in enumerate(CLASSES) for path in sorted((root / name).iterdir())]
    return np.stack([pixels(path) for path, _ in paths]), np.array([index for _, index in paths])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write(tmp_path / "train", 10)
    write(tmp_path / "val", 4, seed=500)
    return tmp_path


def trainer(model: Any = None, **settings: Any) -> Trainer:
    return Trainer(
        network() if model is None else model, **({"loss": "cross_entropy", "learning_rate": 0.01} | settings)
    )


def weights(trained: Trainer) -> dict[str, np.ndarray]:
    return {name: parameter.data.copy() for name, parameter in trained.parameters}


def assert_equal(first: Trainer, second: Trainer) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], name)


def test_a_folder_trains_evaluates_and_predicts_as_its_arrays(photos: Path) -> None:
    x, y = arrays(photos / "train")
    held_x, held_y = arrays(photos / "val")
    of_arrays, of_folder = trainer(), trainer()
    settings: Any = {"epochs": 3, "batch_size": 7, "verbose": False}
    of_arrays.fit(x, y, validation=(held_x, held_y), **settings)
    of_folder.fit(ImageFolder(photos / "train", **PLAIN), validation=photos / "val", **settings)
    assert_equal(of_arrays, of_folder)
    assert of_folder.history.epochs == of_arrays.history.epochs
    assert of_folder.evaluate(photos / "val") == of_arrays.evaluate(held_x, held_y)
    np.testing.assert_array_equal(of_folder.predict(str(photos / "val")), of_arrays.predict(held_x))
    files = [photos / "val" / "square" / "001.png", str(photos / "train" / "circle" / "000.png")]
    expected = of_arrays.predict(np.stack([pixels(Path(path)) for path in files]))
    np.testing.assert_array_equal(of_folder.predict(files), expected)
    np.testing.assert_array_equal(
        of_folder.confusion_matrix(photos / "val"), of_arrays.confusion_matrix(held_x, held_y)
    )


def test_results_do_not_depend_on_the_number_of_threads(photos: Path) -> None:
    trained = []
    for workers in (1, 2, 7):
        one = trainer(seed=3)
        folder = ImageFolder(photos / "train", flip=True, crop=0.4, workers=workers, **PLAIN)
        one.fit(folder, epochs=2, batch_size=8, validation=0.2, verbose=False)
        trained.append(one)
    assert_equal(trained[0], trained[1])
    assert_equal(trained[0], trained[2])
    plain = trainer(seed=3)
    plain.fit(ImageFolder(photos / "train", **PLAIN), epochs=2, batch_size=8, validation=0.2, verbose=False)
    assert any(not np.array_equal(value, weights(plain)[name]) for name, value in weights(trained[0]).items())


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


def test_a_resumed_fit_is_bit_equal(photos: Path, tmp_path: Path) -> None:
    folder = ImageFolder(photos / "train", flip=True, crop=0.4, **PLAIN)
    settings: Any = {"epochs": 3, "batch_size": 8, "validation": 0.2, "verbose": False}
    whole = trainer()
    whole.fit(folder, **settings)

    first = trainer(directory=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        first.fit(folder, callbacks=[Stop(4)], **settings)
    first.save(tmp_path / "run")
    resumed = Trainer.resume(tmp_path / "run")
    with pytest.raises(InputError, match="flip True"):
        resumed.fit(ImageFolder(photos / "train"), **settings)
    resumed.fit(ImageFolder(photos / "train", flip=True, crop=0.4, workers=3), **settings)
    assert_equal(whole, resumed)
    assert [{**epoch} for epoch in resumed.history.epochs] == whole.history.epochs


def test_augmentation_is_for_training_only(photos: Path) -> None:
    one = trainer()
    augmented = ImageFolder(photos / "train", flip=True, crop=0.2, **PLAIN)
    one.fit(augmented, validation=augmented, verbose=False)
    plain = one.evaluate(photos / "train")
    assert one.evaluate(augmented) == plain
    assert {key: one.history.last[f"val_{key}"] for key in plain} == plain


def test_the_folder_s_own_split_validates(photos: Path) -> None:
    one, other = trainer(), trainer()
    one.fit(ImageFolder(photos, **PLAIN), verbose=False)
    other.fit(ImageFolder(photos / "train", **PLAIN), validation=photos / "val", verbose=False)
    assert one.history.epochs == other.history.epochs
    with pytest.raises(InputError, match="has the splits train, val"):
        one.evaluate(photos)


def test_a_stratified_split_decodes_nothing(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a file was decoded")

    monkeypatch.setattr("onnxtrain.images._pipeline.open_image", refuse)
    folder = ImageFolder(photos / "train", **PLAIN)
    trainer().check_data(folder, validation=0.2, stratify=True, class_weight="balanced")


def test_the_run_and_the_exported_file_know_the_images(photos: Path, tmp_path: Path) -> None:
    one = trainer()
    one.fit(ImageFolder(photos / "train", mean=0.3, std=0.2, interpolation="bicubic"), verbose=False)
    one.save(tmp_path / "run")
    assert Trainer.resume(tmp_path / "run").evaluate(photos / "val") == one.evaluate(photos / "val")
    one.export(tmp_path / "a.onnx")
    stored = {p.key: p.value for p in onnx.load(tmp_path / "a.onnx").metadata_props}
    content = json.loads(stored[PROPERTY])
    assert content["classes"] == list(CLASSES)
    assert content["activation"] == "softmax"
    assert content["preprocessing"]["mean"] == [0.3]
    # Another folder and a new head replace the entry.
    again = trainer(tmp_path / "a.onnx")
    assert again.evaluate(photos / "val") == one.evaluate(photos / "val")
    again.fit(ImageFolder(photos / "train", **PLAIN), verbose=False)
    again.export(tmp_path / "b.onnx")
    entries = [p for p in onnx.load(tmp_path / "b.onnx").metadata_props if p.key == PROPERTY]
    assert len(entries) == 1
    assert json.loads(entries[0].value)["preprocessing"]["mean"] == [0.0]


@pytest.mark.thorough
def test_the_file_beside_the_model_is_used(photos: Path, tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "model.onnx")
    with pytest.raises(InputError, match="it is not known how the model's inputs were normalized"):
        trainer(tmp_path / "model.onnx").fit(photos / "train", verbose=False)
    config = {
        "image_mean": [0.0],
        "image_std": [1.0],
        "do_normalize": True,
        "size": {"height": 24, "width": 24},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    by_file, by_hand = trainer(tmp_path / "model.onnx"), trainer()
    by_file.fit(photos / "train", epochs=2, verbose=False)
    by_hand.fit(ImageFolder(photos / "train", resize=(24, 24), **PLAIN), epochs=2, verbose=False)
    assert_equal(by_file, by_hand)


@pytest.mark.thorough
def test_classes_are_matched_by_name(photos: Path, tmp_path: Path) -> None:
    one = trainer()
    one.fit(ImageFolder(photos / "train", **PLAIN), epochs=2, verbose=False)
    (tmp_path / "some").mkdir()
    (photos / "val" / "triangle").rename(tmp_path / "some" / "triangle")
    (photos / "val" / "square").rename(tmp_path / "some" / "square")
    matrix = one.confusion_matrix(tmp_path / "some")
    assert matrix.sum(axis=1).tolist() == [0, 4, 4]
    (tmp_path / "some" / "square").rename(tmp_path / "some" / "sqare")
    with pytest.raises(InputError, match="has the subfolders sqare"):
        one.evaluate(tmp_path / "some")


def test_another_number_of_classes_is_refused(photos: Path) -> None:
    with pytest.raises(InputError, match=r"3 classes \(circle, .*predicts 5.*replace_head\(model, 3\)"):
        trainer(network(5)).fit(ImageFolder(photos / "train", **PLAIN))
    with pytest.raises(InputError, match="3 classes, which does not fit the target"):
        trainer(network(1), loss="bce_with_logits").fit(ImageFolder(photos / "train", **PLAIN))


def test_unreadable_files_are_skipped_and_named_once(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = [photos / "train" / name for name in ("circle/003.png", "square/000.png", "square/007.png")]
    whole = trainer()
    for path in broken:
        path.write_bytes(path.read_bytes()[:200])
    folder = ImageFolder(photos / "train", **PLAIN)
    with caplog.at_level(logging.WARNING):
        whole.fit(folder, epochs=3, batch_size=30, verbose=False)
    assert [record.message for record in caplog.records if "cannot be read" in record.message] == [
        f"3 of 30 images cannot be read and are skipped: '{broken[0]}' is damaged (image file is truncated); "
        f"'{broken[1]}' is damaged (image file is truncated); '{broken[2]}' is damaged (image file is truncated)."
    ]
    # One batch: the loss does not depend on the order of the samples.
    for path in broken:
        path.unlink()
    rest = trainer()
    rest.fit(ImageFolder(photos / "train", **PLAIN), epochs=3, batch_size=30, verbose=False)
    for name, value in weights(whole).items():
        np.testing.assert_allclose(value, weights(rest)[name], rtol=1e-4, atol=1e-6)
    assert whole.history.last["accuracy"] == pytest.approx(rest.history.last["accuracy"])


def test_predictions_name_unreadable_files_or_leave_them_out(photos: Path) -> None:
    one = trainer()
    one.fit(ImageFolder(photos / "train", **PLAIN), verbose=False)
    expected = one.predict(photos / "val")
    (photos / "val" / "square" / "001.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"square/001.png' is not an image.*would not match.*readable\(\)"):
        one.predict(photos / "val")
    rest = ImageFolder(photos / "val").readable()
    assert len(rest) == 11
    np.testing.assert_array_equal(one.predict(rest), np.delete(expected, 5, axis=0))


def test_a_class_without_readable_images_is_an_error(photos: Path) -> None:
    for path in (photos / "train" / "square").iterdir():
        path.write_bytes(b"")
    with pytest.raises(InputError, match="training images of the class square can be read"):
        trainer().fit(ImageFolder(photos / "train", **PLAIN), verbose=False)
    one = trainer()
    for path in (photos / "val").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="None of the 12 images can be read"):
        one.evaluate(ImageFolder(photos / "val", **PLAIN))


@pytest.mark.parametrize("size", [1, 2])
def test_batches_without_readable_files(photos: Path, size: int) -> None:
    for name in ("000", "001", "002", "003"):
        (photos / "train" / "circle" / f"{name}.png").write_bytes(b"")
        (photos / "val" / "circle" / f"{name}.png").write_bytes(b"")
    one = trainer()
    folder = ImageFolder(photos / "train", **PLAIN)
    history = one.fit(folder, validation=photos / "val", batch_size=size, shuffle=False, verbose=False)
    assert np.isfinite(list(history.last.values())).all()
    assert one.global_step == 30 / size
    held_out = one.evaluate(photos / "val", batch_size=size)
    matrix = one.confusion_matrix(photos / "val", batch_size=5)
    assert matrix.sum() == 8
    assert held_out["accuracy"] == pytest.approx(matrix.diagonal().sum() / 8)


@pytest.mark.thorough
def test_a_fixed_batch_size_is_filled(photos: Path) -> None:
    for name in ("000", "001"):
        (photos / "train" / "circle" / f"{name}.png").write_bytes(b"")
    model = network(shape="4, 3, 24, 24")
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 4
    one = trainer(model)
    history = one.fit(ImageFolder(photos / "train", **PLAIN), shuffle=False, verbose=False)
    assert one.global_step == 7
    assert np.isfinite(history.last["loss"])
    assert one.predict(photos / "val").shape == (12, 3)


@pytest.mark.thorough
def test_uint8_models_get_the_pixels(photos: Path) -> None:
    plain, raw = trainer(), trainer(network(dtype="uint8"))
    plain.fit(ImageFolder(photos / "train", **PLAIN), epochs=2, verbose=False)
    raw.fit(photos / "train", epochs=2, verbose=False)
    for name, value in weights(plain).items():
        np.testing.assert_allclose(value, weights(raw)[name], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_channels_last(photos: Path) -> None:
    first, last = trainer(), trainer(network(shape="n, 24, 24, 3"))
    for one in (first, last):
        one.fit(ImageFolder(photos / "train", **PLAIN), verbose=False)
    for name, value in weights(first).items():
        np.testing.assert_allclose(value, weights(last)[name], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_mixup_and_probabilities_get_one_hot_labels(photos: Path) -> None:
    folder = ImageFolder(photos / "train", **PLAIN)
    soft = trainer(loss=CrossEntropyLoss(probabilities=True))
    hard = trainer()
    soft.fit(folder, epochs=2, verbose=False)
    hard.fit(folder, epochs=2, verbose=False)
    assert soft.history.last["loss"] == pytest.approx(hard.history.last["loss"], rel=1e-5)
    for mix in (MixUp(0.4), MixUp(0.4, classes=3)):
        mixed = trainer(loss=CrossEntropyLoss(probabilities=True))
        mixed.fit(folder, validation=photos / "val", transform=mix, verbose=False)
        assert np.isfinite(mixed.history.last["val_loss"])


@pytest.mark.thorough
@pytest.mark.parametrize("outputs", [1, 2])
def test_two_classes(photos: Path, outputs: int) -> None:
    for part in ("train", "val"):
        (photos / part / "square").rename(photos / f"square-{part}")
    one = trainer(network(outputs), loss="bce_with_logits" if outputs == 1 else "cross_entropy")
    one.fit(ImageFolder(photos / "train", **PLAIN), validation=photos / "val", epochs=3, verbose=False)
    matrix = one.confusion_matrix(photos / "val")
    assert matrix.sum(axis=1).tolist() == [4, 4]
    figure = one.plot_mistakes(photos / "val", count=8)
    assert figure._suptitle.get_text().startswith(f"{8 - matrix.diagonal().sum()} of 8 images")


def test_mistakes_are_the_worst_and_show_the_files(photos: Path) -> None:
    one = trainer()
    one.fit(ImageFolder(photos / "train", **PLAIN), epochs=2, verbose=False)
    (photos / "val" / "circle" / "002.png").write_bytes(b"")
    # What the picture should show, by PyTorch.
    files = [path for path in sorted((photos / "val").rglob("*.png")) if path.stat().st_size]
    scores = torch.from_numpy(one.predict(files)).double().softmax(1).numpy()
    true = np.array([CLASSES.index(path.parent.name) for path in files])
    wrong = [i for i in range(11) if scores[i].argmax() != true[i]]
    worst = sorted(wrong, key=lambda i: scores[i, true[i]])[:3]
    assert len(wrong) > 3

    figure = one.plot_mistakes(photos / "val", count=3)
    assert (
        figure._suptitle.get_text() == f"{len(wrong)} of 11 images are assigned to a wrong class; the 3 worst"
    )
    assert len(figure.axes) == 3
    for axes, index in zip(figure.axes, worst, strict=True):
        assert axes.get_title().strip() == CLASSES[true[index]]
        predicted = CLASSES[scores[index].argmax()]
        assert axes.texts[0].get_text() == f"as {predicted}, {scores[index].max():.0%}"
        with Image.open(files[index]) as image:
            np.testing.assert_array_equal(axes.images[0].get_array(), np.asarray(image.convert("RGB")))


@pytest.mark.thorough
def test_mistakes_of_arrays(photos: Path) -> None:
    one = trainer()
    x, y = arrays(photos / "val")
    figure = one.plot_mistakes(x, y, classes=CLASSES, count=4)
    matrix = one.confusion_matrix(x, y)
    assert f"{12 - matrix.diagonal().sum()} of 12" in figure._suptitle.get_text()
    assert figure.axes[0].images[0].get_array().shape == (24, 24, 3)
    perfect = one.predict(x).argmax(axis=1)
    assert one.plot_mistakes(x, perfect)._suptitle.get_text().startswith("0 of 12")
    with pytest.raises(InputError, match="count must be"):
        one.plot_mistakes(x, y, count=0)


def test_unsuitable_calls_are_refused(photos: Path) -> None:
    one = trainer()
    folder = ImageFolder(photos / "train", **PLAIN)
    with pytest.raises(InputError, match="targets are passed in addition to a folder"):
        one.fit(folder, np.zeros(30, int))
    with pytest.raises(InputError, match="sample_weight are passed"):
        one.fit(folder, sample_weight=np.ones(30))
    draw("circle", 0).save(photos / "train" / "a.png")
    with pytest.raises(InputError, match="no such folder"):
        one.fit("photoes")
    # Lists of texts are no images, except in a prediction.
    with pytest.raises(InputError, match=r"received dtype <U"):
        one.fit(["a.png", "b.png"], [0, 1])
    with pytest.raises(InputError, match=r"fraction, received str"):
        one.fit(np.zeros((4, 3, 24, 24), np.float32), np.zeros(4, int), validation="val")
    (photos / "train" / "hexagon").mkdir()
    with pytest.raises(InputError, match="has 4 classes"):
        one.fit(ImageFolder(photos / "train", **PLAIN))
    two = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[n, 3, 24, 24] x, float[n, 3] z) => (float[n, 3] y) <float[3] b = {0., 0., 0.}>
        { m = ReduceMean<keepdims = 0, noop_with_empty_axes = 0>(x) s = Add(z, m) y = Add(s, b) }"""
    )
    with pytest.raises(InputError, match="model has the inputs x, z"):
        trainer(two).fit(folder)


def test_memory_holds_a_few_batches(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are decoded at most a few batches ahead of the one that is read."""
    from onnxtrain.images._pipeline import Pipeline

    decoded: list[str] = []
    load = Pipeline.load
    monkeypatch.setattr(
        Pipeline, "load", lambda self, path, *rest: (decoded.append(path), load(self, path, *rest))
    )
    ahead: list[int] = []

    class Watch(Callback):
        def on_step_end(self, trainer: Trainer, loss: float) -> None:
            ahead.append(len(decoded) - 2 * trainer.global_step)

    trainer().fit(
        ImageFolder(photos / "train", workers=2, **PLAIN), batch_size=2, callbacks=[Watch()], verbose=False
    )
    assert len(decoded) == 30
    assert max(ahead) <= 4
