"""Element types as this package names them, and what numpy, ONNX, ONNX Runtime and safetensors call them.

An element type is a plain string (`"float32"`), as in the manifest. numpy has no bfloat16: such tensors are
held as their raw bits in uint16 arrays, which ONNX Runtime binds as bfloat16 without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DType:
    """One element type: how it is stored in numpy, and its name elsewhere."""

    name: str
    storage: np.dtype[Any]
    onnx: int
    ort: str
    safetensors: str


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
    """Returns the element type of an array (bfloat16 if `ml_dtypes` made it), or None for any other."""
    return BY_NAME.get(array.dtype.name)


def widen(array: Array, dtype: DType) -> Array:
    """Returns an array of float16 or of bfloat16 bits as float32; others as they are."""
    if dtype.name == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32) if dtype.name == "float16" else array


def narrow(array: Array, dtype: DType) -> Array:
    """Returns what :func:`widen` has widened in the storage of `dtype`, rounded to nearest even."""
    if dtype.name != "bfloat16":
        return array.astype(dtype.storage, copy=False)
    bits = array.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding must not carry a NaN payload into infinity.
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)


def add_inplace(total: Array, term: Array, dtype: DType) -> None:
    """Adds `term` to `total` in place; bfloat16 bits are widened to float32 and rounded to nearest even."""
    if dtype.name != "bfloat16":
        np.add(total, term, out=total)
        return
    total[...] = narrow(widen(total, dtype) + widen(term, dtype), dtype)
