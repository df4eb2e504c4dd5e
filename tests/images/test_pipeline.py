"""Images become inputs by torchvision's definitions, written here with Pillow, NumPy and PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from onnxtrain.errors import InputError
from onnxtrain.images import Preprocessing
from onnxtrain.images._pipeline import Pipeline, make_pipeline, random_box, resized
from onnxtrain.runtime.dtypes import BY_NAME
from onnxtrain.runtime.manifest import InputSpec

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def spec(*shape: Any, dtype: str = "float32") -> InputSpec:
    return InputSpec("x", BY_NAME[dtype], shape)


def pipeline(
    *shape: Any, dtype: str = "float32", found: Preprocessing | None = None, **settings: Any
) -> Pipeline:
    augment = {name: settings.pop(name) for name in ("flip", "crop") if name in settings}
    if dtype != "uint8" and found is None:
        settings = {"mean": MEAN, "std": STD} | settings
    return make_pipeline(spec(None, *shape, dtype=dtype), Preprocessing(**settings), found, **augment)


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(width * height)
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze() if channels == 1 else pixels, mode)


def loaded(pipe: Pipeline, image: Image.Image, tmp_path: Path, generator: Any = None) -> np.ndarray:
    image.save(tmp_path / "a.png")
    out = np.full(pipe.shape, 99, pipe.table.dtype)
    pipe.load(tmp_path / "a.png", out, generator)
    return out


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("width", "height"), [(50, 37), (37, 50), (24, 24), (25, 24), (10, 80), (23, 31)])
@pytest.mark.parametrize("resize", [None, 32, 24, (30, 40)])
@pytest.mark.parametrize("name", ["bilinear", "bicubic", "nearest"])
def test_resize_and_center_crop_are_those_of_torchvision(
    width: int, height: int, resize: Any, name: str, tmp_path: Path
) -> None:
    image = picture(width, height)
    got = loaded(pipeline(3, 24, 24, dtype="uint8", resize=resize, interpolation=name), image, tmp_path)

    # torchvision.transforms.functional.resize and center_crop, version 0.28.
    short = 24 if resize is None else resize
    if isinstance(short, tuple):
        new_height, new_width = short
    elif width <= height:
        new_width, new_height = short, int(short * height / width)
    else:
        new_width, new_height = int(short * width / height), short
    expected = image.resize((new_width, new_height), Image.Resampling[name.upper()])
    top, left = round((new_height - 24) / 2.0), round((new_width - 24) / 2.0)
    expected = expected.crop((left, top, left + 24, top + 24))
    np.testing.assert_array_equal(got, np.moveaxis(np.asarray(expected), -1, 0))


def test_the_pixels_are_those_of_torchvision_itself(tmp_path: Path) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    for width, height in ((50, 37), (31, 80), (24, 24)):
        image = picture(width, height)
        chain = transforms.Compose(
            [
                transforms.Resize(28),
                transforms.CenterCrop(24),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )
        got = loaded(pipeline(3, 24, 24, resize=28), image, tmp_path)
        np.testing.assert_array_equal(got, chain(image).numpy())


def test_normalization_is_bit_equal_to_pytorch(tmp_path: Path) -> None:
    image = picture(24, 24)
    pixels = torch.from_numpy(np.moveaxis(np.asarray(image), -1, 0).copy())
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    expected = (pixels.float().div(255) - mean) / std
    got = loaded(pipeline(3, 24, 24), image, tmp_path)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected.numpy())
    single = loaded(pipeline(3, 24, 24, mean=(0.5,), std=(0.5,)), image, tmp_path)
    np.testing.assert_array_equal(single, ((pixels.float().div(255) - 0.5) / 0.5).numpy())


def test_layouts_channels_and_order(tmp_path: Path) -> None:
    image = picture(24, 24)
    first = loaded(pipeline(3, 24, 24), image, tmp_path)
    last = loaded(pipeline(24, 24, 3), image, tmp_path)
    np.testing.assert_array_equal(np.moveaxis(last, -1, 0), first)
    raw = loaded(pipeline(24, 24, 3, dtype="uint8"), image, tmp_path)
    np.testing.assert_array_equal(raw, np.asarray(image))
    gray = loaded(pipeline(1, 24, 24, mean=(0.0,), std=(1.0,)), image, tmp_path)
    np.testing.assert_array_equal(gray[0], np.asarray(image.convert("L"), np.float32) / np.float32(255))
    alpha = loaded(pipeline(4, 24, 24, dtype="uint8"), image.convert("RGBA"), tmp_path)
    assert (alpha[3] == 255).all()
    found = Preprocessing(mean=MEAN, std=STD, bgr=True)
    blue_first = loaded(pipeline(3, 24, 24, found=found), image, tmp_path)
    swapped = loaded(pipeline(3, 24, 24), Image.merge("RGB", image.split()[::-1]), tmp_path)
    np.testing.assert_array_equal(blue_first, swapped)


def test_a_scale_of_hugging_face(tmp_path: Path) -> None:
    image = picture(24, 24)
    found = Preprocessing(mean=(1.0,), std=(1.0,), scale=1 / 127.5)
    got = loaded(pipeline(3, 24, 24, found=found), image, tmp_path)
    expected = np.moveaxis(np.asarray(image), -1, 0) / 127.5 - 1
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_rectangles_are_covered() -> None:
    for width, height in ((100, 37), (37, 100), (64, 48), (48, 64), (7, 5)):
        new_width, new_height = resized(width, height, (20, 30), None)
        assert new_width >= 30
        assert new_height >= 20
        assert new_width == 30 or new_height == 20
        assert math.isclose(new_width / new_height, width / height, rel_tol=0.06)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (60, 61), (30, 400)])
def test_random_boxes_have_shares_and_ratios_in_bounds(width: int, height: int) -> None:
    shares, ratios = [], []
    for seed in range(800):
        left, top, right, bottom = random_box(width, height, (0.3, 0.8), np.random.default_rng(seed))
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        shares.append((right - left) * (bottom - top) / (width * height))
        ratios.append((right - left) / (bottom - top))
    if width == 30:
        # No box fits: the largest one with a ratio of 3 / 4, at the center.
        assert random_box(width, height, (0.3, 0.8), np.random.default_rng(0)) == (0, 180, 30, 220)
        return
    assert min(shares) > 0.28
    assert max(shares) < 0.82
    assert min(ratios) > 0.73
    assert max(ratios) < 1.36
    if width == 500:
        # All boxes of these shares fit, so both the share and the logarithm of the ratio are uniform.
        draws = [random_box(width, height, (0.1, 0.4), np.random.default_rng(seed)) for seed in range(800)]
        boxes = np.array(draws)
        w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
        for values, low, high in (
            (w * h / (width * height), 0.1, 0.4),
            (np.log(w / h), *np.log([3 / 4, 4 / 3])),
        ):
            assert abs(np.mean(values) - (low + high) / 2) < 0.04 * (high - low)
            assert abs(np.std(values) - (high - low) / math.sqrt(12)) < 0.04 * (high - low)


def test_augmentation_crops_resizes_and_flips(tmp_path: Path) -> None:
    image, pipe = picture(50, 40), pipeline(3, 24, 24, dtype="uint8", flip=True, crop=(0.2, 0.9))
    flipped = 0
    for seed in range(60):
        got = loaded(pipe, image, tmp_path, np.random.default_rng(seed))
        box = random_box(50, 40, (0.2, 0.9), generator := np.random.default_rng(seed))
        expected = image.crop(box).resize((24, 24), Image.Resampling.BILINEAR)
        if turned := bool(generator.random() < 0.5):
            expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        flipped += turned
        np.testing.assert_array_equal(got, np.moveaxis(np.asarray(expected), -1, 0))
    assert 20 <= flipped <= 40
    # Evaluation passes no generator.
    plain = loaded(pipeline(3, 24, 24, dtype="uint8"), image, tmp_path)
    np.testing.assert_array_equal(loaded(pipe, image, tmp_path), plain)


def test_the_model_decides_the_size_and_its_files_the_rest() -> None:
    found = Preprocessing(
        size=(224, 224), mean=MEAN, std=STD, resize=256, interpolation="bicubic", scale=1 / 255
    )
    same = make_pipeline(spec(None, 3, 224, 224), Preprocessing(), found).preprocessing
    assert same == found
    # In proportion: 256 / 224 of 112 is 128.
    other = make_pipeline(spec(None, 3, 112, 112), Preprocessing(), found).preprocessing
    assert (other.size, other.resize, other.mean) == ((112, 112), 128, MEAN)
    any_size = make_pipeline(spec(None, 3, "h", "w"), Preprocessing(), found)
    assert any_size.size == (224, 224)
    chosen = make_pipeline(
        spec(None, 3, "h", "w"), Preprocessing(size=(64, 64), mean=(0.5,), std=(0.5,)), found
    ).preprocessing
    assert (chosen.size, chosen.mean, chosen.resize) == ((64, 64), (0.5,), 73)


@pytest.mark.parametrize(
    ("shape", "dtype", "settings", "words"),
    [
        ((10,), "float32", {}, "images need an input of shape"),
        ((3, 24, 24), "int64", {}, "floating-point dtype or uint8"),
        ((5, 24, 7), "float32", {}, "neither axis 1 nor axis 3"),
        ((3, "h", "w"), "float32", {}, "Pass size=224"),
        ((3, 24, 24), "float32", {"size": (32, 32)}, "takes images of 24 x 24"),
        ((3, 24, 24), "float32", {"resize": 20}, "which are cut out"),
        ((1, 24, 24), "float32", {}, "mean has 3 values"),
        ((3, 24, 24), "uint8", {"mean": (0.5,), "std": (0.5,)}, "normalizes them itself"),
        ((3, 24, 24), "float32", {"mean": None, "std": None}, r"mean=\(0.485, 0.456, 0.406\) std="),
    ],
)
def test_unsuitable_inputs_and_settings_are_refused(
    shape: Any, dtype: str, settings: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        pipeline(*shape, dtype=dtype, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"mean": (0.5,)},
        {"mean": (0.5,), "std": (0.0,)},
        {"mean": (math.nan,), "std": (1.0,)},
        {"size": (0, 5)},
        {"size": (10**6, 5)},
        {"interpolation": "cubic"},
        {"scale": 0.0},
    ],
)
def test_impossible_settings_are_refused(settings: Any) -> None:
    with pytest.raises(InputError):
        Preprocessing(**settings)


def test_preprocessing_survives_json() -> None:
    value = Preprocessing(size=(5, 6), mean=MEAN, std=STD, resize=(7, 8), interpolation="box", bgr=True)
    assert Preprocessing.from_dict(value.to_dict()) == value
    for broken in ([], {"size": [1]}, {"sizes": [1, 2]}, {"mean": ["a"], "std": [1]}, {"scale": True}):
        with pytest.raises(ValueError):  # noqa: PT011 the caller adds what was read
            Preprocessing.from_dict(broken)
