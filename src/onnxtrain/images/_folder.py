"""Defines `ImageFolder`: the files, classes and settings of a folder of images."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.images._decode import SUFFIXES, UnreadableImageError, open_image
from onnxtrain.images._preprocessing import (
    Interpolation,
    Preprocessing,
    channel_argument,
    size_argument,
)
from onnxtrain.selection import some_names

Array: TypeAlias = np.ndarray[Any, Any]
PathLike: TypeAlias = str | os.PathLike[str]

TRAINING = "train"
"""Name of the subfolder with the training images in a folder with splits."""
VALIDATION = ("val", "valid", "validation")
"""Names of the subfolder with the validation images."""
_TEST = "test"

# More threads would only wait for the disk and for each other.
_MOST_WORKERS = 64
# Default of torchvision's RandomResizedCrop.
_LEAST_SHARE = 0.08


class ImageFolder:
    """A folder of images with one subfolder per class, as data for :meth:`Trainer.fit` and other methods.

    Class indices are the positions of the subfolders' names in sorted order, as in torchvision's `ImageFolder`. JPEG,
    PNG, WebP, BMP and GIF files (the first frame) are read, in subfolders of the classes, too. Hidden files and
    folders, whose names begin with a dot, are left out; symbolic links are followed. Images are converted to the
    channels of the model (gray, RGB or RGBA) and turned as their EXIF orientation says. Files that cannot be read are
    skipped with a warning.

    If the subfolders are called `train`, `val` (or `valid`, `validation`) and `test`, the folder has splits: a fit
    trains on `train`, and validates on `val` unless it gets other validation data.

    Files are decoded in threads, beside training, a few batches ahead. The images of an epoch and their augmentation
    depend only on the trainer's seed, not on the number of threads, so a resumed fit is bit-equal to an uninterrupted
    one.

    Size, mean and standard deviation come from the model unless they are passed. The size is in the shape of its input.
    The others are in the metadata that :meth:`Trainer.export` writes, or in a file beside the model:
    `preprocessor_config.json` (Hugging Face) or `config.json` (timm). If they are nowhere, an error asks for them.

    Args:
        root: path of the folder, e.g. "photos/train"; or a list of paths of images, to predict.
        size: size of the model's inputs, e.g. 224, or (height, width), if the model takes any size.
        mean: mean of pixels from 0 to 1, a number or one for each channel, e.g. (0.485, 0.456, 0.406).
        std: their standard deviation, e.g. (0.229, 0.224, 0.225). An input is (pixel / 255 - mean) / std.
        resize: resize the shorter side to this length, e.g. 256, or images to (height, width), before the center crop.
            Default: the smallest size that covers `size`.
        interpolation: Pillow's filter for resizing: "nearest", "bilinear", "bicubic", "lanczos", "box" or "hamming".
            Default: that of the model's files, or "bilinear".
        flip: flip half of the training images horizontally.
        crop: train on random crops, resized to `size`, as torchvision's `RandomResizedCrop` does: the smallest share of
            the image's area, e.g. 0.25, or (smallest, largest); True for 0.08. Evaluation uses center crops.
        workers: number of threads that decode files. Default: one for each core, at most 8.

    Attributes:
        classes: names of the classes, in the order of their indices; empty for a folder without subfolders.
        files: paths of the files relative to `root`, in the order of the samples.
        labels: class index of each file, int64 [files]; None for a folder without subfolders.
        splits: names of the splits; empty for a folder without splits.
        unreadable: why files cannot be read, by their indices; files are decoded when they are needed.

    Raises:
        InputError: the folder does not exist or contains no images, or an argument is invalid.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> root = tempfile.mkdtemp()
        >>> for name in ("cat", "dog"):
        ...     Path(root, name).mkdir()
        ...     Image.new("RGB", (40, 30)).save(Path(root, name, "1.png"))
        >>> folder = ImageFolder(root)
        >>> folder.classes, folder.files, folder.labels
        (['cat', 'dog'], ['cat/1.png', 'dog/1.png'], array([0, 1]))
    """

    def __init__(
        self,
        root: PathLike | Sequence[PathLike],
        *,
        size: int | tuple[int, int] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        resize: int | tuple[int, int] | None = None,
        interpolation: Interpolation | None = None,
        flip: bool = False,
        crop: bool | float | tuple[float, float] | None = None,
        workers: int | None = None,
    ) -> None:
        self._configure(size, mean, std, resize, interpolation, flip, crop, workers)
        self.unreadable: dict[int, str] = {}
        self.reported: set[int] = set()
        self.splits: list[str] = []
        self.classes: list[str] = []
        self.labels: Array | None = None
        self.root: Path | None = None
        if isinstance(root, list | tuple):
            self.files = [os.fspath(path) for path in root]
            if not self.files:
                raise InputError("Reading images: the list of paths is empty.")
            return
        self.root = Path(root)  # type: ignore[arg-type]
        if not self.root.is_dir():
            problem = "it is a file" if self.root.exists() else "there is no such folder"
            raise InputError(
                f"Reading images from '{self.root}': {problem}. Pass a folder with one subfolder per class, such as "
                "photos/cat and photos/dog, or a list of files to predict."
            )
        self.splits = _find_splits(self.root)
        self._find(self.root / TRAINING if self.splits else self.root)

    def _configure(
        self,
        size: Any,
        mean: Any,
        std: Any,
        resize: Any,
        interpolation: Any,
        flip: Any,
        crop: Any,
        workers: Any,
    ) -> None:
        """Checks and sets the settings; the arguments are those of the class."""
        sides = size_argument("resize", resize)
        self.passed = Preprocessing(
            size=size_argument("size", size),
            mean=channel_argument("mean", mean),
            std=channel_argument("std", std),
            resize=sides[0] if sides is not None and not isinstance(resize, list | tuple) else sides,
            interpolation=interpolation,
        )
        self.flip = bool(flip)
        self.crop = _crop_argument(crop)
        self.workers = _workers_argument(workers)

    def configured(self, **settings: Any) -> ImageFolder:
        """Returns the same files with other settings: the keyword arguments of the class, with its defaults."""
        part = self._copy()
        names = ("size", "mean", "std", "resize", "interpolation", "flip", "crop", "workers")
        part._configure(**dict.fromkeys(names) | {"flip": False} | settings)
        return part

    def _find(self, folder: Path) -> None:
        """Finds the classes and files in a folder."""
        assert self.root is not None
        self.classes = _subfolders(folder)
        prefix = "" if folder == self.root else f"{folder.name}/"
        files: list[str] = []
        labels: list[int] = []
        for index, name in enumerate(self.classes):
            found = list(_images(folder / name, f"{prefix}{name}/"))
            files += found
            labels += [index] * len(found)
        if self.classes:
            self.labels = np.array(labels, np.int64)
        else:
            files = list(_images(folder, prefix))
        self.files = files
        if not files:
            raise InputError(
                f"Reading images from '{folder}': there are none. Images are files with the suffixes "
                f"{', '.join(SUFFIXES)}, in one subfolder per class."
            )

    def __len__(self) -> int:
        return len(self.files)

    def __repr__(self) -> str:
        where = f"{len(self.files)} paths" if self.root is None else repr(str(self.root))
        return f"ImageFolder({where}, {len(self.files):,} images, {len(self.classes)} classes)"

    def __iter__(self) -> Iterator[Any]:
        # Otherwise Python would iterate by `__len__` and index, which a folder does not have.
        raise TypeError(
            "An ImageFolder is read by a Trainer; its files are in `files`, and `open` decodes one."
        )

    def path(self, index: int) -> str:
        """Returns the path of a file, e.g. "photos/train/cat/1.jpg"."""
        name = self.files[index]
        # Not a Path: joining would be slow for many files.
        return name if self.root is None else os.path.join(self.root, name)

    def open(self, index: int, mode: str = "RGB") -> Any:
        """Decodes a file, upright and without resizing, as a `PIL.Image.Image` of a mode, e.g. "L".

        Raises:
            UnreadableImageError: the file cannot be decoded.
        """
        return open_image(self.path(index), mode)

    def split(self, name: str) -> ImageFolder:
        """Returns a split, e.g. "val", with the same settings.

        Raises:
            InputError: there is no such split.
        """
        if self.root is None or name not in self.splits:
            raise InputError(
                f"The folder '{self.root}' has no split {name!r}; it has {', '.join(self.splits) or 'none'}."
            )
        part = self._copy()
        part.root, part.splits, part.unreadable, part.reported = self.root / name, [], {}, set()
        part._find(part.root)
        return part

    @property
    def validation(self) -> ImageFolder | None:
        """The split for validation; None if there is none."""
        name = next((name for name in VALIDATION if name in self.splits), None)
        return None if name is None else self.split(name)

    def readable(self) -> ImageFolder:
        """Decodes all files once, and returns a folder without those that cannot be read.

        Predictions for the new folder are in the order of its `files`. `unreadable` of this folder has the reasons.
        """
        from concurrent.futures import ThreadPoolExecutor

        def readable(index: int) -> bool:
            try:
                self.open(index)
            except UnreadableImageError as error:
                self.unreadable[index] = str(error)
                return False
            return True

        with ThreadPoolExecutor(self.workers) as threads:
            kept = np.flatnonzero(list(threads.map(readable, range(len(self)))))
        part = self._copy()
        part.files = [self.files[index] for index in kept]
        part.labels = None if self.labels is None else self.labels[kept]
        part.unreadable, part.reported = {}, set()
        return part

    def _copy(self) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def with_settings_of(self, other: ImageFolder) -> ImageFolder:
        """Returns a folder with the preprocessing of another folder for all values that this one leaves open."""
        ours, theirs = self.passed, other.passed
        fields = {
            name: getattr(theirs, name)
            for name in ("size", "mean", "std", "resize", "interpolation")
            if getattr(ours, name) is None
        }
        part = self._copy()
        part.passed = dataclasses.replace(ours, **fields)
        return part

    def require_no_splits(self) -> None:
        """Raises InputError if the folder has splits, of which evaluation has to be told one."""
        if self.splits:
            raise InputError(
                f"The folder '{self.root}' has the splits {', '.join(self.splits)}. Pass one of them, e.g. "
                f"{os.path.join(str(self.root), self.splits[-1])}."
            )

    def labels_for(self, classes: Sequence[str]) -> Array:
        """Returns the labels as indices of other classes, matched by name, int64 [files].

        Args:
            classes: names of the classes of a run; empty for those of this folder.

        Raises:
            InputError: the folder has no subfolders, or a name is not among the classes.
        """
        if self.labels is None:
            raise InputError(
                f"The images in '{self.root if self.root is not None else 'the list'}' have no classes: there must be "
                "one subfolder per class, e.g. photos/cat/1.jpg."
            )
        if not classes:
            return self.labels
        if unknown := [name for name in self.classes if name not in classes]:
            raise InputError(
                f"The folder '{self.root}' has the subfolders {some_names(unknown)}, but the classes of the model are "
                f"{some_names(list(classes))}. Rename them, or leave them out."
            )
        return np.array([list(classes).index(name) for name in self.classes], np.int64)[self.labels]

    def require_full_classes(self) -> None:
        """Raises InputError if a class has no images, which no model can learn."""
        assert self.labels is not None
        counts = np.bincount(self.labels, minlength=len(self.classes))
        if empty := [name for name, count in zip(self.classes, counts, strict=True) if not count]:
            raise InputError(
                f"The folder '{self.root}' has no images of {some_names(empty)}: the subfolders contain no file with "
                f"one of the suffixes {', '.join(SUFFIXES)}. Add images, or remove the subfolders."
            )

    def digest(self) -> str:
        """Returns a SHA-256 digest of the names and sizes of the files, and of the labels."""
        content = hashlib.sha256()
        for index, name in enumerate(self.files):
            try:
                size = os.stat(self.path(index)).st_size
            except OSError:
                size = -1
            content.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
        return content.hexdigest()


def _find_splits(root: Path) -> list[str]:
    """Returns the names of the splits; [] if the subfolders are classes, some of which may be called "train"."""
    names = _subfolders(root)
    others = [name for name in (*VALIDATION, _TEST) if name in names]
    if TRAINING not in names or not others or len(names) > len(others) + 1:
        return []
    return [TRAINING, *others] if _subfolders(root / TRAINING) else []


def _subfolders(folder: Path) -> list[str]:
    """Returns the names of the visible subfolders, sorted; links to folders count."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())
    except OSError as error:
        raise InputError(f"Reading images from '{folder}': {error.strerror or error}.") from error


def _images(folder: Path, prefix: str, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yields the images in a folder and in its subfolders, sorted by name.

    Args:
        folder: the folder.
        prefix: text to put before the names, e.g. "cat/".
        above: real paths of the folders that contain this one, so that a link to one of them is no endless loop.

    Raises:
        InputError: a folder cannot be read.
    """
    here = os.path.realpath(folder)
    if here in above:
        return
    try:
        with os.scandir(folder) as scanned:
            entries = sorted((e for e in scanned if e.name[0] != "."), key=lambda entry: entry.name)
            # A pipe that is called .jpg would be read for ever; a link to a missing file is reported as unreadable.
            files = [
                entry.name
                for entry in entries
                if entry.name.lower().endswith(SUFFIXES) and (entry.is_file() or entry.is_symlink())
                and not entry.is_dir()
            ]  # fmt: skip
            folders = [entry.name for entry in entries if entry.is_dir()]
    except OSError as error:
        raise InputError(f"Reading images from '{folder}': {error.strerror or error}.") from error
    for name in files:
        yield f"{prefix}{name}"
    for name in folders:
        yield from _images(folder / name, f"{prefix}{name}/", above | {here})


def _crop_argument(crop: object) -> tuple[float, float] | None:
    """Converts the argument `crop`; raises InputError for another value than it documents."""
    if crop is None or crop is False:
        return None
    bounds = (_LEAST_SHARE, 1.0) if crop is True else crop if isinstance(crop, list | tuple) else (crop, 1.0)
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        low, high = 0.0, 0.0
    if not 0 < low <= high <= 1:
        raise InputError(
            f"{argument('crop')} must be the smallest share of the image's area, from 0 to 1, or (smallest, largest), "
            f"received {crop!r}."
        )
    return low, high


def _workers_argument(workers: object) -> int:
    if workers is None:
        # The cores that this process may use, which are fewer than those of the machine in a container.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(8, cores)
    if (
        isinstance(workers, bool)
        or not isinstance(workers, int | np.integer)
        or not 1 <= workers <= _MOST_WORKERS
    ):
        raise InputError(
            f"workers must be a number of threads from 1 to {_MOST_WORKERS}, received {workers!r}."
        )
    return int(workers)
