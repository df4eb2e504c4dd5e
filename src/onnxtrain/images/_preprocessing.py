"""Defines `Preprocessing`: how an image becomes an input of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError

Interpolation: TypeAlias = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
INTERPOLATIONS: tuple[str, ...] = get_args(Interpolation)
"""Names of Pillow's filters."""

Size: TypeAlias = tuple[int, int]
"""Height and width in pixels."""

# Larger images than these are no inputs of a network, but would fill the memory.
_MOST_PIXELS = 16384


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Settings by which an image becomes an input: it is resized, cropped at the center, scaled and normalized.

    The input is (pixel · scale - mean) / std, with pixels from 0 to 255. Fields that are None are unknown, or have the
    defaults of :class:`ImageFolder`. Models with `uint8` inputs get the pixels themselves.

    Attributes:
        size: height and width of the model's input, e.g. (224, 224).
        mean: mean of each channel, or one for all, in units of pixel · scale, e.g. (0.485, 0.456, 0.406).
        std: standard deviation of each channel, or one for all, e.g. (0.229, 0.224, 0.225).
        scale: factor of the pixels, e.g. 1/255.
        resize: size to which images are resized before the center crop: the length of the shorter side, e.g. 256, or
            (height, width). None: the smallest size that covers `size`, with the image's aspect ratio.
        interpolation: Pillow's filter for resizing, e.g. "bilinear".
        bgr: True if the model takes the channels in the order blue, green, red.

    Raises:
        InputError: a value is out of range.
    """

    size: Size | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    scale: float = 1 / 255
    resize: int | Size | None = None
    interpolation: Interpolation | None = None
    bgr: bool = False

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None and not all(map(math.isfinite, values)):
                raise InputError(f"{argument(name)} must consist of finite numbers, received {list(values)}.")
        if (self.mean is None) != (self.std is None):
            given, other = ("mean", "std") if self.std is None else ("std", "mean")
            raise InputError(f"{argument(given)} is given without {argument(other)}; pass both.")
        if self.std is not None and min(self.std) <= 0:
            raise InputError(f"{argument('std')} must be positive, received {list(self.std)}.")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise InputError(f"The scale of pixels must be positive, received {self.scale}.")
        for name, size in (("size", self.size), ("resize", self.resize)):
            sides = () if size is None else (size,) if isinstance(size, int) else size
            if any(not 1 <= side <= _MOST_PIXELS for side in sides):
                raise InputError(
                    f"{argument(name)} must be between 1 and {_MOST_PIXELS} pixels, received {spelled(size)}."
                )
        if self.interpolation is not None and self.interpolation not in INTERPOLATIONS:
            raise InputError(
                f"{argument('interpolation')} must be one of {', '.join(INTERPOLATIONS)}, received "
                f"{self.interpolation!r}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as values that JSON supports."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Preprocessing:
        """Restores the object that :meth:`to_dict` wrote.

        Raises:
            ValueError: a field is unknown or has a wrong type.
            InputError: a value is out of range.
        """
        if not isinstance(values, dict):
            raise ValueError(f"the preprocessing is {str(values)[:60]!r}")
        if unknown := values.keys() - cls.__dataclass_fields__.keys():
            raise ValueError(f"the preprocessing has the unknown fields {', '.join(sorted(unknown))}")
        fields = dict(values)
        resize = fields.get("resize")
        return cls(
            size=None if fields.get("size") is None else _pair(fields["size"], "size"),
            mean=None if fields.get("mean") is None else numbers(fields["mean"], "mean"),
            std=None if fields.get("std") is None else numbers(fields["std"], "std"),
            scale=number(fields.get("scale", 1 / 255), "scale"),
            resize=resize if resize is None or type(resize) is int else _pair(resize, "resize"),
            interpolation=fields.get("interpolation"),
            bgr=bool(fields.get("bgr", False)),
        )


def number(value: object, name: str) -> float:
    """Returns a number from JSON as a float; raises ValueError for another value. `name` is for the message."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} is {str(value)[:60]!r}, not a number")
    return float(value)


def numbers(value: object, name: str) -> tuple[float, ...]:
    """Returns one to four numbers from JSON as floats; raises ValueError for another value."""
    entries = value if isinstance(value, list | tuple) else [value]
    if not 1 <= len(entries) <= 4:
        raise ValueError(f"{name} has {len(entries)} values")
    return tuple(number(entry, name) for entry in entries)


def _pair(value: object, name: str) -> Size:
    if not isinstance(value, list | tuple) or len(value) != 2 or any(type(side) is not int for side in value):
        raise ValueError(f"{name} is {str(value)[:60]!r}, not a height and a width")
    return int(value[0]), int(value[1])


def size_argument(name: str, value: object) -> Size | None:
    """Converts a size that a user passed: one number for a square, or (height, width).

    Args:
        name: name of the argument, for the message.
        value: the size; None is returned unchanged.

    Raises:
        InputError: the value is neither.
    """
    if value is None:
        return None
    sides: list[Any] = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or any(
        isinstance(side, bool) or not isinstance(side, int | np.integer) for side in sides
    ):
        raise InputError(
            f"{argument(name)} must be a number of pixels or (height, width), received {value!r}."
        )
    return int(sides[0]), int(sides[1])


def channel_argument(name: str, value: object) -> tuple[float, ...] | None:
    """Converts a mean or a standard deviation that a user passed: one number, or one for each channel.

    Args:
        name: name of the argument, for the message.
        value: the numbers; None is returned unchanged.

    Raises:
        InputError: the value is neither.
    """
    if value is None:
        return None
    try:
        return numbers(np.asarray(value, np.float64).tolist(), name)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{argument(name)} must be a number, or one number for each channel, received {value!r}."
        ) from error


def spelled(size: int | Sequence[int] | None) -> str:
    """Returns a size as text, e.g. "256" or "224 x 320"."""
    return str(size) if size is None or isinstance(size, int) else " x ".join(map(str, size))
