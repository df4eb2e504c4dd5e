"""Maps element types between numpy, ONNX, ONNX Runtime and safetensors.

The manifest names an element type by a string, e.g. `"float32"`. numpy has no bfloat16: a bfloat16 tensor is stored as
a uint16 array of its raw bits, which ONNX Runtime binds as bfloat16 without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DType:
    """An element type, with its name in each library.

    Attributes:
        name: name in the manifest, e.g. "bfloat16".
        storage: little-endian numpy dtype of arrays that store such tensors, e.g. uint16 for bfloat16.
        onnx: number in `TensorProto.DataType`, e.g. 16.
        ort: type of a value in ONNX Runtime, e.g. "tensor(bfloat16)".
        safetensors: name in the header of a safetensors file, e.g. "BF16".
    """

    name: str
    storage: np.dtype[Any]
    onnx: int
    ort: str
    safetensors: str

    @property
    def held(self) -> np.dtype[Any]:
        """Numpy dtype of the arrays that users pass and receive: `storage`, or float32 for bfloat16."""
        return np.dtype(np.float32) if self.name == "bfloat16" else self.storage


# Numbers instead of `onnx.TensorProto` constants, because a device has no onnx. A test compares the table with onnx,
# ONNX Runtime and safetensors.
_TABLE = [
    DType(name, np.dtype(storage), onnx, f"tensor({ort})", safetensors)
    for name, storage, onnx, ort, safetensors in [
        ("float32", "<f4", 1, "float", "F32"),
        ("uint8", "u1", 2, "uint8", "U8"),
        ("int8", "i1", 3, "int8", "I8"),
        ("uint16", "<u2", 4, "uint16", "U16"),
        ("int16", "<i2", 5, "int16", "I16"),
        ("int32", "<i4", 6, "int32", "I32"),
        ("int64", "<i8", 7, "int64", "I64"),
        ("bool", "?", 9, "bool", "BOOL"),
        ("float16", "<f2", 10, "float16", "F16"),
        ("float64", "<f8", 11, "double", "F64"),
        ("uint32", "<u4", 12, "uint32", "U32"),
        ("uint64", "<u8", 13, "uint64", "U64"),
        ("bfloat16", "<u2", 16, "bfloat16", "BF16"),
    ]
]

BY_NAME = {d.name: d for d in _TABLE}
BY_ONNX = {d.onnx: d for d in _TABLE}
BY_ORT = {d.ort: d for d in _TABLE}
BY_SAFETENSORS = {d.safetensors: d for d in _TABLE}


def of_array(array: Array) -> DType | None:
    """Returns the element type of an array; None if the runtime does not support it."""
    # By name: ml_dtypes calls its numpy dtype "bfloat16", and need not be imported here.
    return BY_NAME.get(array.dtype.name)


def widen(array: Array, dtype: DType) -> Array:
    """Converts a float16 array, or the raw bits of a bfloat16 array, to float32; returns any other array unchanged."""
    if dtype.name == "bfloat16":
        # A bfloat16 is the upper half of a float32.
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32) if dtype.name == "float16" else array


def narrow(array: Array, dtype: DType) -> Array:
    """Reverses :func:`widen`: converts an array to the storage dtype of `dtype`, rounding to nearest even."""
    if dtype.name != "bfloat16":
        return array.astype(dtype.storage, copy=False)
    bits = array.view(np.uint32)
    # Adding just under half of the last kept bit rounds to nearest; adding that bit as well rounds halves to even.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding must not carry a NaN payload into infinity.
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)


def add_inplace(total: Array, term: Array, dtype: DType) -> None:
    """Adds `term` to `total` in place; bfloat16 is added in float32 and rounded to nearest even."""
    if dtype.name != "bfloat16":
        np.add(total, term, out=total)
        return
    total[...] = narrow(widen(total, dtype) + widen(term, dtype), dtype)
