"""Checks of what is passed to a training or evaluation step, before it reaches the graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from onnxtrain.errors import InputError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import ClassLabels, InputSpec
from onnxtrain.runtime.store import alias


def _show(spec: InputSpec) -> str:
    shape = (
        "of any shape"
        if spec.shape is None
        else "[" + ", ".join("?" if d in (None, "") else str(d) for d in spec.shape) + "]"
    )
    return f"{spec.name}: {spec.dtype.name} {shape}"


def _check_shape(spec: InputSpec, shape: tuple[int, ...], symbols: dict[str, tuple[int, str]]) -> None:
    if spec.shape is None:
        return
    where = f"Input '{spec.name}': expected {_show(spec)}, received shape {list(shape)}"
    if len(shape) != len(spec.shape):
        raise InputError(f"{where}, which has rank {len(shape)} instead of {len(spec.shape)}.")
    for axis, (size, expected) in enumerate(zip(shape, spec.shape, strict=True)):
        if isinstance(expected, int):
            if size != expected:
                raise InputError(f"{where}; axis {axis} must be {expected}.")
        elif expected:
            first, owner = symbols.setdefault(expected, (size, spec.name))
            if size != first:
                raise InputError(
                    f"{where}; '{expected}' is {first} in input '{owner}' and must be the same here."
                )


def _check_labels(name: str, labels: Array, allowed: ClassLabels) -> None:
    """Rejects labels that are no class: the graph would index out of range, or give a loss of garbage."""
    if labels.size == 0:
        return
    count = allowed.count
    if labels.min() >= 0 and (count is None or labels.max() < count):
        return
    wrong = labels < 0
    if count is not None:
        wrong |= labels >= count
    if allowed.ignore_index is not None:
        wrong &= labels != allowed.ignore_index
    if not wrong.any():
        return
    position = tuple(int(i) for i in np.argwhere(wrong)[0])
    classes = "0 or more" if count is None else f"0 .. {count - 1}"
    ignored = "" if allowed.ignore_index is None else f", or {allowed.ignore_index} to ignore an element"
    raise InputError(
        f"Input '{name}': class labels must be {classes}{ignored}; received {labels[position]} at index "
        f"{list(position)} ({int(wrong.sum())} such labels)."
    )


def _from_array(spec: InputSpec, array: Array) -> tuple[ort.OrtValue, Array]:
    dtype = dtypes.of_array(array)
    raw_bits = spec.dtype.name == "bfloat16" and dtype is not None and dtype.name == "uint16"
    if dtype is not spec.dtype and not raw_bits:
        raise InputError(
            f"Input '{spec.name}': expected {_show(spec)}, received dtype {array.dtype}. "
            f"Convert with array.astype('{spec.dtype.name}')."
        )
    if array.dtype != spec.dtype.storage:  # ml_dtypes' bfloat16, or the other byte order
        array = array.view(np.uint16) if spec.dtype.name == "bfloat16" else array.astype(spec.dtype.storage)
    array = np.asarray(array, order="C")
    return alias(array, spec.dtype), array


def _from_ort_value(spec: InputSpec, value: ort.OrtValue) -> ort.OrtValue:
    if not value.is_tensor() or value.data_type() != spec.dtype.ort:
        raise InputError(
            f"Input '{spec.name}': expected {_show(spec)}, received an OrtValue of {value.data_type()}."
        )
    return value


def bind_arguments(specs: Sequence[InputSpec], arguments: Sequence[object]) -> list[ort.OrtValue]:
    """Returns one `OrtValue` per argument, after checking number, dtype, shape and class labels.

    Arrays are aliased, not copied, unless they are not C-contiguous. Equal symbolic dimensions must have
    equal sizes.

    Raises:
        InputError: Something does not fit; the message names the input, what was expected and what was
            received.
    """
    if len(arguments) != len(specs):
        raise InputError(
            f"The model takes {len(specs)} inputs ({'; '.join(map(_show, specs))}), received "
            f"{len(arguments)}."
        )
    symbols: dict[str, tuple[int, str]] = {}
    values = []
    for spec, argument in zip(specs, arguments, strict=True):
        array: Array | None = None
        if isinstance(argument, np.ndarray):
            value, array = _from_array(spec, argument)
            shape = tuple(array.shape)
        elif isinstance(argument, ort.OrtValue):
            value = _from_ort_value(spec, argument)
            shape = tuple(value.shape())
        else:
            raise InputError(
                f"Input '{spec.name}': expected a numpy array or an OrtValue ({_show(spec)}), received "
                f"{type(argument).__name__}. Convert with numpy.asarray(value, '{spec.dtype.name}')."
            )
        _check_shape(spec, shape, symbols)
        if spec.class_labels is not None:
            _check_labels(spec.name, value.numpy() if array is None else array, spec.class_labels)
        values.append(value)
    return values
