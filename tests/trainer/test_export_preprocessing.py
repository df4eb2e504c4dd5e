"""The preprocessing inside exported models, bit for bit beside Pillow and numpy.

Pillow 13 resizes some images vertically first (python-pillow/Pillow 9549). Resized along one axis after the other,
images are the same in all versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from PIL import Image

import models
from images.problems import draw, network
from onnxtrain import ImageFolder, Trainer, replace_head
from onnxtrain.errors import InputError
from onnxtrain.images import Preprocessing
from onnxtrain.images._pipeline import make_pipeline
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.trainer._fit.image_graph import attach_preprocessing

RNG = np.random.default_rng(0)
SIZES = [
    (24, 24),
    (40, 48),
    (375, 500),
    (333, 250),
    (31, 50),
    (25, 301),
    (24, 25),
    (10, 10),
    (3, 70),
    (60, 24),
]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def identity(shape: list[int | str], dtype: str) -> ir.Model:
    kind = onnx.TensorProto.DataType.Value({"float32": "FLOAT"}.get(dtype, dtype.upper()))
    nodes = models.parse_nodes("y = Identity(x)")
    return ir.from_proto(models.make_model(nodes, {"x": shape}, {"y": shape}, {}, dtype=kind))


def expected(
    image: Image.Image, size: tuple[int, int], settings: dict[str, Any], shape: list[int]
) -> np.ndarray:
    """Resizes and crops with Pillow as torchvision documents it, and normalizes as ToTensor and Normalize do."""
    height, width = size
    resize = settings.get("resize")
    if isinstance(resize, tuple):
        new = resize[1], resize[0]
    else:
        by_width = image.width * height <= image.height * width
        short = (width if by_width else height) if resize is None else resize
        if resize is not None:
            by_width = image.width <= image.height
        new = (
            (short, int(short * image.height / image.width))
            if by_width
            else (int(short * image.width / image.height), short)
        )
    resample = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    how = resample[settings.get("interpolation", "bilinear")]
    at_once = np.asarray(image.resize(new, how)).astype(int)
    image = image.resize((new[0], image.height), how).resize(new, how)
    # Overshoots of the cubic are clipped after the first pass, which makes more of a difference in images of noise.
    assert np.abs(np.asarray(image).astype(int) - at_once).max() <= (
        1 if how == Image.Resampling.BILINEAR else 30
    )
    left, top = round((new[0] - width) / 2), round((new[1] - height) / 2)
    pixels = np.asarray(image.crop((left, top, left + width, top + height))).reshape(height, width, -1)
    if settings.get("bgr"):
        pixels = pixels[..., ::-1]
    if "mean" in settings:
        scale = settings.get("scale", 1 / 255)
        scaled = pixels / np.float32(255) if scale == 1 / 255 else pixels * np.float32(scale)
        pixels = (scaled.astype(np.float32) - np.float32(settings["mean"])) / np.float32(settings["std"])
    return pixels if shape[-1] == pixels.shape[-1] else np.moveaxis(pixels, -1, 0)


CASES: dict[str, tuple[list[int | str], str, dict[str, Any]]] = {
    "ImageNet": (["n", 3, 24, 24], "float32", {"mean": MEAN, "std": STD, "resize": 28}),
    "smallest cover": (["n", 3, 24, 20], "float32", {"mean": (0.5,), "std": (0.5,)}),
    "a fixed size before the crop": (["n", 3, 24, 24], "float32", {"mean": MEAN, "std": STD, "resize": (27, 31)}),
    "bicubic, channels last": (
        ["n", 24, 24, 3], "float32", {"mean": MEAN, "std": STD, "resize": 33, "interpolation": "bicubic"},
    ),
    "blue first, pixels from 0 to 255": (
        ["n", 3, 24, 24], "float32", {"mean": (104.0, 117.0, 123.0), "std": (1.0,), "scale": 1.0, "bgr": True},
    ),
    "gray": (["n", 1, 24, 24], "float32", {"mean": (0.1307,), "std": (0.3081,)}),
    "raw pixels": (["n", 24, 24, 3], "uint8", {"resize": 30}),
    "half precision": (["n", 3, 24, 24], "float16", {"mean": MEAN, "std": STD}),
}  # fmt: skip


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", CASES)
def test_inputs_are_bit_equal_to_those_of_pillow(name: str) -> None:
    shape, dtype, settings = CASES[name]
    spec = InputSpec("x", dtypes.BY_NAME[dtype], tuple(None if d == "n" else d for d in shape))
    pipeline = make_pipeline(spec, Preprocessing(), Preprocessing(**settings))
    model = identity(shape, dtype)
    attach_preprocessing(model, pipeline)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    channels = 1 if 1 in shape else 3
    for height, width in [*SIZES, *(tuple(RNG.integers(5, 90, 2)) for _ in range(20))]:
        batch = RNG.integers(0, 256, (2, height, width, channels), dtype=np.uint8)
        (found,) = session.run(None, {"x": batch})
        for pixels, one in zip(batch, found, strict=True):
            image = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
            wanted = expected(image, pipeline.size, settings, [*shape[1:]])
            np.testing.assert_array_equal(one, wanted.astype(one.dtype), err_msg=f"{height} x {width}")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("circle", "square", "triangle"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(6):
            draw(name, index, 30 + 7 * index).save(tmp_path / "photos" / name / f"{index}.png")
    return tmp_path / "photos"


def predicted(path: Path, files: list[Path]) -> np.ndarray:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.concatenate(
        [session.run(None, {"x": np.asarray(Image.open(file).convert("RGB"))[None]})[0] for file in files]
    )


@pytest.mark.parametrize("shape", [None, "n, 24, 24, 3"])
def test_an_exported_model_predicts_decoded_images(photos: Path, tmp_path: Path, shape: str | None) -> None:
    trainer = Trainer(network(shape=shape), "cross_entropy")
    trainer.fit(ImageFolder(photos, mean=MEAN, std=STD, resize=26), epochs=2, verbose=False)
    trainer.export(tmp_path / "whole.onnx", include_preprocessing=True)
    files = sorted(photos.glob("*/*.png"))
    np.testing.assert_allclose(
        predicted(tmp_path / "whole.onnx", files), trainer.predict(files), rtol=1e-4, atol=1e-5
    )
    (value,) = onnx.load(tmp_path / "whole.onnx").graph.input
    dims = value.type.tensor_type.shape.dim
    assert value.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert [dim.dim_value or dim.dim_param for dim in dims] == ["n", "height", "width", 3]
    # Calibration and preprocessing are written together.
    found = trainer.calibrate(photos)
    trainer.export(tmp_path / "both.onnx", include_preprocessing=True)
    before, after = (predicted(tmp_path / f"{name}.onnx", files) for name in ("whole", "both"))
    np.testing.assert_allclose(after, before / found.temperature, rtol=1e-4, atol=1e-5)
    trainer.export(tmp_path / "features.onnx", ["f"], include_preprocessing=True)
    assert predicted(tmp_path / "features.onnx", files).shape == (18, 8)


@pytest.mark.thorough
def test_the_whole_model_is_a_model_of_raw_images(photos: Path, tmp_path: Path) -> None:
    """The file with the preprocessing can be trained again on the same folder, with another head."""
    trainer = Trainer(network(), "cross_entropy")
    trainer.fit(ImageFolder(photos, mean=MEAN, std=STD), verbose=False)
    trainer.export(tmp_path / "whole.onnx", include_preprocessing=True)
    again = Trainer(tmp_path / "whole.onnx", "cross_entropy", learning_rate=0.0)
    before = trainer.evaluate(photos)
    again.fit(photos, verbose=False)
    assert again.evaluate(photos) == pytest.approx(before, rel=1e-5)
    two = Trainer(replace_head(tmp_path / "whole.onnx", 2), "cross_entropy")
    assert two.predict(np.zeros((1, 24, 24, 3), np.uint8)).shape == (1, 2)


def test_what_cannot_be_written_is_refused(photos: Path, tmp_path: Path) -> None:
    trainer = Trainer(models.mlp(), "cross_entropy")
    with pytest.raises(InputError, match="the run was not trained on a folder of images"):
        trainer.export(tmp_path / "m.onnx", include_preprocessing=True)
    trainer = Trainer(network(), "cross_entropy")
    trainer.fit(ImageFolder(photos, mean=MEAN, std=STD, interpolation="lanczos"), verbose=False)
    with pytest.raises(InputError, match="interpolation='lanczos' cannot be resized in the model"):
        trainer.export(tmp_path / "m.onnx", include_preprocessing=True)
    with pytest.raises(InputError, match="include_preprocessing must be"):
        trainer.export(tmp_path / "m.onnx", include_preprocessing="yes")
    assert not (tmp_path / "m.onnx").exists()
