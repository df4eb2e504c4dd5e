"""Checks the arguments of a training or evaluation step before they are passed to ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
import onnxruntime as ort

from onnxtrain._words import words
from onnxtrain.errors import InputError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.dtypes import Array, narrow
from onnxtrain.runtime.manifest import ClassLabels, Dim, InputSpec, LabelSequences
from onnxtrain.runtime.store import alias, require_unmasked, to_array

# Elements above which a sum is faster than a check of each element, with the context manager that it needs.
_LARGE = 16384
_UNSIGNED = {np.dtype(f"i{size}"): np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def _dynamic_remedy() -> str:
    """Returns advice on making the batch axis dynamic, for an input whose first axis has the wrong size."""
    # The usual reason for a wrong first axis is a model that was exported with a fixed batch size.
    return (
        " If this is the batch: export the model with a dynamic batch axis, or "
        f"{words().dynamic_batch('generate_artifacts')}."
    )


def _show(spec: InputSpec) -> str:
    """Describes an input for an error message, e.g. "x: float32 [batch, 4]"."""
    shape = "of any shape" if spec.shape is None else _show_shape(spec.shape)
    return f"{spec.name}: {spec.dtype.name} {shape}"


def _show_shape(shape: Sequence[Dim]) -> str:
    return "[" + ", ".join("?" if d in (None, "") else str(d) for d in shape) + "]"


def _mismatch(spec: InputSpec, shape: tuple[int, ...]) -> str:
    return f"Input '{spec.name}': expected {_show(spec)}, received shape {list(shape)}"


def _check_shape(spec: InputSpec, shape: tuple[int, ...], symbols: dict[str, tuple[int, str]]) -> None:
    """Raises InputError if a shape does not match an input.

    Args:
        spec: the input.
        shape: the shape to check.
        symbols: for each symbolic size, its value and the first input with that size, e.g. {"batch": (8, "x")}; new
            sizes are added.
    """
    if spec.shape is None:
        return
    if len(shape) != len(spec.shape):
        raise InputError(
            f"{_mismatch(spec, shape)}, which has rank {len(shape)} instead of {len(spec.shape)}."
            f"{_class_axis(spec)}"
        )
    for axis, (size, expected) in enumerate(zip(shape, spec.shape, strict=True)):
        if isinstance(expected, int):
            if size != expected:
                remedy = _dynamic_remedy() if axis == 0 else ""
                raise InputError(
                    f"{_mismatch(spec, shape)}; axis {axis} must be {expected}.{remedy}{_class_axis(spec)}"
                )
        # A symbolic size such as "batch" must have the same value in all inputs.
        elif expected:
            first, owner = symbols.setdefault(expected, (size, spec.name))
            if size != first:
                raise InputError(
                    f"{_mismatch(spec, shape)}; '{expected}' is {first} in input '{owner}' and must be "
                    f"the same here.{_class_axis(spec)}"
                )


def _class_axis(spec: InputSpec) -> str:
    """Returns advice on choosing the class axis of the loss, to append to an error about the shape of labels.

    Returns "" if `spec` has no class labels, or if the logits have at most two axes, so that their class axis is
    unambiguous.
    """
    # The classes of a language model's logits [batch, seq, 512] are on the last axis, while ONNX and PyTorch expect
    # axis 1 by default. Labels of a wrong shape are the first symptom.
    labels = spec.class_labels
    if labels is None or labels.scores is None:
        return ""
    last = labels.axis != len(labels.scores) - 1
    where = "the last axis, as the vocabulary of a language model" if last else "axis 1"
    return (
        f" The loss takes the classes from axis {labels.axis} of the scores {_show_shape(labels.scores)}. If they lie "
        f"along {where}, build the artifacts with "
        f"{words().loss_setting('CrossEntropyLoss', 'axis', -1 if last else 1)}."
    )


def _all_valid(labels: Array, count: int | None) -> bool:
    """True if all labels are in [0, `count`), or non-negative if `count` is None."""
    unsigned = _UNSIGNED.get(labels.dtype)
    if unsigned is None:
        return bool(labels.min() >= 0 and (count is None or labels.max() < count))
    # A single pass without memory: as an unsigned number, a negative label exceeds all others.
    most = np.iinfo(labels.dtype).max
    return bool(
        np.maximum.reduce(labels.view(unsigned), axis=None)
        <= (most if count is None else min(count - 1, most))
    )


def check_labels(name: str, labels: Array, allowed: ClassLabels) -> None:
    """Raises InputError if a label is neither a class nor the ignored label."""
    # numpy has no minimum of an empty array.
    if labels.size == 0:
        return
    count = allowed.count
    if _all_valid(labels, count):
        return
    # `ignore_index` may be a class, or not (-100).
    wrong = labels < 0
    if count is not None:
        wrong |= labels >= count
    if allowed.ignore_index is not None:
        wrong &= labels != allowed.ignore_index
    if not wrong.any():
        return
    position = tuple(int(i) for i in np.argwhere(wrong)[0])
    classes = "0 or more" if count is None else f"0 to {count - 1}"
    ignored = "" if allowed.ignore_index is None else f", or {allowed.ignore_index} to ignore an element"
    raise InputError(
        f"Input '{name}': class labels must be {classes}{ignored}; received {labels[position]} at index "
        f"{list(position)} ({int(wrong.sum())} such labels)."
    )


def require_trainable(specs: Sequence[InputSpec], values: Sequence[Array | ort.OrtValue]) -> bool:
    """Raises InputError if a batch is empty, or if a floating-point input contains NaN.

    Infinity is allowed: additive attention masks and logarithms of zero contain -inf. Arguments on a GPU are not read.

    Args:
        specs: the inputs that the model expects.
        values: one array or OrtValue per input, as :func:`check_arguments` returns them.

    Returns:
        True if an input contains infinity, which may make gradients NaN even if the loss is finite.
    """
    infinite = False
    for spec, value in zip(specs, values, strict=True):
        shape = value.shape if isinstance(value, np.ndarray) else value.shape()
        # An input whose first axis is always empty has no batch axis.
        if shape and shape[0] == 0 and not (spec.shape and spec.shape[0] == 0):
            raise InputError(
                f"Input '{spec.name}': received shape {list(shape)}, a batch without samples. Pass at least one sample."
            )
        if spec.dtype.held.kind != "f":
            continue
        if isinstance(value, np.ndarray) or value.device_name() == "cpu":
            infinite |= _is_infinite(spec, to_array(value))
    return infinite


def _is_infinite(spec: InputSpec, array: Array) -> bool:
    """True if a floating-point array contains infinity; raises InputError if it contains NaN."""
    if array.size > _LARGE and array.dtype.itemsize > 2:
        # Nearly always finite, and without a temporary array. If the sum overflows, each element is checked.
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.add.reduce(array, axis=None)):
                return False
    if np.isfinite(array).all():
        return False
    wrong = np.isnan(array)
    if not wrong.any():
        return True
    position = tuple(int(i) for i in np.argwhere(wrong)[0])
    raise InputError(
        f"Input '{spec.name}': NaN is not allowed in a training step; received {array[position]} at index "
        f"{list(position)} ({int(wrong.sum())} such numbers). Leave out or fill these samples."
    )


def check_sequences(specs: Sequence[InputSpec], arrays: Sequence[Array]) -> None:
    """Raises InputError if a label of a sequence is the blank, or not a class.

    Args:
        specs: inputs and targets of the training model.
        arrays: one array per input and target, with valid shapes and dtypes.
    """
    for spec, labels in zip(specs, arrays, strict=False):
        allowed = spec.sequences
        if allowed is None or labels.ndim != 2 or labels.dtype.kind not in "iu":
            continue
        lengths = next(
            (a for s, a in zip(specs, arrays, strict=False) if s.name == allowed.lengths and a.ndim == 1),
            None,
        )
        if lengths is None or len(lengths) != len(labels):
            continue
        used = np.arange(labels.shape[1]) < lengths[:, np.newaxis]
        unknown = labels < 0
        if allowed.count is not None:
            unknown |= labels >= allowed.count
        for wrong, problem in ((labels == allowed.blank, "is the blank"), (unknown, "is not a class")):
            if (places := np.argwhere(wrong & used)).size:
                sample, position = (int(i) for i in places[0])
                raise InputError(
                    f"Target '{spec.name}': label {labels[sample, position]} of sample {sample}, at position "
                    f"{position}, {problem} ({len(places)} such labels). {_sequence_remedy(allowed, labels[used])}"
                )


def _sequence_remedy(allowed: LabelSequences, labels: Array) -> str:
    """Returns advice on labels that are the blank or no class.

    Args:
        allowed: the allowed labels.
        labels: all labels of the data, without padding.
    """
    classes = "" if allowed.count is None else f"the model has the classes 0 to {allowed.count - 1}, and "
    rule = f"The blank is class {allowed.blank}, which stands for no label: {classes}labels are the other classes."
    # Many models have the blank as the last class.
    last = None if allowed.count is None else allowed.count - 1
    if last is not None and int(labels.max()) < last and int(labels.min()) >= 0:
        setting = words().loss_setting("CTCLoss", "blank", last)
        return f"{rule} If the blank of this model is class {last}, pass {setting}."
    setting = words().loss_setting("CTCLoss", "blank", "...")
    return f"{rule} Renumber the labels, or choose the model's blank: {setting}."


def check_shapes(specs: Sequence[InputSpec], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raises InputError unless `shapes` match `specs`.

    A symbolic size such as "batch" must have the same value in all inputs.

    Args:
        specs: the inputs that the model expects.
        shapes: one shape per input.
    """
    symbols: dict[str, tuple[int, str]] = {}
    for spec, shape in zip(specs, shapes, strict=True):
        _check_shape(spec, shape, symbols)


def _from_array(spec: InputSpec, array: Array) -> Array:
    """Converts an array to a C-contiguous array of the input's storage dtype, without a copy if possible.

    Raises:
        InputError: the dtype does not match, or the array is masked.
    """
    require_unmasked(f"Input '{spec.name}'", array)
    if spec.dtype.name == "bfloat16" and array.dtype == np.float32:
        return narrow(np.asarray(array, order="C"), spec.dtype)
    if array.dtype != spec.dtype.storage:
        if dtypes.of_array(array) is not spec.dtype:
            raise InputError(
                f"Input '{spec.name}': expected {_show(spec)}, received dtype {array.dtype}. "
                f"Convert with array.astype('{spec.dtype.held.name}')."
            )
        # bfloat16 of ml_dtypes, and arrays of the other byte order, have the same element type but another dtype.
        array = array.view(np.uint16) if spec.dtype.name == "bfloat16" else array.astype(spec.dtype.storage)
    return np.asarray(array, order="C")


def check_arguments(specs: Sequence[InputSpec], arguments: Sequence[object]) -> list[Array | ort.OrtValue]:
    """Checks the number, dtypes, shapes and class labels of a step's arguments, and prepares them for binding.

    Args:
        specs: the inputs that the model expects.
        arguments: one numpy array or OrtValue per input. An array is copied only if it is not C-contiguous, has
            non-native byte order, or is float32 for a bfloat16 input.

    Returns:
        One value per input, to be bound to the session. Arrays for bfloat16 inputs are returned as OrtValues.

    Raises:
        InputError: an argument does not match its input. The message contains the expected and the received value.
    """
    if len(arguments) != len(specs):
        raise InputError(
            f"The model expects {len(specs)} inputs ({'; '.join(map(_show, specs))}), received "
            f"{len(arguments)}."
        )
    symbols: dict[str, tuple[int, str]] = {}
    values: list[Array | ort.OrtValue] = []
    for spec, argument in zip(specs, arguments, strict=True):
        value: Array | ort.OrtValue
        if isinstance(argument, np.ndarray):
            value = _from_array(spec, argument)
            shape = value.shape
        elif isinstance(argument, ort.OrtValue):
            if not argument.is_tensor() or argument.data_type() != spec.dtype.ort:
                raise InputError(
                    f"Input '{spec.name}': expected {_show(spec)}, received an OrtValue of {argument.data_type()}."
                )
            value = argument
            shape = tuple(value.shape())
        else:
            raise InputError(
                f"Input '{spec.name}': expected a numpy array or an OrtValue ({_show(spec)}), received "
                f"{type(argument).__name__}. Convert with numpy.asarray(value, '{spec.dtype.held.name}')."
            )
        _check_shape(spec, shape, symbols)
        if spec.class_labels is not None:
            labels = value if isinstance(value, np.ndarray) else value.numpy()
            check_labels(spec.name, labels, spec.class_labels)
        # onnxruntime would interpret a uint16 array as uint16; an OrtValue declares that the bits are bfloat16.
        raw_bits = isinstance(value, np.ndarray) and spec.dtype.name == "bfloat16"
        values.append(alias(value, spec.dtype) if raw_bits else value)
    return values


class ArgumentCheck:
    """Checks the arguments of repeated calls like :func:`check_arguments`.

    Arrays with the shapes of the previous call are checked faster.

    Args:
        specs: the inputs that the model expects.
    """

    def __init__(self, specs: Sequence[InputSpec]) -> None:
        self._specs = specs
        # A bfloat16 argument is converted in each call.
        self._dtypes = [None if spec.dtype.name == "bfloat16" else spec.dtype.storage for spec in specs]
        self._labels = [
            (index, spec.name, spec.class_labels) for index, spec in enumerate(specs) if spec.class_labels
        ]
        self._shapes: list[tuple[int, ...]] = []

    def __call__(self, arguments: Sequence[object]) -> Sequence[Array | ort.OrtValue]:
        """Returns one value per input, to be bound to the session.

        Raises:
            InputError: see :func:`check_arguments`.
        """
        if not self._as_before(arguments):
            values = check_arguments(self._specs, arguments)
            arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
            self._shapes = [array.shape for array in arrays] if len(arrays) == len(arguments) else []
            return values
        for index, name, allowed in self._labels:
            check_labels(name, arguments[index], allowed)
        return arguments

    def _as_before(self, arguments: Sequence[object]) -> TypeGuard[Sequence[Array]]:
        """True if the arguments are arrays that need no conversion, with the shapes of the previous call."""
        if len(arguments) != len(self._shapes):
            return False
        for argument, dtype, shape in zip(arguments, self._dtypes, self._shapes, strict=True):
            # Subclasses may have a mask. Other dtype objects can be equal, and take the slow path.
            if (
                type(argument) is not np.ndarray
                or argument.dtype is not dtype
                or argument.shape != shape
                or not argument.flags.c_contiguous
            ):
                return False
        return True
