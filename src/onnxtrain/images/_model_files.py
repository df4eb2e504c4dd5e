"""Finds the preprocessing of a model: in its metadata, or in the files that Hugging Face and timm store beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onnxtrain.errors import InputError
from onnxtrain.images._metadata import PROPERTY, ImageMetadata
from onnxtrain.images._preprocessing import Preprocessing, Size, number, numbers
from onnxtrain.runtime.json_text import parse_json

# A description of a few settings is not larger.
_MOST_BYTES = 2**20

# Pillow's numbers of its filters, which Hugging Face stores.
_FILTERS: dict[object, Any] = {
    0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming",
}  # fmt: skip

# Image processors for which one number is the length of the shorter side; for the others, it is a square.
_SHORTEST_EDGE = ("CLIP", "ConvNext", "Levit", "MobileNet", "PoolFormer")

# Settings of Hugging Face's image processors that change pixels in ways that `Preprocessing` does not describe.
_UNSUPPORTED = (
    "do_pad", "do_thumbnail", "do_align_long_axis", "do_align_axis", "rescale_offset", "include_top", "do_crop_margin",
)  # fmt: skip


def find_image_metadata(metadata: Mapping[str, str], path: Path | None) -> ImageMetadata | None:
    """Returns what a model says about its images and classes; None if it says nothing.

    The first of these sources counts: the metadata that :meth:`Trainer.export` writes, `preprocessor_config.json`
    (Hugging Face), and `config.json` (timm) in the directory of the model, or above a directory `onnx`.

    Args:
        metadata: metadata of the model, `metadata_props`.
        path: path of the model; None if it was not read from a file.

    Raises:
        InputError: the file is damaged, or describes a preprocessing that is not supported.
        CheckpointError: the metadata is damaged.
    """
    if PROPERTY in metadata:
        return ImageMetadata.from_json(metadata[PROPERTY], "the model" if path is None else str(path))
    if path is None:
        return None
    folders = [path.parent, *([path.parent.parent] if path.parent.name == "onnx" else [])]
    readers: tuple[tuple[str, Callable[[Any], Preprocessing | None]], ...] = (
        ("preprocessor_config.json", _hugging_face),
        ("config.json", _timm),
    )
    for name, reader in readers:
        for folder in folders:
            if (folder / name).is_file() and (found := _read(folder / name, reader)) is not None:
                return ImageMetadata(preprocessing=found)
    return None


def _read(path: Path, reader: Callable[[Any], Preprocessing | None]) -> Preprocessing | None:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError("it is larger than 1 MB")
        values = parse_json(content)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        return reader(values)
    except (OSError, ValueError, TypeError, InputError) as error:
        raise InputError(
            f"Reading the preprocessing of images from '{path}': {error}. Correct the file, or move it elsewhere and "
            "pass size, mean and std."
        ) from error


def _hugging_face(values: dict[str, Any]) -> Preprocessing | None:
    """Converts a `preprocessor_config.json`; returns None if it does not describe images."""
    if not any(
        key in values for key in ("image_mean", "do_normalize", "do_resize", "do_rescale", "crop_size")
    ):
        return None
    if unsupported := [key for key in _UNSUPPORTED if values.get(key)]:
        raise ValueError(f"{', '.join(unsupported)} is not supported")
    kind = str(values.get("image_processor_type") or values.get("feature_extractor_type") or "")
    crop = _hugging_face_size(values["crop_size"], square=True) if values.get("do_center_crop") else None
    resize: int | Size | None = None
    if values.get("do_resize", True) and values.get("size") is not None:
        resize = _hugging_face_size(values["size"], square=not kind.startswith(_SHORTEST_EDGE))
    # ConvNeXT crops the part `crop_pct` of the resized image; for large images, it makes a square without a crop.
    if kind.startswith("ConvNext") and isinstance(resize, int):
        crop = (resize, resize)
        share = number(values.get("crop_pct", 224 / 256), "crop_pct")
        resize = int(resize / share) if resize < 384 else crop
    if crop is None and isinstance(resize, int):
        raise ValueError(
            "the images keep their aspect ratio (do_center_crop is false), so they differ in size"
        )
    size = crop if crop is not None else resize
    rescales, normalizes = values.get("do_rescale", True), values.get("do_normalize", True)
    mean: tuple[float, ...] | None = (0.0,)
    std: tuple[float, ...] | None = (1.0,)
    if normalizes:
        # Each image processor has defaults of its own, so missing values are unknown.
        known = values.get("image_mean") is not None and values.get("image_std") is not None
        mean = numbers(values["image_mean"], "image_mean") if known else None
        std = numbers(values["image_std"], "image_std") if known else None
    resample = values.get("resample", 2)
    if resample not in _FILTERS:
        raise ValueError(f"resample is {str(resample)[:60]!r}")
    return Preprocessing(
        size=size if isinstance(size, tuple) else None,
        mean=mean,
        std=std,
        scale=number(values.get("rescale_factor", 1 / 255), "rescale_factor") if rescales else 1.0,
        resize=resize,
        interpolation=_FILTERS[resample],
        bgr=bool(values.get("do_flip_channel_order", False)),
    )


def _hugging_face_size(value: object, *, square: bool) -> int | Size:
    """Returns the length of the shorter side, or (height, width); `square` says which one a single number means."""
    if type(value) is int:
        return (value, value) if square else value
    if isinstance(value, dict) and set(value) == {"height", "width"}:
        height, width = value["height"], value["width"]
        if type(height) is int and type(width) is int:
            return height, width
    if isinstance(value, dict) and set(value) == {"shortest_edge"} and type(value["shortest_edge"]) is int:
        return int(value["shortest_edge"])
    raise ValueError(f"the size {str(value)[:60]} is not supported")


def _timm(values: dict[str, Any]) -> Preprocessing | None:
    """Converts a timm `config.json`, by timm's formulas for evaluation; returns None if it is another kind of file."""
    config = values.get("pretrained_cfg", values)
    if not isinstance(config, dict) or not {"mean", "std", "input_size"} <= config.keys():
        return None
    size = config["input_size"]
    if not isinstance(size, list) or len(size) != 3 or any(type(side) is not int for side in size):
        raise ValueError(f"input_size is {str(size)[:60]}, not [channels, height, width]")
    height, width = size[1:]
    share = number(config.get("crop_pct") or 0.875, "crop_pct")
    if not 0 < share <= 1:
        raise ValueError(f"crop_pct is {share}")
    scaled = math.floor(height / share), math.floor(width / share)
    mode = config.get("crop_mode") or "center"
    if mode not in ("center", "squash") or (mode == "center" and height != width):
        raise ValueError(f"crop_mode {str(mode)[:60]!r} for images of {height} x {width} is not supported")
    return Preprocessing(
        size=(height, width),
        mean=numbers(config["mean"], "mean"),
        std=numbers(config["std"], "std"),
        resize=scaled[0] if mode == "center" else scaled,
        interpolation=config.get("interpolation") or "bilinear",
    )
