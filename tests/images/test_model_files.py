"""Files that Hugging Face and timm store beside a model are read by their formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.images import Preprocessing
from onnxtrain.images._metadata import PROPERTY, ImageMetadata
from onnxtrain.images._model_files import find_image_metadata

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NORMAL = {"image_mean": MEAN, "image_std": STD, "do_normalize": True}


def found(tmp_path: Path, name: str, content: Any) -> Preprocessing | None:
    (tmp_path / name).write_text(json.dumps(content))
    metadata = find_image_metadata({}, tmp_path / "model.onnx")
    return None if metadata is None else metadata.preprocessing


@pytest.mark.parametrize(
    ("config", "size", "resize", "interpolation"),
    [
        # ViTImageProcessor, of older and newer releases.
        ({"size": 224, "feature_extractor_type": "ViTFeatureExtractor"}, (224, 224), (224, 224), "bilinear"),
        ({"size": {"height": 224, "width": 192}, "resample": 3}, (224, 192), (224, 192), "bicubic"),
        # CLIP: the shorter side, and a crop.
        (
            {"size": 224, "crop_size": 200, "do_center_crop": True, "feature_extractor_type": "CLIPFeatureExtractor"},
            (200, 200), 224, "bilinear",
        ),
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True},
            (224, 224), 256, "bilinear",
        ),
        # DeiT: a square, of which the center is cropped.
        ({"size": 256, "crop_size": 224, "do_center_crop": True, "resample": 1}, (224, 224), (256, 256), "lanczos"),
        # ConvNeXT: int(224 / 0.875) = 256; a square without a crop from 384 on.
        (
            {"size": {"shortest_edge": 224}, "crop_pct": 0.875, "image_processor_type": "ConvNextImageProcessor"},
            (224, 224), 256, "bilinear",
        ),
        (
            {"size": {"shortest_edge": 384}, "image_processor_type": "ConvNextImageProcessor"},
            (384, 384), (384, 384), "bilinear",
        ),
    ],
)  # fmt: skip
def test_hugging_face(tmp_path: Path, config: Any, size: Any, resize: Any, interpolation: str) -> None:
    got = found(tmp_path, "preprocessor_config.json", NORMAL | config)
    assert got is not None
    assert (got.size, got.resize, got.interpolation) == (size, resize, interpolation)
    assert (got.mean, got.std, got.scale) == (tuple(MEAN), tuple(STD), 1 / 255)


def test_hugging_face_without_normalization_or_scaling(tmp_path: Path) -> None:
    plain = {"size": {"height": 8, "width": 8}, "do_normalize": False}
    got = found(tmp_path, "preprocessor_config.json", plain)
    assert got is not None
    assert (got.mean, got.std, got.scale) == ((0.0,), (1.0,), 1 / 255)
    got = found(
        tmp_path, "preprocessor_config.json", plain | {"do_rescale": False, "do_flip_channel_order": True}
    )
    assert got is not None
    assert (got.scale, got.bgr) == (1.0, True)
    # Defaults differ between image processors, so a missing mean is unknown.
    got = found(tmp_path, "preprocessor_config.json", {"size": 8, "do_normalize": True})
    assert got is not None
    assert got.mean is None


def test_timm(tmp_path: Path) -> None:
    config = {
        "mean": MEAN,
        "std": STD,
        "input_size": [3, 224, 224],
        "crop_pct": 0.95,
        "interpolation": "bicubic",
    }
    got = found(tmp_path, "config.json", {"architecture": "resnet50", "pretrained_cfg": config})
    # floor(224 / 0.95) = 235
    expected = Preprocessing(
        size=(224, 224), mean=tuple(MEAN), std=tuple(STD), resize=235, interpolation="bicubic"
    )
    assert got == expected
    assert found(tmp_path, "config.json", config | {"crop_mode": "squash"}) == Preprocessing(
        size=(224, 224), mean=tuple(MEAN), std=tuple(STD), resize=(235, 235), interpolation="bicubic"
    )
    # A config.json of transformers describes a network, not images.
    assert found(tmp_path, "config.json", {"architectures": ["ViT"], "image_size": 224}) is None


def test_metadata_comes_first_and_folders_of_exports_are_searched(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    assert find_image_metadata({}, tmp_path / "onnx" / "model.onnx") is None
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(NORMAL | {"size": {"height": 9, "width": 9}})
    )
    beside = find_image_metadata({}, tmp_path / "onnx" / "model.onnx")
    assert beside is not None
    assert beside.preprocessing.size == (9, 9)
    ours = ImageMetadata(
        preprocessing=Preprocessing(size=(5, 5), mean=(0.5,), std=(0.1,)),
        classes=("a", "b"),
        activation="softmax",
    )
    assert find_image_metadata({PROPERTY: ours.to_json()}, tmp_path / "onnx" / "model.onnx") == ours


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("preprocessor_config.json", NORMAL | {"size": {"longest_edge": 5}}, "the size .* is not supported"),
        ("preprocessor_config.json", NORMAL | {"size": {"shortest_edge": 5}}, "differ in size"),
        (
            "preprocessor_config.json",
            NORMAL | {"size": 5, "include_top": True},
            "include_top is not supported",
        ),
        ("preprocessor_config.json", NORMAL | {"size": 5, "resample": 9}, "resample is '9'"),
        ("preprocessor_config.json", NORMAL | {"size": 5, "image_mean": ["x"]}, "not a number"),
        ("preprocessor_config.json", NORMAL | {"size": {"height": -5, "width": 5}}, "between 1 and"),
        ("preprocessor_config.json", [], "not a JSON object"),
        ("config.json", {"mean": MEAN, "std": STD, "input_size": [224]}, "input_size"),
        (
            "config.json",
            {"mean": MEAN, "std": STD, "input_size": [3, 8, 8], "crop_mode": "border"},
            "crop_mode",
        ),
        ("config.json", {"mean": MEAN, "std": STD, "input_size": [3, 8, 8], "crop_pct": 7}, "crop_pct"),
    ],
)
def test_files_that_are_not_understood_are_named(tmp_path: Path, name: str, content: Any, words: str) -> None:
    with pytest.raises(InputError, match=rf"{name}'.*{words}"):
        found(tmp_path, name, content)


def test_damaged_metadata_is_refused() -> None:
    good = json.loads(ImageMetadata(preprocessing=Preprocessing(), classes=("a",)).to_json())
    for change in (
        {"version": 2},
        {"classes": "ab"},
        {"classes": ["a", "a"]},
        {"classes": [1]},
        {"activation": "relu"},
        {"preprocessing": {"size": [10**9, 1]}},
        {"preprocessing": 3},
    ):
        with pytest.raises(CheckpointError, match="does not describe images"):
            ImageMetadata.from_json(json.dumps(good | change), "m.onnx")
