"""Converts users' data to arrays for a model, and rejects conversions that could change the data's meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxtrain._words import words
from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array, narrow, widen
from onnxtrain.runtime.inputs import check_labels, check_shapes
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.runtime.store import require_unmasked
from onnxtrain.trainer.data._frames import frame_values, is_frame, is_series, series_values

ArrayLike = npt.ArrayLike | Sequence[npt.ArrayLike] | Mapping[str, npt.ArrayLike]
"""One array; for several inputs or targets, a list in the model's order, or a mapping by name."""

# Elements per chunk of a check, so that its temporary arrays are small compared to the data.
_CHUNK = 1 << 22


def names_of(specs: Sequence[InputSpec]) -> str:
    """Returns the names of inputs or targets, for error messages."""
    return ", ".join(spec.name for spec in specs)


def relaxed(specs: Sequence[InputSpec]) -> list[InputSpec]:
    """Returns copies of specifications in which the first dimension (the batch size) is unknown."""
    return [s if s.shape is None else dataclasses.replace(s, shape=(None, *s.shape[1:])) for s in specs]


def arrange(word: str, specs: Sequence[InputSpec], data: Any, *, loose: bool = False) -> list[Any]:
    """Returns the entries of the data in the order of the model's inputs or targets.

    Args:
        word: "input" or "target", for error messages.
        specs: inputs or targets of the model.
        data: one array, a list, a mapping by name, or a frame.
        loose: True to ignore unknown names in a mapping.

    Raises:
        InputError: the number of arrays or their names do not match the specifications.
    """
    # Checked first, because a frame is a mapping too, but its columns need conversion.
    if is_frame(data):
        return frame_values(word, specs, data)
    if isinstance(data, Mapping):
        missing = [spec.name for spec in specs if spec.name not in data]
        unknown = [str(name) for name in data if name not in {spec.name for spec in specs}]
        # A misspelled name must not be ignored: the model would train without the input's data, or fail later.
        if missing or (unknown and not loose):
            raise InputError(
                f"The model's {word}s are {names_of(specs)}; received {', '.join(map(str, data))} "
                f"(missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'})."
            )
        return [data[spec.name] for spec in specs]
    if len(specs) == 1:
        # [array] is a list with the only input; [1.0, 2.0] is the input itself.
        single = isinstance(data, list | tuple) and len(data) == 1 and hasattr(data[0], "__array__")
        return [data[0] if single else data]
    if not isinstance(data, list | tuple) or len(data) != len(specs):
        received = f"{len(data)} arrays" if isinstance(data, list | tuple) else type(data).__name__
        raise InputError(
            f"The model has {len(specs)} {word}s ({names_of(specs)}); received {received}. Pass a list in "
            "this order, or a dict by name."
        )
    return list(data)


def to_array(word: str, spec: InputSpec, data: Any) -> Array:
    """Converts data, including tensors of other libraries, to a numpy array.

    Args:
        word: "input" or "target", for error messages.
        spec: specification of the input or target.
        data: array, tensor, series, or nested list of numbers.

    Raises:
        InputError: the data has no uniform shape, is sparse, or has masked values.
    """
    if is_series(data):
        return series_values(word, spec, data)
    if is_sparse(data):
        raise InputError(
            f"The {word} '{spec.name}' is sparse ({type(data).__name__}). Convert it with .toarray(); for "
            "data that is too large for memory, pass a function that yields batches."
        )
    require_unmasked(f"The {word} '{spec.name}'", data)
    try:
        array = np.asarray(of_tensor(data))
    except (ValueError, TypeError) as error:
        raise InputError(f"The {word} '{spec.name}' is not an array of one shape: {error}.") from error
    if array.dtype == object:
        return _as_numbers(array)
    if array.dtype.name == "bfloat16":
        return array.astype(np.float32)
    # numpy has no bfloat16 without ml_dtypes; such data is uint16, its raw bits.
    return widen(array, spec.dtype) if spec.dtype.name == "bfloat16" and array.dtype == np.uint16 else array


def of_tensor(data: Any) -> Any:
    """Converts a PyTorch tensor to a tensor that numpy accepts. Other data is returned unchanged.

    numpy rejects tensors that require gradients, are on another device, are lazily conjugated or negated, or have dtype
    bfloat16.

    Raises:
        InputError: the tensor has no data (a meta tensor), or is sparse.
    """
    if not hasattr(data, "detach"):
        return data
    if getattr(data, "is_meta", False):
        raise InputError(
            f"A tensor of shape {list(data.shape)} on device 'meta' has no data. Pass a tensor with data, "
            "e.g. torch.zeros(shape)."
        )
    if str(getattr(data, "layout", "torch.strided")) != "torch.strided":
        raise InputError(
            f"A tensor of shape {list(data.shape)} is sparse ({data.layout}), but models take dense "
            "tensors. Pass tensor.to_dense()."
        )
    data = data.detach().cpu()
    if hasattr(data, "resolve_neg"):
        data = data.resolve_conj().resolve_neg()
    return data.float() if str(data.dtype) == "torch.bfloat16" else data


def is_sparse(data: object) -> bool:
    """True for a sparse SciPy matrix or array."""
    return type(data).__module__.startswith("scipy.sparse") and hasattr(data, "toarray")


def _as_numbers(array: Array) -> Array:
    """Converts an object array of Python numbers to a numeric array; returns other object arrays unchanged."""
    try:
        numbers = np.asarray(array.tolist())
    except (ValueError, TypeError):
        return array
    return numbers if numbers.dtype.kind in "biuf" else array


def check_form(word: str, spec: InputSpec, array: Array) -> None:
    """Raises InputError if an array's dtype cannot be cast implicitly, or class labels have a wrong shape.

    Integers, for example, are not cast to floating point. One-hot labels and columns [samples, 1] are rejected.

    Args:
        word: "input" or "target", for error messages.
        spec: specification of the input or target.
        array: data for this input or target.
    """
    _check_label_form(spec, array)
    dtype_name = spec.dtype.name
    same = array.dtype.name == dtype_name
    # Integers for a float input are rejected: usually they are images, 0 to 255, that were not scaled.
    floats = array.dtype.kind == "f" and dtype_name in ("float16", "bfloat16", "float32", "float64")
    integers = (
        array.dtype.kind in "iu"
        and spec.dtype.storage.kind in "iu"
        and dtype_name not in ("bfloat16", "bool")
    )
    if not (same or floats or integers):
        raise InputError(_dtype_message(word, spec, array))


def check_values(word: str, spec: InputSpec, array: Array) -> None:
    """Raises InputError for NaN, infinity, invalid class labels, or values that overflow the model's dtype.

    Args:
        word: "input" or "target", for error messages.
        spec: specification of the input or target.
        array: data for this input or target; :func:`check_form` must have accepted it.
    """
    kind = array.dtype.kind
    if kind == "f" or (kind in "iu" and array.dtype != spec.dtype.storage):
        for first, part in _chunks(array):
            _check_part(word, spec, part, first)
    if spec.class_labels is not None and kind in "iu":
        check_labels(spec.name, array, spec.class_labels)


def _chunks(array: Array) -> Iterator[tuple[int, Array]]:
    """Yields chunks of an array, each with the index of its first sample."""
    if array.size <= _CHUNK:
        yield 0, array
        return
    step = max(1, _CHUNK * len(array) // array.size)
    for first in range(0, len(array), step):
        yield first, array[first : first + step]


def _check_part(word: str, spec: InputSpec, part: Array, first: int) -> None:
    dtype_name = spec.dtype.name
    if part.dtype.kind in "iu":
        # Casting wraps around silently: 300 becomes 44 in uint8.
        if not np.array_equal(part.astype(spec.dtype.storage), part):
            raise InputError(f"The {word} '{spec.name}' contains values that do not fit into {dtype_name}.")
        return
    if not np.isfinite(part).all():
        _refuse_infinite(word, spec, part, first)
    # float64 data is cast to float32, in which values above 3.4e38 become infinite.
    if part.dtype.itemsize > spec.dtype.storage.itemsize:
        with np.errstate(over="ignore"):
            overflown = np.isinf(cast(spec, part)).any()
        if overflown:
            raise InputError(
                f"The {word} '{spec.name}' contains values too large for {dtype_name} (largest: "
                f"{np.abs(part).max():g}); scale the data."
            )


def _refuse_infinite(word: str, spec: InputSpec, part: Array, first: int) -> None:
    """Raises InputError if the data contains NaN or infinity. Either would make losses and gradients NaN.

    Args:
        word: "input" or "target", for error messages.
        spec: specification of the input or target.
        part: chunk of the data.
        first: index of the first sample in `part`.
    """
    for name, places in (("NaN", np.isnan(part)), ("infinity", np.isinf(part))):
        if not places.any():
            continue
        sample = first + int(np.argwhere(places)[0][0]) if part.ndim else 0
        mask = " (in a mask, use numpy.finfo('float32').min instead of -inf)" if name == "infinity" else ""
        raise InputError(
            f"The {word} '{spec.name}' contains {name} (first in sample {sample}); remove or fill such samples{mask}."
        )


def cast(spec: InputSpec, array: Array) -> Array:
    """Casts a checked array to the model's dtype and makes it C-contiguous; copies it only if necessary.

    For bfloat16, returns float32 values rounded to bfloat16.
    """
    if spec.dtype.name == "bfloat16":
        return widen(narrow(np.ascontiguousarray(array, np.float32), spec.dtype), spec.dtype)
    return np.ascontiguousarray(array, spec.dtype.storage)


def _check_label_form(spec: InputSpec, array: Array) -> None:
    """Raises InputError if class labels are one-hot or a column vector [samples, 1]."""
    labels = spec.class_labels
    if labels is None or spec.shape is None or array.ndim != len(spec.shape) + 1:
        return
    form = f"The labels '{spec.name}' should be one integer per sample, received shape {list(array.shape)}"
    if array.ndim == 2 and array.shape[1] == 1:
        raise InputError(f"{form}. {words().take_from_column()}.")
    classes = array.dtype.kind in "iufb" and labels.count in (None, array.shape[1])
    if classes and np.isin(array, (0, 1)).all() and (array.sum(axis=1) == 1).all():
        raise InputError(f"{form}: they are one-hot. {words().from_one_hot()}.")


def _dtype_message(word: str, spec: InputSpec, array: Array) -> str:
    dtype = spec.dtype.held.name
    message = f"The {word} '{spec.name}' should be {spec.dtype.name}, received dtype {array.dtype}"
    if array.dtype == object:
        return f"{message}: it is not a rectangular array of numbers, or values are missing."
    if array.dtype.names is not None:
        return (
            f"{message}, a structured array. Convert its fields to columns: "
            "numpy.lib.recfunctions.structured_to_unstructured."
        )
    if spec.class_labels is not None and array.dtype.kind == "f":
        return (
            f"{message}. Class labels are integers: {words().convert('int64')}, or choose a regression loss."
        )
    if dtype.startswith("float") and array.dtype.kind in "iub" and word == "target":
        return (
            f"{message}. If they are quantities, {words().convert(dtype)}; if they are classes, choose a loss for "
            "classes (cross_entropy)."
        )
    if dtype.startswith("float") and array.dtype.kind in "iu":
        remedy = words().convert(dtype)
        return f"{message}. {remedy[0].upper()}{remedy[1:]}, scaled as the model expects (often / 255)."
    remedy = words().convert(dtype, "it")
    return f"{message}. If that is intended, {remedy}."


def check_lengths(specs: Sequence[InputSpec], arrays: Sequence[Array]) -> None:
    """Raises InputError if arrays do not match the model's shapes, differ in number of samples, or are empty."""
    for spec, array in zip(specs, arrays, strict=True):
        if array.ndim == 0 or (spec.shape is not None and len(spec.shape) == 0):
            raise InputError(
                f"'{spec.name}' has no batch axis. Train such a model through onnxtrain.api.Module."
            )
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1:
        listed = ", ".join(f"{spec.name}: {length}" for spec, length in zip(specs, lengths, strict=True))
        raise InputError(f"The arrays have different numbers of samples ({listed}); they must be equal.")
    if not lengths or lengths[0] == 0:
        raise InputError(f"There are no samples: {names_of(specs) or 'the model has no inputs'}.")
    check_shapes(relaxed(specs), [array.shape for array in arrays])


def fill(array: Array, copies: int) -> Array:
    """Appends `copies` copies of the last sample to an array."""
    # Copies of a real sample are valid for every model; zeros may not be, e.g. as labels, token ids or divisors.
    return np.concatenate([array, np.repeat(array[-1:], copies, axis=0)])
