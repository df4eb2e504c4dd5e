"""Hand tensors of PyTorch to a session of ONNX Runtime, without copies, as the values that the session takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnxruntime.capi import _pybind_state as binding

from onnxtrain.ortmodule import _torch

_BOOL_AS_BYTES = tuple(map(int, ort.__version__.split(".")[:2])) < (1, 32)
"""True if booleans are handed over as bytes, with a flag that says so. ONNX Runtime 1.32 reads the dtype from DLPack,
and its `push_back` has no such flag."""
# In this module's names, as each call of a model calls the function once per tensor.
_to_dlpack = _torch.to_dlpack
_Value = binding.OrtValue


class Feeds:
    """The inputs of a session.

    Args:
        inputs: the inputs of its graph.
        device: ONNX Runtime's name of the device where they lie.
        copies_inputs: True if each output of the session has memory of its own.
    """

    def __init__(self, inputs: Sequence[ir.Value], device: Any, copies_inputs: bool) -> None:
        self._inputs = [_DescribedInput(value, device, copies_inputs) for value in inputs]
        # By the addresses of all inputs: one lookup for a call whose tensors all lie where they lay before.
        self._earlier: dict[tuple[int, ...], binding.OrtValueVector] = {}

    def of(self, values: Sequence[torch.Tensor | binding.OrtValue], trusted: bool) -> binding.OrtValueVector:
        """Returns the inputs of a run.

        Args:
            values: tensors, and values of ONNX Runtime that another session has returned.
            trusted: True if an input at the address of an earlier one has the same shape and dtype as the earlier one.
        """
        # Only runs on tensors alone are among the earlier ones.
        if trusted and self._earlier:
            feeds = self._earlier.get(tuple([value.data_ptr() for value in values]))
            # A transposed view may lie at the address of an earlier tensor.
            if feeds is not None and False not in [value.is_contiguous() for value in values]:
                return feeds
        return self._described(values, trusted)

    def _described(
        self, values: Sequence[torch.Tensor | binding.OrtValue], trusted: bool
    ) -> binding.OrtValueVector:
        """Describes each input, and keeps the descriptions of all if they do not own memory of tensors."""
        feeds = binding.OrtValueVector()
        push = feeds.push_back
        kept = trusted
        for value, described in zip(values, self._inputs, strict=True):
            if type(value) is _Value:
                push(value)
                kept = False
                continue
            known = described.at.get(value.data_ptr())
            if known is not None and trusted and value.is_contiguous():
                push(known)
            else:
                kept &= described.push(feeds, value)
        if kept:
            if len(self._earlier) >= _MAX_ADDRESSES:
                self._earlier.clear()
            self._earlier[tuple([value.data_ptr() for value in values])] = feeds
        return feeds


# The dtypes that `push_back_batch` takes, by their names in numpy, which has no bfloat16.
_NUMPY_DTYPES = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


_MAX_ADDRESSES = 16
"""Addresses per input, so that an input that lies elsewhere in each call does not make the table grow for ever."""


class _DescribedInput:
    """An input of a session, with ONNX Runtime's descriptions (OrtValues) of earlier tensors, by their address (`at`).

    Parameters lie at the same address in every call, and residuals mostly do. Looking up an address takes less time
    than describing the tensor to ONNX Runtime anew.
    """

    __slots__ = ("_device", "_shape", "at")

    def __init__(self, declared: ir.Value, device: Any, copies_inputs: bool) -> None:
        shape = declared.shape
        fixed = copies_inputs and shape is not None and all(isinstance(size, int) for size in shape)
        # A description does not keep the memory alive. An input that ONNX Runtime returns as a result would be freed
        # while the result is read.
        self._shape = tuple(shape) if fixed and shape is not None and not declared.is_graph_output() else None
        self._device = device
        self.at: dict[int, Any] = {}

    def push(self, feeds: binding.OrtValueVector, tensor: torch.Tensor) -> bool:
        """Appends a tensor to the inputs of a run, and keeps its description for later runs if that is possible.

        Returns:
            True if the description was kept.
        """
        dtype = _NUMPY_DTYPES.get(tensor.dtype)
        if dtype is None or tensor.shape != self._shape or not tensor.is_contiguous() or not tensor.numel():
            _push(feeds, tensor)
            return False
        if len(self.at) >= _MAX_ADDRESSES:
            self.at.clear()
        described = binding.OrtValueVector()
        address = tensor.data_ptr()
        described.push_back_batch([tensor], [address], [dtype], [self._shape], [self._device])
        self.at[address] = described[0]
        feeds.push_back(described[0])
        return True


def _without_elements(tensor: torch.Tensor) -> Any:
    """Returns an OrtValue for a tensor without elements."""
    shape = tuple(tensor.shape)
    # numpy has no bfloat16.
    if tensor.dtype == torch.bfloat16:
        words = np.empty(shape, np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(words, ir.DataType.BFLOAT16.value)._ortvalue
    array = np.empty(shape, torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype)
    return ort.OrtValue.ortvalue_from_numpy(array)._ortvalue


def _push(feeds: binding.OrtValueVector, tensor: torch.Tensor) -> None:
    """Appends a tensor to the inputs of a run, by DLPack."""
    # ONNX Runtime's tensors have no strides.
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    # ONNX Runtime refuses a DLPack tensor with a null pointer.
    if tensor.numel() == 0:
        feeds.push_back(_without_elements(tensor))
    elif tensor.dtype == torch.bool and _BOOL_AS_BYTES:
        feeds.push_back(_to_dlpack(tensor.detach().view(torch.uint8)), True)
    else:
        feeds.push_back(_to_dlpack(tensor))
