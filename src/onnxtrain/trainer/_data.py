"""Arrays to train on: converted and checked once, before training starts, then cut into batches."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.inputs import check_arguments
from onnxtrain.runtime.manifest import InputSpec

__all__ = [
    "DYNAMIC_REMEDY",
    "ArrayLike",
    "Dataset",
    "check_batch_size",
    "split",
    "static_batch",
    "warn_of_fixed_batch",
]

ArrayLike = npt.ArrayLike | Sequence[npt.ArrayLike] | Mapping[str, npt.ArrayLike]
"""One array; for several inputs or targets a list in the model's order, or a mapping by name."""

_log = logging.getLogger("onnxtrain")

DYNAMIC_REMEDY = (
    "Export it with a dynamic batch axis, or make it so: Trainer(onnxtrain.make_batch_dynamic(model), ...)."
)
"""What to do about a fixed batch."""

# Streams of random numbers that derive from the trainer's seed.
_SHUFFLE, _SPLIT = 0, 1


@dataclass(frozen=True)
class Dataset:
    """Checked arrays, one per argument of the model, all with the samples along axis 0.

    Attributes:
        arrays: of the dtypes the model takes, C-contiguous.
        specs: what the model says about each.
        batch_size: samples per step.
        fixed: whether the model takes exactly `batch_size` samples.
        padding: samples at the end that were added to fill the last batch.
    """

    arrays: tuple[Array, ...]
    specs: tuple[InputSpec, ...]
    batch_size: int
    fixed: bool
    padding: int = 0

    @classmethod
    def for_prediction(cls, specs: Sequence[InputSpec], data: ArrayLike, batch_size: int | None) -> Dataset:
        """Returns the checked inputs; where the batch is fixed, the last sample is repeated to fill it."""
        arrays = [_convert("input", s, a) for s, a in zip(specs, _arrange("input", specs, data), strict=True)]
        _check_lengths(specs, arrays)
        size, fixed = check_batch_size(specs, batch_size)
        padding = -len(arrays[0]) % size if fixed else 0
        if padding:
            arrays = [_filled(array, padding) for array in arrays]
        _check_values(specs, arrays)
        return cls(tuple(arrays), tuple(specs), size, fixed, padding)

    @classmethod
    def check(
        cls,
        groups: Sequence[tuple[str, Sequence[InputSpec], ArrayLike | None]],
        batch_size: int | None,
        *,
        training: bool,
    ) -> Dataset:
        """Returns the arrays of all groups, converted to the model's dtypes and checked as a whole.

        Floating-point data is cast to the model's floating-point type, integers to its integer type if every
        value fits. Nothing else is converted.

        Args:
            groups: (word for messages, specifications, data) of the inputs, and of the targets.
            batch_size: as asked for; None means 32, or the model's own when it is fixed.
            training: whether they are to be trained on, which a model with a fixed batch does in whole batches only.

        Raises:
            InputError: Number, names, lengths, dtypes, shapes or values do not fit; nothing has been run yet.
        """
        specs: list[InputSpec] = []
        arrays: list[Array] = []
        for word, group, data in groups:
            if data is None and group:
                raise InputError(f"The model needs {word}s ({_names(group)}), received None.")
            given = [] if data is None else _arrange(word, group, data)
            specs += group
            arrays += [_convert(word, spec, array) for spec, array in zip(group, given, strict=True)]
        _check_lengths(specs, arrays)
        size, fixed = check_batch_size(specs, batch_size)
        dataset = cls(tuple(arrays), tuple(specs), size, fixed)
        if training:
            dataset.require_batch()
        _check_values(specs, arrays)
        return dataset

    def require_batch(self) -> None:
        """Raises InputError if the samples do not fill one batch of a model whose batch is fixed."""
        if self.batches == 0:
            raise InputError(
                f"The model takes exactly {self.batch_size} samples at a time, received {len(self)} to train on. "
                f"{DYNAMIC_REMEDY}"
            )

    def __len__(self) -> int:
        return len(self.arrays[0])

    @property
    def samples(self) -> int:
        """Number of samples without padding."""
        return len(self) - self.padding

    @property
    def batches(self) -> int:
        """Number of batches; where the model's batch is fixed, without the incomplete last one."""
        return len(self) // self.batch_size if self.fixed else -(-len(self) // self.batch_size)

    @property
    def left_out(self) -> int:
        """Samples of an epoch that make no full batch of a model whose batch is fixed."""
        return len(self) % self.batch_size if self.fixed else 0

    def order(self, seed: int, epoch: int, shuffle: bool) -> Array:
        """Returns the order of the samples in one epoch; it depends on nothing but the arguments."""
        if not shuffle:
            return np.arange(len(self))
        return np.random.default_rng([seed, _SHUFFLE, epoch]).permutation(len(self))

    def batch(self, index: int, order: Array | None = None) -> list[Array]:
        """Returns the arrays of one batch, in the given order of the samples."""
        part = slice(index * self.batch_size, (index + 1) * self.batch_size)
        if order is None:
            return [array[part] for array in self.arrays]
        return [array[order[part]] for array in self.arrays]

    def incomplete(self) -> tuple[list[Array], int]:
        """Returns the samples of an incomplete last batch, filled up with copies of the last one, and their number.

        There is one only where :attr:`left_out` is not 0.
        """
        arrays = self.batch(self.batches)
        count = len(arrays[0])
        return [_filled(array, self.batch_size - count) for array in arrays], count

    def last(self) -> Dataset:
        """Returns the data set of the incomplete last batch alone."""
        return self.take(np.arange(self.batches * self.batch_size, len(self)))

    def __iter__(self) -> Iterator[list[Array]]:
        for index in range(self.batches):
            yield self.batch(index)

    def take(self, samples: Array) -> Dataset:
        """Returns the data set of some samples."""
        return dataclasses.replace(self, arrays=tuple(array[samples] for array in self.arrays))


def _filled(array: Array, copies: int) -> Array:
    return np.concatenate([array, np.repeat(array[-1:], copies, axis=0)])


def split(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Returns the data set without a random `fraction` of its samples, and these.

    Which ones depends on the seed alone.

    Raises:
        InputError: The fraction leaves one of the two empty, or no batch of a fixed size to train on.
    """
    count = round(len(dataset) * fraction)
    if not 0 < fraction < 1 or count == 0 or count == len(dataset):
        raise InputError(
            f"Splitting off validation data: a fraction of {fraction} of {len(dataset)} samples leaves "
            "nothing to "
            f"{'validate with' if count == 0 else 'train on'}; choose one between 0 and 1, or pass (inputs, "
            "targets)."
        )
    order = np.random.default_rng([seed, _SPLIT]).permutation(len(dataset))
    training, validation = dataset.take(np.sort(order[count:])), dataset.take(np.sort(order[:count]))
    training.require_batch()
    return training, validation


def warn_of_fixed_batch(data: Dataset) -> None:
    """Logs a warning where a fixed batch makes training other than it looks."""
    if data.fixed and data.batch_size == 1 and len(data) > 1:
        _log.warning(
            "The model was exported for one sample at a time: each step of the optimizer sees a single one. %s Or pass "
            "accumulate=32.",
            DYNAMIC_REMEDY,
        )
    if data.left_out:
        _log.warning(
            "%d of %d samples are left out of each epoch: the model takes exactly %d at a time. %s",
            data.left_out,
            len(data),
            data.batch_size,
            DYNAMIC_REMEDY,
        )


def static_batch(specs: Sequence[InputSpec]) -> int | None:
    """Returns the number of samples that a model takes at a time, None when it takes any."""
    sizes = {spec.shape[0] for spec in specs if spec.shape and isinstance(spec.shape[0], int)}
    if len(sizes) > 1:
        raise InputError(
            f"The inputs and targets have different sizes along axis 0 ({sorted(sizes)}), where samples "
            "should lie: "
            f"{_names(specs)}. Train such a model through onnxtrain.api.Module."
        )
    return sizes.pop() if sizes else None


def check_batch_size(specs: Sequence[InputSpec], asked: int | None) -> tuple[int, bool]:
    """Returns the batch size to use, and whether the model fixes it.

    Raises:
        InputError: It is not a positive integer, or the model takes another one.
    """
    if asked is not None and (
        isinstance(asked, bool) or not isinstance(asked, int | np.integer) or asked < 1
    ):
        raise InputError(f"batch_size must be a positive integer, received {asked!r}.")
    fixed = static_batch(specs)
    if fixed is None:
        return int(asked or 32), False
    if asked is not None and asked != fixed:
        raise InputError(
            f"batch_size is {asked}, but the model was exported with a fixed batch of {fixed}. "
            f"{DYNAMIC_REMEDY} Or leave batch_size out."
        )
    return fixed, True


def _names(specs: Sequence[InputSpec]) -> str:
    return ", ".join(spec.name for spec in specs)


def _arrange(word: str, specs: Sequence[InputSpec], data: ArrayLike) -> list[Any]:
    """Returns one entry per specification, in order."""
    if isinstance(data, Mapping):
        missing = [spec.name for spec in specs if spec.name not in data]
        unknown = [str(name) for name in data if name not in {spec.name for spec in specs}]
        if missing or unknown:
            raise InputError(
                f"The model's {word}s are {_names(specs)}; received {', '.join(map(str, data))} "
                f"(missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'})."
            )
        return [data[spec.name] for spec in specs]
    if len(specs) == 1:
        single = isinstance(data, list | tuple) and len(data) == 1 and isinstance(data[0], np.ndarray)
        return [data[0] if single else data]  # type: ignore[index]
    if not isinstance(data, list | tuple) or len(data) != len(specs):
        received = f"{len(data)} arrays" if isinstance(data, list | tuple) else type(data).__name__
        raise InputError(
            f"The model has {len(specs)} {word}s ({_names(specs)}); received {received}. Pass a list in "
            "this order, or "
            "a dict by name."
        )
    return list(data)


def _convert(word: str, spec: InputSpec, data: Any) -> Array:
    """Returns `data` in the dtype of `spec` where no meaning is lost."""
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise InputError(f"The {word} '{spec.name}' is no array of one shape: {error}.") from error
    _check_label_form(spec, array)
    wanted = spec.dtype.name
    if array.dtype.name == wanted or (wanted == "bfloat16" and array.dtype == np.uint16):
        converted = array
    elif array.dtype.kind == "f" and wanted in ("float16", "float32", "float64"):
        with np.errstate(over="ignore"):
            converted = array.astype(wanted)
        if np.isinf(converted).any() and not np.isinf(array).any():
            raise InputError(
                f"The {word} '{spec.name}' holds values too large for {wanted} (largest: "
                f"{np.abs(array).max():g}); "
                "scale the data."
            )
    elif array.dtype.kind in "iu" and spec.dtype.storage.kind in "iu" and wanted != "bfloat16":
        converted = array.astype(wanted)
        if not np.array_equal(converted, array):
            raise InputError(f"The {word} '{spec.name}' holds values that do not fit into {wanted}.")
    else:
        raise InputError(_dtype_message(word, spec, array))
    if converted.dtype.kind == "f" and np.isnan(converted).any():
        sample = int(np.argwhere(np.isnan(converted))[0][0]) if converted.ndim else 0
        raise InputError(
            f"The {word} '{spec.name}' contains NaN (first in sample {sample}); remove or fill such samples."
        )
    return np.ascontiguousarray(converted) if converted.ndim else converted


def _check_label_form(spec: InputSpec, array: Array) -> None:
    """Raises InputError for class labels in a form that other libraries take: one-hot, or in a column."""
    labels = spec.class_labels
    if labels is None or spec.shape is None or array.ndim != len(spec.shape) + 1:
        return
    form = f"The labels '{spec.name}' should be one integer per sample, received shape {list(array.shape)}"
    if array.ndim == 2 and array.shape[1] == 1:
        raise InputError(f"{form}. Take them out of their column: labels[:, 0].")
    classes = array.dtype.kind in "iufb" and labels.count in (None, array.shape[1])
    if classes and np.isin(array, (0, 1)).all() and (array.sum(axis=1) == 1).all():
        raise InputError(
            f"{form}: they are one-hot. Pass labels.argmax(axis=1), or train with "
            "CrossEntropyLoss(probabilities=True)."
        )


def _dtype_message(word: str, spec: InputSpec, array: Array) -> str:
    wanted = spec.dtype.name
    message = f"The {word} '{spec.name}' should be {wanted}, received dtype {array.dtype}"
    if array.dtype == object:
        return f"{message}: it is no rectangular array of numbers."
    if spec.class_labels is not None and array.dtype.kind == "f":
        return f"{message}. Class labels are integers: .astype('int64'), or choose a regression loss."
    if wanted.startswith("float") and array.dtype.kind in "iub" and word == "target":
        return (
            f"{message}. If they are quantities, convert with .astype('{wanted}'); if they are classes, choose a loss "
            "for classes (cross_entropy)."
        )
    if wanted.startswith("float") and array.dtype.kind in "iu":
        return f"{message}. Convert with .astype('{wanted}'), scaled as the model expects (often / 255)."
    return f"{message}. Convert it with .astype('{wanted}') if that is what is meant."


def _check_values(specs: Sequence[InputSpec], arrays: Sequence[Array]) -> None:
    """Checks ranks, sizes and class labels of all samples at once, as a step checks those of its batch."""
    # The number of samples stands in for the size of a batch, so its axis is left out.
    relaxed = [s if s.shape is None else dataclasses.replace(s, shape=(None, *s.shape[1:])) for s in specs]
    check_arguments(relaxed, arrays)


def _check_lengths(specs: Sequence[InputSpec], arrays: Sequence[Array]) -> None:
    for spec, array in zip(specs, arrays, strict=True):
        if array.ndim == 0 or (spec.shape is not None and len(spec.shape) == 0):
            raise InputError(
                f"'{spec.name}' has no axis along which samples could lie. Train such a model through "
                "onnxtrain.api.Module."
            )
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1:
        listed = ", ".join(f"{spec.name}: {length}" for spec, length in zip(specs, lengths, strict=True))
        raise InputError(f"The arrays hold different numbers of samples ({listed}); they must be equal.")
    if not lengths or lengths[0] == 0:
        raise InputError(f"There are no samples: {_names(specs) or 'the model has no inputs'}.")
