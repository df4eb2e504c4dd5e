"""Opens image files with Pillow, in the channels that a model takes and turned upright."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from onnxtrain.errors import InputError, MissingPackageError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
"""Suffixes of files that are read as images, in lower case."""

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's mode by number of channels."""

# Pillow's other decoders are less tested, and no file with one of the suffixes needs them. JPEG includes MPO.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
_ORIENTATION = 0x0112


class UnreadableImageError(InputError):
    """A file is not an image, is truncated, or is too large."""


def pillow(module: str = "Image") -> Any:
    """Imports a module of Pillow.

    Raises:
        MissingPackageError: Pillow is not installed.
    """
    try:
        return importlib.import_module(f"PIL.{module}")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "Images need Pillow, which is not installed: pip install 'onnxtrain[images]'"
        ) from error


def open_image(path: str | os.PathLike[str], mode: str = "RGB") -> Any:
    """Decodes an image file with Pillow; of an animation, the first frame.

    The image is turned as its EXIF orientation says. Like Pillow's `convert`, transparency is dropped, not blended.
    Gray values of 16 bits are divided by 257.

    Args:
        path: path of the file.
        mode: Pillow's mode of the result: "L", "RGB" or "RGBA".

    Returns:
        A `PIL.Image.Image`.

    Raises:
        UnreadableImageError: the file is missing, damaged, not an image, or has more pixels than Pillow allows
            (`PIL.Image.MAX_IMAGE_PIXELS`).
        MissingPackageError: Pillow is not installed.
    """
    image_module = pillow()
    try:
        with open(path, "rb") as file:
            image = image_module.open(file, formats=_FORMATS)
            # Decodes all of the file; a truncated file raises an error here.
            image.load()
        if _orientation(image) != 1:
            image = pillow("ImageOps").exif_transpose(image)
        return _converted(image, mode, image_module)
    except (MemoryError, MissingPackageError):
        raise
    # Pillow's decoders raise many types of errors for damaged files, e.g. SyntaxError, struct.error and IndexError.
    except Exception as error:
        raise UnreadableImageError(f"'{os.fspath(path)}' {_problem(error, image_module)}") from error


def _orientation(image: Any) -> int:
    """Returns the EXIF orientation of an image: 1 if it is upright, has none, or has damaged EXIF data."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:
        # As viewers do: the pixels are fine.
        return 1
    return value if value in range(2, 9) else 1


def _converted(image: Any, mode: str, image_module: Any) -> Any:
    if image.mode == mode:
        return image
    # Pillow clips 16 bits to 255 instead of scaling them. Depending on its version, they have one of these modes.
    if image.mode.startswith("I"):
        gray = np.clip(np.asarray(image).astype(np.float32) / 257, 0, 255)
        return image_module.fromarray(np.rint(gray).astype(np.uint8)).convert(mode)
    # Pillow warns of palettes with transparency unless they become RGBA first. The colors are the same.
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _problem(error: Exception, image_module: Any) -> str:
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror})"
    if isinstance(error, image_module.UnidentifiedImageError):
        return "is not an image"
    if isinstance(error, image_module.DecompressionBombError | image_module.DecompressionBombWarning):
        return "has too many pixels (see PIL.Image.MAX_IMAGE_PIXELS)"
    return f"is damaged ({error or type(error).__name__})"
