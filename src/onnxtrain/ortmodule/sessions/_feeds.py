"""Passes PyTorch tensors to an ONNX Runtime session as OrtValues, without copies."""

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
"""True if Boolean tensors must be passed as bytes, with a flag of `push_back`. Since 1.32, ONNX Runtime reads the dtype
from DLPack, and `push_back` has no such flag."""
# Names of this module, because each call of a model uses them once per tensor.
_to_dlpack = _torch.to_dlpack
_Value = binding.OrtValue


class Feeds:
    """Creates OrtValues for the inputs of a session, and caches them by address.

    Args:
        inputs: the inputs of the session's graph.
        device: their device, as ONNX Runtime's native OrtDevice.
        copies_inputs: True if no output of the session aliases an input.

    Attributes:
        earlier: the OrtValues of all inputs of earlier runs, by the addresses of their tensors. They are valid for
            contiguous tensors at these addresses that are known to have the same shapes and dtypes.
    """

    def __init__(self, inputs: Sequence[ir.Value], device: Any, copies_inputs: bool) -> None:
        self._inputs = [_DescribedInput(value, device, copies_inputs) for value in inputs]
        self.earlier: dict[tuple[int, ...], binding.OrtValueVector] = {}

    def of(self, values: Sequence[torch.Tensor | binding.OrtValue], trusted: bool) -> binding.OrtValueVector:
        """Creates or looks up an OrtValue for each input, and caches the inputs of the run if all can be cached.

        Args:
            values: tensors, or OrtValues returned by another session.
            trusted: True if a tensor at the address of an earlier tensor is known to have the same shape and dtype.
        """
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
            if len(self.earlier) * len(values) >= _MAX_ADDRESSES_OF_RUNS:
                self.earlier.clear()
            self.earlier[tuple([value.data_ptr() for value in values])] = feeds
        return feeds


# The dtypes that `push_back_batch` supports: those of numpy, which has no bfloat16.
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


_MAX_ADDRESSES = 512
"""Maximum number of cached addresses per input. A small tensor, e.g. the cotangent of a loss, has one of some hundred
addresses in each call."""

_MAX_ADDRESSES_OF_RUNS = 8192
"""Maximum number of addresses in the cached runs of a session: those of all inputs of each run."""


class _DescribedInput:
    """An input of a session, with a cache of OrtValues.

    Parameters have the same address in every call, and residuals usually do. Looking up an address takes less time than
    creating an OrtValue.

    Args:
        declared: the input of the graph.
        device: its device, as ONNX Runtime's native OrtDevice.
        copies_inputs: True if no output of the session aliases an input.

    Attributes:
        at: OrtValues of earlier tensors, by address.
    """

    __slots__ = ("_device", "_shape", "at")

    def __init__(self, declared: ir.Value, device: Any, copies_inputs: bool) -> None:
        shape = declared.shape
        fixed = copies_inputs and shape is not None and all(isinstance(size, int) for size in shape)
        # A cached OrtValue doesn't keep the tensor's memory alive. If ONNX Runtime returned the input as a result, the
        # memory could be freed while the result is in use.
        self._shape = tuple(shape) if fixed and shape is not None and not declared.is_graph_output() else None
        self._device = device
        self.at: dict[int, Any] = {}

    def push(self, feeds: binding.OrtValueVector, tensor: torch.Tensor) -> bool:
        """Appends a tensor to the inputs of a run, and caches its OrtValue if possible.

        Returns:
            True if the OrtValue was cached.
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
    """Returns an OrtValue without elements that has the shape and dtype of an empty tensor."""
    shape = tuple(tensor.shape)
    # numpy has no bfloat16.
    if tensor.dtype == torch.bfloat16:
        words = np.empty(shape, np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(words, ir.DataType.BFLOAT16.value)._ortvalue
    array = np.empty(shape, torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype)
    return ort.OrtValue.ortvalue_from_numpy(array)._ortvalue


def _push(feeds: binding.OrtValueVector, tensor: torch.Tensor) -> None:
    """Appends a tensor to the inputs of a run, through DLPack."""
    # ONNX Runtime tensors have no strides.
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    # ONNX Runtime rejects a DLPack tensor with a null pointer.
    if tensor.numel() == 0:
        feeds.push_back(_without_elements(tensor))
    elif tensor.dtype == torch.bool and _BOOL_AS_BYTES:
        feeds.push_back(_to_dlpack(tensor.detach().view(torch.uint8)), True)
    else:
        feeds.push_back(_to_dlpack(tensor))
