"""An ONNX Runtime session over PyTorch tensors, without copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnxruntime.capi import _pybind_state as binding

__all__ = ["Session"]

_SILENT = 3  # only errors


class Session:
    """Runs an ONNX model on tensors of one device.

    Args:
        model: the model; initializers are constants, parameters are inputs.
        device: where inputs are and outputs will be.

    Attributes:
        nodes: number of nodes of the model.
    """

    def __init__(self, model: ir.Model, device: torch.device) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = _SILENT
        # PyTorch's own threads compute between two runs: spinning would take the cores away from them.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.intra_op_num_threads = torch.get_num_threads()
        self._device = device
        session = ort.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=_providers(device)
        )
        self._session = session  # keeps the native one alive
        self._native = session._sess
        self.nodes = model.graph.num_nodes()
        self._inputs = [value.name for value in model.graph.inputs]
        self._outputs = [value.name for value in model.graph.outputs]
        self._bools = [value.dtype == ir.DataType.BOOL for value in model.graph.outputs]

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outputs for these inputs, in the order of the graph."""
        feeds = dict(zip(self._inputs, map(_to_ort, tensors), strict=True))
        results = self._native.run_with_ort_values(feeds, self._outputs, None)
        return [_from_ort(value, is_bool) for value, is_bool in zip(results, self._bools, strict=True)]


def _providers(device: torch.device) -> list[str | tuple[str, dict[str, str]]]:
    if device.type == "cuda":
        return [("CUDAExecutionProvider", {"device_id": str(device.index or 0)}), "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]


def _to_ort(tensor: torch.Tensor) -> binding.OrtValue:
    tensor = tensor.detach().contiguous()
    if tensor.numel() == 0:  # DLPack refuses a null pointer
        array = np.empty(tuple(tensor.shape), torch.empty(0, dtype=tensor.dtype).numpy().dtype)
        return ort.OrtValue.ortvalue_from_numpy(array)._ortvalue
    is_bool = tensor.dtype == torch.bool
    if is_bool:
        tensor = tensor.view(torch.uint8)
    return binding.OrtValue.from_dlpack(tensor.__dlpack__(), is_bool)


def _from_ort(value: binding.OrtValue, is_bool: bool) -> torch.Tensor:
    tensor = torch.utils.dlpack.from_dlpack(value.to_dlpack())
    return tensor.view(torch.bool) if is_bool else tensor
