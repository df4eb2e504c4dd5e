"""Makes an input of the model from an image: geometry as in torchvision, and normalization by a table of 256 values."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.images._decode import MODES, UnreadableImageError, open_image, pillow
from onnxtrain.images._preprocessing import Preprocessing, Size, spelled
from onnxtrain.runtime.manifest import InputSpec

Array: TypeAlias = np.ndarray[Any, Any]
Box: TypeAlias = tuple[int, int, int, int]
"""Left, top, right and bottom edge, in pixels."""

_FLOATS = ("float16", "bfloat16", "float32", "float64")
# Bounds of the aspect ratio of random crops, torchvision's.
_RATIO = (3 / 4, 4 / 3)
# Of an image that is one pixel wide, a resized copy would fill the memory.
_MOST_RESIZED = 10**8
# Hints for users who do not know how their model was trained: mean, std, and which models.
_LIKELY = (
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "for most networks that were trained on ImageNet"),
    ((0.5,), (0.5,), "for inputs from -1 to 1"),
    ((0.0,), (1.0,), "for inputs from 0 to 1, and for networks that were not trained before"),
)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Decodes image files into inputs of one model.

    Attributes:
        preprocessing: how images become inputs; all fields that the model needs are known.
        shape: shape of one input, e.g. (3, 224, 224).
        channels_last: True for the layout [height, width, channels].
        table: value of each pixel value, [channels, 256], or [1, 256] for all channels; uint8 for the pixels
            themselves.
        flip: True to flip half of the training images horizontally.
        crop: bounds of the share of the area that random crops of training images have; None for no random crops.
    """

    preprocessing: Preprocessing
    shape: tuple[int, ...]
    channels_last: bool
    table: Array
    flip: bool = False
    crop: tuple[float, float] | None = None

    @property
    def size(self) -> Size:
        """Height and width of an input."""
        return (self.shape[0], self.shape[1]) if self.channels_last else (self.shape[1], self.shape[2])

    @property
    def mode(self) -> str:
        """Pillow's mode for the model's channels."""
        return MODES[self.shape[-1] if self.channels_last else self.shape[0]]

    def describe(self) -> str:
        """Returns all settings that change the inputs, as text."""
        crop = None if self.crop is None else list(self.crop)
        return f"{self.preprocessing.to_dict()}, flip {self.flip}, crop {crop}"

    def load(
        self, path: str | os.PathLike[str], out: Array, generator: np.random.Generator | None = None
    ) -> None:
        """Decodes an image file into an input.

        Args:
            path: path of the file.
            out: array of shape :attr:`shape` that is written.
            generator: source of random numbers for augmentation; None for no augmentation.

        Raises:
            UnreadableImageError: the file cannot be decoded.
        """
        image = open_image(path, self.mode)
        width, height = resized(image.width, image.height, self.size, self.preprocessing.resize)
        if width * height > _MOST_RESIZED:
            raise UnreadableImageError(
                f"'{os.fspath(path)}' has {image.width} x {image.height} pixels, which is too narrow to be resized"
            )
        pixels = np.asarray(self.fit(image, generator))
        if generator is not None and self.flip and generator.random() < 0.5:
            pixels = pixels[:, ::-1]
        self.write(pixels.reshape(*self.size, -1), out)

    def fit(self, image: Any, generator: np.random.Generator | None = None) -> Any:
        """Resizes and crops an image to the model's size; with a generator, at random if :attr:`crop` is set."""
        height, width = self.size
        resample = pillow().Resampling[(self.preprocessing.interpolation or "bilinear").upper()]
        if generator is not None and self.crop is not None:
            box = random_box(image.width, image.height, self.crop, generator)
            return image.crop(box).resize((width, height), resample)
        new_width, new_height = resized(image.width, image.height, self.size, self.preprocessing.resize)
        if (new_width, new_height) != image.size:
            image = image.resize((new_width, new_height), resample)
        # torchvision's CenterCrop, with Python's rounding of halves to even.
        left, top = round((new_width - width) / 2.0), round((new_height - height) / 2.0)
        if (new_width, new_height) == (width, height):
            return image
        return image.crop((left, top, left + width, top + height))

    def write(self, pixels: Array, out: Array) -> None:
        """Writes pixels to an input, normalized and in the model's layout.

        Args:
            pixels: uint8 [height, width, channels].
            out: array of shape :attr:`shape` that is written.
        """
        if self.preprocessing.bgr:
            pixels = pixels[..., ::-1]
        target = out if self.channels_last else np.moveaxis(out, 0, -1)
        if self.table.dtype == np.uint8:
            target[...] = pixels
            return
        for channel in range(pixels.shape[-1]):
            values = self.table[channel if len(self.table) > 1 else 0]
            target[..., channel] = values[pixels[..., channel]]


def resized(width: int, height: int, size: Size, resize: int | Size | None) -> tuple[int, int]:
    """Returns width and height of an image after resizing and before the center crop.

    Like torchvision's `Resize`, the longer side is rounded down.

    Args:
        width: width of the image.
        height: height of the image.
        size: height and width after the crop.
        resize: length of the shorter side, or (height, width); None for the smallest size that covers `size`.

    >>> resized(500, 375, (224, 224), 256), resized(500, 375, (224, 224), None)
    ((341, 256), (298, 224))
    """
    if isinstance(resize, tuple):
        return resize[1], resize[0]
    # Which side determines the scale. For an integer, and for a square, it is the shorter one.
    by_width = width <= height if isinstance(resize, int) else width * size[0] <= height * size[1]
    if by_width:
        short = resize if isinstance(resize, int) else size[1]
        return short, int(short * height / width)
    short = resize if isinstance(resize, int) else size[0]
    return int(short * width / height), short


def random_box(width: int, height: int, scale: tuple[float, float], generator: np.random.Generator) -> Box:
    """Draws the box of a random crop, as torchvision's `RandomResizedCrop.get_params` does.

    Ten boxes are drawn, with an area uniform in `scale` and the logarithm of the aspect ratio uniform between log 3/4
    and log 4/3. The first that fits into the image is returned, otherwise the largest box at the center with such a
    ratio.

    Args:
        width: width of the image.
        height: height of the image.
        scale: smallest and largest share of the image's area, e.g. (0.08, 1.0).
        generator: source of random numbers.
    """
    low, high = math.log(_RATIO[0]), math.log(_RATIO[1])
    for _ in range(10):
        area = width * height * generator.uniform(*scale)
        ratio = math.exp(generator.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(generator.integers(height - h + 1))
            left = int(generator.integers(width - w + 1))
            return left, top, left + w, top + h
    w, h = width, height
    if width / height < _RATIO[0]:
        h = round(width / _RATIO[0])
    elif width / height > _RATIO[1]:
        w = round(height * _RATIO[1])
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def make_pipeline(
    spec: InputSpec,
    passed: Preprocessing,
    found: Preprocessing | None,
    *,
    flip: bool = False,
    crop: tuple[float, float] | None = None,
) -> Pipeline:
    """Combines what is known about the images of a model.

    Args:
        spec: the model's input.
        passed: what the user passed.
        found: what the run or the model says; None if nothing.
        flip: see :class:`Pipeline`.
        crop: see :class:`Pipeline`.

    Raises:
        InputError: the input does not take images, a setting is unknown or contradicts another one, or the user has to
            say how the model's inputs were normalized.
    """
    channels, channels_last, fixed = _layout(spec)
    size = _size(spec, fixed, passed.size, None if found is None else found.size)
    resize = passed.resize if passed.resize is not None else _scaled_resize(found, size)
    _require_covered(size, resize)
    raw = spec.dtype.name == "uint8"
    if raw and passed.mean is not None:
        raise InputError(
            f"{argument('mean')} and {argument('std')} are passed, but the input '{spec.name}' is uint8: the model "
            "gets the pixels and normalizes them itself. Leave both out."
        )
    mean, std, scale = passed.mean, passed.std, passed.scale
    if mean is None and not raw:
        if found is None or found.mean is None or found.std is None:
            raise InputError(_unknown_normalization(spec))
        mean, std, scale = found.mean, found.std, found.scale
    complete = Preprocessing(
        size=size,
        mean=None if raw else mean,
        std=None if raw else std,
        scale=scale,
        resize=resize,
        interpolation=passed.interpolation or (found.interpolation if found else None) or "bilinear",
        bgr=found.bgr if found is not None else False,
    )
    for name, values in (("mean", complete.mean), ("std", complete.std)):
        if values is not None and len(values) not in (1, channels):
            raise InputError(
                f"{argument(name)} has {len(values)} values, but the input '{spec.name}' has {channels} channels: pass "
                "one value, or one for each channel."
            )
    shape = (*size, channels) if channels_last else (channels, *size)
    return Pipeline(
        preprocessing=complete,
        shape=shape,
        channels_last=channels_last,
        table=_table(complete, raw=raw),
        flip=flip,
        crop=crop,
    )


def _layout(spec: InputSpec) -> tuple[int, bool, tuple[int | None, int | None]]:
    """Returns the number of channels of an input, whether they are its last axis, and its fixed height and width.

    Raises:
        InputError: the input does not take images.
    """
    shape = spec.shape or ()
    doing = f"Reading images for the input '{spec.name}' ({spec.dtype.name}"
    shown = f"{doing} [{', '.join(str(side or '?') for side in shape)}])"
    if len(shape) != 4:
        raise InputError(
            f"{shown}: images need an input of shape [batch, channels, height, width] or [batch, height, width, "
            "channels]."
        )
    if spec.dtype.name not in (*_FLOATS, "uint8"):
        raise InputError(f"{shown}: images need an input of a floating-point dtype or uint8.")
    # First, because exporters of PyTorch and most files use it.
    for axis in (1, 3):
        if isinstance(shape[axis], int) and shape[axis] in MODES:
            sides = shape[2:] if axis == 1 else shape[1:3]
            height, width = (side if isinstance(side, int) else None for side in sides)
            return int(shape[axis]), axis == 3, (height, width)  # type: ignore[arg-type]
    raise InputError(
        f"{shown}: neither axis 1 nor axis 3 is known to have 1, 3 or 4 channels. Export the model with a fixed "
        "number of channels."
    )


def _size(
    spec: InputSpec, fixed: tuple[int | None, int | None], passed: Size | None, found: Size | None
) -> Size:
    wanted = passed or found
    sides = [
        side if side is not None else (wanted[index] if wanted is not None else None)
        for index, side in enumerate(fixed)
    ]
    height, width = sides
    if height is None or width is None:
        raise InputError(
            f"Reading images for the input '{spec.name}': the model takes images of any size, and neither its metadata "
            f"nor a file beside it says which one it was trained with. Pass {_spelled('size', (224,))} or another "
            "size."
        )
    if passed is not None and passed != (height, width):
        raise InputError(
            f"{argument('size')} is {spelled(passed)}, but the model takes images of {height} x {width}. Leave it "
            f"out, or export the model with symbolic sizes."
        )
    return height, width


def _scaled_resize(found: Preprocessing | None, size: Size) -> int | Size | None:
    """Returns the size to resize to that a model's files say, in proportion if the model has another size than they."""
    if found is None or found.resize is None or found.size is None or found.size == size:
        return None if found is None else found.resize
    factors = size[0] / found.size[0], size[1] / found.size[1]
    if isinstance(found.resize, tuple):
        return math.floor(found.resize[0] * factors[0]), math.floor(found.resize[1] * factors[1])
    return max(math.floor(found.resize * max(factors)), *size)


def _require_covered(size: Size, resize: int | Size | None) -> None:
    """Raises InputError if resized images may be smaller than the crop."""
    sides = (resize, resize) if isinstance(resize, int) else resize
    if sides is not None and (sides[0] < size[0] or sides[1] < size[1]):
        raise InputError(
            f"{argument('resize')} is {spelled(resize)}, but the model takes images of {spelled(size)}, which are cut "
            "out of the resized ones. Pass a larger size."
        )


def _table(preprocessing: Preprocessing, *, raw: bool) -> Array:
    """Returns the normalized value of each pixel value, float32 [channels or 1, 256]; uint8 for raw pixels."""
    pixels = np.arange(256, dtype=np.float32)
    if raw:
        return pixels.astype(np.uint8)[None]
    assert preprocessing.mean is not None
    assert preprocessing.std is not None
    # In float32 and in this order, as torchvision's ToTensor and Normalize compute it.
    inverse = 1 / preprocessing.scale
    scaled = pixels / np.float32(inverse) if inverse == 255 else pixels * np.float32(preprocessing.scale)
    channels = max(len(preprocessing.mean), len(preprocessing.std))
    mean, std = (
        np.broadcast_to(np.asarray(values, np.float32), channels)[:, None]
        for values in (preprocessing.mean, preprocessing.std)
    )
    table: Array = (scaled - mean) / std
    return table


def _unknown_normalization(spec: InputSpec) -> str:
    choices = "; ".join(
        f"{_spelled('mean', mean)} {_spelled('std', std)} {which}" for mean, std, which in _LIKELY
    )
    return (
        f"Reading images for the input '{spec.name}': it is not known how the model's inputs were normalized. There is "
        "no preprocessor_config.json or timm config.json beside the model, and no preprocessing in its metadata. Pass "
        f"the mean and standard deviation of pixels from 0 to 1 that it was trained with: {choices}."
    )


def _spelled(name: str, values: Sequence[float]) -> str:
    """Returns an argument with numbers as a user types it, e.g. "mean=(0.5, 0.5)" or "--mean 0.5,0.5"."""
    spelling = argument(name)
    if spelling.startswith("--"):
        flag, *rest = spelling.split(" ", 1)
        return " ".join([f"{flag} {','.join(f'{value:g}' for value in values)}", *rest])
    texts = ", ".join(f"{value:g}" for value in values)
    return f"{spelling}={texts}" if len(values) == 1 else f"{spelling}=({texts})"
