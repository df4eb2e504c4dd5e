"""The parameter store: every tensor of a training run, once, in memory that sessions are bound to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import onnxruntime as ort

from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.device import CPU, Device
from onnxtrain.runtime.dtypes import Array, DType
from onnxtrain.runtime.lock import GradientOwner, StateLock
from onnxtrain.runtime.rows import RowGradient


class Buffer:
    """One tensor with a fixed dtype, shape and address.

    On the CPU it is a C-contiguous numpy array, and :attr:`value` is an `OrtValue` over the same memory: what
    a session writes is seen through the array and the other way round. On another device only the `OrtValue`
    exists and :meth:`read` copies.

    Attributes:
        dtype: Element type.
        shape: Sizes.
        defined: False for a tensor of a nominal checkpoint that has not been given its data yet.
    """

    __slots__ = ("_array", "_value", "defined", "device", "dtype", "shape")

    def __init__(self, array: Array, dtype: DType, *, defined: bool = True) -> None:
        """Wraps `array` (C-contiguous, of `dtype`'s storage type) without copying it."""
        self.dtype = dtype
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.defined = defined
        self.device = CPU
        self._array: Array | None = array
        self._value: ort.OrtValue | None = None

    @classmethod
    def zeros(
        cls, dtype: DType, shape: Iterable[int], device: Device = CPU, *, defined: bool = True
    ) -> Buffer:
        """Returns a zero-filled buffer on `device`."""
        return cls.filled(0.0, dtype, shape, device, defined=defined)

    @classmethod
    def filled(
        cls, value: float, dtype: DType, shape: Iterable[int], device: Device = CPU, *, defined: bool = True
    ) -> Buffer:
        """Returns a buffer on `device` with `value` everywhere; bfloat16 can only be filled with zeros."""
        if value and dtype.name == "bfloat16":
            raise InputError(f"Filling a bfloat16 tensor with {value} is not supported; use float32 moments.")
        # np.zeros leaves the memory untouched until it is written
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
        """The `OrtValue` to bind: it aliases the numpy memory on the CPU and owns device memory elsewhere."""
        if self._value is None:
            assert self._array is not None
            self._value = alias(self._array, self.dtype)
        return self._value

    def read(self) -> Array:
        """Returns the content: the live array itself on the CPU, a copy from any other device."""
        return self._array if self._array is not None else np.asarray(self.value.numpy())

    def write(self, array: Array) -> None:
        """Copies `array` (same shape and storage type) into the buffer."""
        if self._array is not None:
            np.copyto(self._array, array, casting="no")
        else:
            self.value.update_inplace(np.ascontiguousarray(array))
        self.defined = True

    def move_to(self, device: Device) -> None:
        """Moves the content to `device`; views obtained before stay behind."""
        if device == self.device:
            return
        content = self.read()
        if device == CPU:
            self._array, self._value = content.copy(), None
        else:
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
    """Returns an `OrtValue` over the memory of `array`, which stays alive as long as the value.

    Everything the runtime does rests on the two sharing memory, so it is checked, once per buffer.
    """
    if dtype.name == "bfloat16":
        value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, dtype.onnx)
    else:
        value = ort.OrtValue.ortvalue_from_numpy(array)
    if array.size and value.data_ptr() != array.ctypes.data:
        raise RuntimeError(
            f"onnxruntime {ort.__version__} copied a {dtype.name} array instead of aliasing it; "
            "onnxtrain needs OrtValue.ortvalue_from_numpy to share memory. Please report this version."
        )
    return value


def to_storage(array: object, what: str) -> tuple[Array, DType]:
    """Returns `array` as C-contiguous storage memory and its element type.

    Raises:
        InputError: `array` is no numpy array, or has a dtype that the runtime does not hold.
    """
    if not isinstance(array, np.ndarray):
        raise InputError(f"{what}: expected a numpy array, received {type(array).__name__}.")
    dtype = dtypes.of_array(array)
    if dtype is None:
        raise InputError(
            f"{what}: dtype {array.dtype} is not supported. Supported: {', '.join(dtypes.BY_NAME)}."
        )
    if dtype.storage.name != array.dtype.name:
        array = array.view(dtype.storage)
    # ascontiguousarray would make a scalar one-dimensional.
    return np.asarray(array, dtype=dtype.storage, order="C"), dtype


@dataclass
class OptimizerProgress:
    """How far an optimizer has come: number of steps taken, learning rates."""

    step: int
    learning_rate: float
    initial_learning_rate: float


@dataclass
class Store:
    """All tensors and scalars of a training run.

    Attributes:
        parameters: Trainable and frozen parameters, in graph order once a `Module` exists.
        trainable: Names of the trainable ones.
        statistics: BatchNorm running statistics.
        gradients: Of the trainable parameters; empty until a `Module` exists.
        row_gradients: Those that are sparse.
        moments: Moment name -> parameter name -> tensor; empty until an `Optimizer` exists.
        optimizer: Progress of the optimizer, None before there is one.
        properties: The user's own values.
        gradients_valid: Whether a training step has filled `gradients` and `row_gradients`.
        device: Where the tensors are.
        complete: Whether every parameter is known to have data.
        shapes_known: False for a nominal checkpoint of onnxruntime-training, which keeps names only, until a
            `Module` supplies the shapes.
        lock: Held by whoever reads or changes any of this.
        gradient_owner: The thread that `gradients` belong to.
    """

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
    lock: StateLock = field(default_factory=StateLock)
    gradient_owner: GradientOwner = field(init=False)

    def __post_init__(self) -> None:
        self.gradient_owner = GradientOwner(self.lock)

    def move_to(self, device: Device) -> None:
        """Moves every tensor to `device`."""
        groups = [self.parameters, self.statistics, self.gradients, *self.moments.values()]
        for group in groups:
            for buffer in group.values():
                buffer.move_to(device)
        for gradient in self.row_gradients.values():
            gradient.move_to(device)
        self.device = device

    def all_gradients(self) -> list[Buffer | RowGradient]:
        """Returns the gradients, those of rows last."""
        return [*self.gradients.values(), *self.row_gradients.values()]

    def undefined(self) -> list[str]:
        """Returns the names of parameters that a nominal checkpoint left without data."""
        return [name for name, buffer in self.parameters.items() if not buffer.defined]

    def require_shapes(self, doing: str) -> None:
        """Raises CheckpointError if the shapes are not known; `doing` says what needs them."""
        if not self.shapes_known:
            raise CheckpointError(
                f"{doing}: this nominal checkpoint of onnxruntime-training has no shapes. Make a Module "
                "from it first: the training model knows them."
            )

    def require_defined(self, doing: str) -> None:
        """Raises CheckpointError if a parameter has no data yet; `doing` says what needs it."""
        if self.complete:  # once every parameter has data, that stays so
            return
        missing = self.undefined()
        if missing:
            raise CheckpointError(
                f"{doing}: {len(missing)} of {len(self.parameters)} parameters of this nominal checkpoint "
                f"have no data yet (first: '{missing[0]}'). Call Module.copy_buffer_to_parameters(buffer, "
                "trainable_only=False), or assign them, first."
            )
        self.complete = True
