"""Stores each tensor of a training run exactly once, in memory that sessions are bound to."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import onnxruntime as ort

from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.device import CPU, Device
from onnxtrain.runtime.dtypes import Array, DType
from onnxtrain.runtime.lock import GradientOwner, StateLock
from onnxtrain.runtime.not_copyable import NotCopyable
from onnxtrain.runtime.rows import RowGradient


class Buffer:
    """A tensor with fixed dtype and shape, whose memory is not reallocated unless it moves to a different device.

    On the CPU it is a C-contiguous numpy array, and :attr:`value` is an `OrtValue` that shares its memory: what a
    session writes is visible in the array, and vice versa. On other devices there is only the `OrtValue`, and
    :meth:`read` returns a copy.

    Attributes:
        dtype: element type.
        shape: sizes, e.g. (3, 4).
        defined: False for a tensor of a nominal checkpoint that has no data yet.
    """

    __slots__ = ("_array", "_value", "defined", "device", "dtype", "shape")

    def __init__(self, array: Array, dtype: DType, *, defined: bool = True) -> None:
        """Wraps an array without copying it. It must be C-contiguous and have the storage dtype of `dtype`."""
        self.dtype = dtype
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.defined = defined
        self.device = CPU
        self._array: Array | None = array
        # Created when a session is bound; reading or saving a checkpoint needs no OrtValues.
        self._value: ort.OrtValue | None = None

    @classmethod
    def zeros(
        cls, dtype: DType, shape: Iterable[int], device: Device = CPU, *, defined: bool = True
    ) -> Buffer:
        """Returns a buffer of zeros on `device`."""
        return cls.filled(0.0, dtype, shape, device, defined=defined)

    @classmethod
    def filled(
        cls, value: float, dtype: DType, shape: Iterable[int], device: Device = CPU, *, defined: bool = True
    ) -> Buffer:
        """Returns a buffer on `device` with all elements equal to `value`, which must be 0 for bfloat16."""
        if value and dtype.name == "bfloat16":
            raise InputError(f"Filling a bfloat16 tensor with {value} is not supported; use float32 moments.")
        # Unlike np.full, np.zeros does not touch the memory until it is written.
        array = (
            np.full(tuple(shape), value, dtype.storage) if value else np.zeros(tuple(shape), dtype.storage)
        )
        buffer = cls(array, dtype, defined=defined)
        buffer.move_to(device)
        return buffer

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def value(self) -> ort.OrtValue:
        """The `OrtValue` to bind sessions to. On the CPU it aliases the array, elsewhere it owns device memory."""
        if self._value is None:
            assert self._array is not None
            self._value = alias(self._array, self.dtype)
        return self._value

    def read(self) -> Array:
        """Returns the content: on the CPU an array that shares the buffer's memory, on other devices a copy."""
        return self._array if self._array is not None else np.asarray(self.value.numpy())

    def write(self, array: Array) -> None:
        """Copies an array of the same shape and storage dtype to the buffer."""
        # In place, because sessions are bound to the memory.
        if self._array is not None:
            np.copyto(self._array, array, casting="no")
        else:
            self.value.update_inplace(np.ascontiguousarray(array))
        self.defined = True

    def set(self, number: float) -> None:
        """Sets all elements to a number, converted to the buffer's dtype, which must not be bfloat16."""
        if self._array is not None:
            self._array[...] = number
        else:
            self.write(np.full(self.shape, number, self.dtype.storage))

    def move_to(self, device: Device) -> None:
        """Moves the tensor to `device`. Does nothing if it is already there.

        An array that :meth:`read` returned before the move no longer shares memory with the buffer.

        Raises:
            InputError: the dtype is bfloat16, and `device` is not the CPU.
        """
        if device == self.device:
            return
        content = self.read()
        if device == CPU:
            self._array, self._value = content.copy(), None
        else:
            # ONNX Runtime supports bfloat16 OrtValues only in CPU memory.
            if self.dtype.name == "bfloat16":
                raise InputError(
                    f"Moving a bfloat16 tensor to device '{device}' is not supported; use device='cpu'."
                )
            self._array, self._value = (
                None,
                ort.OrtValue.ortvalue_from_numpy(content, device.type, device.index),
            )
        self.device = device


def alias(array: Array, dtype: DType) -> ort.OrtValue:
    """Returns an `OrtValue` that shares an array's memory and keeps it alive."""
    # numpy has no bfloat16, so the value would get the array's dtype, uint16.
    if dtype.name == "bfloat16":
        value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, dtype.onnx)
    else:
        value = ort.OrtValue.ortvalue_from_numpy(array)
    # Steps access parameters only through these values, so a copy would train nothing. Checked once per buffer.
    if array.size and value.data_ptr() != array.ctypes.data:
        raise RuntimeError(
            f"onnxruntime {ort.__version__} copied a {dtype.name} array instead of aliasing it; "
            "onnxtrain needs OrtValue.ortvalue_from_numpy to share memory. Please report this version."
        )
    return value


def to_ortvalue(value: Array | ort.OrtValue) -> ort.OrtValue:
    """Converts a session's result to an OrtValue."""
    return ort.OrtValue.ortvalue_from_numpy(value) if isinstance(value, np.ndarray) else value


def to_array(value: Array | ort.OrtValue) -> Array:
    """Converts a session's result to a numpy array; bfloat16 becomes float32, without rounding."""
    if isinstance(value, np.ndarray):
        return value
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    shape = tuple(value.shape())
    # ONNX Runtime (1.32) has no numpy type for bfloat16.
    size = math.prod(shape)
    bits = (ctypes.c_uint16 * size).from_address(value.data_ptr()) if size else ()
    return dtypes.widen(np.array(bits, np.uint16), dtypes.BY_NAME["bfloat16"]).reshape(shape)


def require_unmasked(what: str, value: object) -> None:
    """Raises InputError if `value` is a numpy array with masked values, or a list or tuple that contains one.

    numpy's functions ignore the mask, so training would use the masked values.

    Args:
        what: beginning of the message, e.g. "Input 'x'".
        value: array, or list or tuple of arrays.
    """
    if isinstance(value, np.ma.MaskedArray):
        places = np.argwhere(np.ma.getmaskarray(value))
        if len(places):
            where = f", the first at index {places[0].tolist()}" if value.ndim else ""
            raise InputError(
                f"{what}: values are missing: {len(places)} of {value.size} elements of a masked array are "
                f"masked{where}. Fill them (array.filled(value)) or remove such samples."
            )
    # Only the first entry is checked, so that long lists of numbers are not traversed.
    elif isinstance(value, list | tuple) and value and isinstance(value[0], np.ndarray | list | tuple):
        for entry in value:
            require_unmasked(what, entry)


def to_storage(array: object, what: str) -> tuple[Array, DType]:
    """Converts an array to a C-contiguous array of its storage dtype.

    Args:
        array: the array.
        what: beginning of error messages, e.g. "Input 'x'".

    Returns:
        The converted array and its element type.

    Raises:
        InputError: `array` is not a numpy array, its dtype is not supported, or values are masked.
    """
    if not isinstance(array, np.ndarray):
        raise InputError(f"{what}: expected a numpy array, received {type(array).__name__}.")
    require_unmasked(what, array)
    dtype = dtypes.of_array(array)
    if dtype is None:
        raise InputError(
            f"{what}: dtype {array.dtype} is not supported. Supported: {', '.join(dtypes.BY_NAME)}."
        )
    # Only bfloat16 of ml_dtypes has a different storage dtype; its bits are kept.
    if dtype.storage.name != array.dtype.name:
        array = array.view(dtype.storage)
    # ascontiguousarray would turn a scalar into a one-dimensional array.
    return np.asarray(array, dtype=dtype.storage, order="C"), dtype


@dataclass
class OptimizerProgress:
    """The scalar state of an optimizer.

    Attributes:
        step: number of steps taken, e.g. 12.
        learning_rate: learning rate of the next step, e.g. 0.001.
        initial_learning_rate: initial rate of a schedule, e.g. 0.001.
    """

    step: int
    learning_rate: float
    initial_learning_rate: float


@dataclass
class Store(NotCopyable):
    """All tensors and scalars of a training run.

    Attributes:
        parameters: trainable and frozen parameters by name, in graph order once a `Module` exists.
        trainable: names of the trainable parameters, e.g. {"fc.weight"}.
        statistics: BatchNorm running statistics by name.
        gradients: dense gradients by parameter name; empty until a `Module` exists.
        row_gradients: sparse gradients by parameter name.
        moments: a tensor per moment and parameter, e.g. {"momentum0": {"fc.weight": Buffer}}; empty until an
            `Optimizer` exists, unless the checkpoint contains optimizer state.
        optimizer: step count and learning rates; None until an `Optimizer` exists, unless they are in the checkpoint.
        properties: user-defined values, e.g. {"epoch": 3}.
        gradients_valid: True after a training step has computed `gradients` and `row_gradients`.
        device: device of the tensors.
        complete: True once :meth:`require_defined` has found data for every parameter.
        shapes_known: False for a nominal checkpoint of onnxruntime-training, which contains only names, until a
            `Module` provides the shapes.
        runs: number of runs of the training model since the last optimizer step.
        lock: held by whoever reads or modifies the store.
        gradient_owner: the thread that owns the gradients.
    """

    # Users know the class that wraps it.
    _shown_as = "CheckpointState"

    parameters: dict[str, Buffer]
    trainable: set[str]
    statistics: dict[str, Buffer] = field(default_factory=dict)
    gradients: dict[str, Buffer] = field(default_factory=dict)
    row_gradients: dict[str, RowGradient] = field(default_factory=dict)
    moments: dict[str, dict[str, Buffer]] = field(default_factory=dict)
    optimizer: OptimizerProgress | None = None
    properties: dict[str, int | float | str] = field(default_factory=dict)
    gradients_valid: bool = False
    device: Device = CPU
    complete: bool = False
    shapes_known: bool = True
    runs: int = 0
    lock: StateLock = field(default_factory=StateLock)
    gradient_owner: GradientOwner = field(init=False)

    def __post_init__(self) -> None:
        self.gradient_owner = GradientOwner(self.lock)

    def move_to(self, device: Device) -> None:
        """Moves all tensors to `device`."""
        groups = [self.parameters, self.statistics, self.gradients, *self.moments.values()]
        for group in groups:
            for buffer in group.values():
                buffer.move_to(device)
        for gradient in self.row_gradients.values():
            gradient.move_to(device)
        self.device = device

    def all_gradients(self) -> list[Buffer | RowGradient]:
        """Returns all gradients, first the dense ones, then the sparse ones."""
        return [*self.gradients.values(), *self.row_gradients.values()]

    def undefined(self) -> list[str]:
        """Returns the names of the parameters that have no data yet, because the checkpoint is nominal."""
        return [name for name, buffer in self.parameters.items() if not buffer.defined]

    def require_shapes(self, doing: str) -> None:
        """Raises CheckpointError if the parameters' shapes are unknown. The message begins with `doing`."""
        if not self.shapes_known:
            raise CheckpointError(
                f"{doing}: this nominal checkpoint of onnxruntime-training has no shapes. Create a Module "
                "from it first: the training model contains them."
            )

    def require_defined(self, doing: str) -> None:
        """Raises CheckpointError if a parameter has no data yet. The message begins with `doing`."""
        # Checked at every step, and never reset.
        if self.complete:
            return
        missing = self.undefined()
        if missing:
            raise CheckpointError(
                f"{doing}: {len(missing)} of {len(self.parameters)} parameters of this nominal checkpoint "
                f"have no data yet (first: '{missing[0]}'). First call "
                "Module.copy_buffer_to_parameters(buffer, trainable_only=False), or assign values."
            )
        self.complete = True
