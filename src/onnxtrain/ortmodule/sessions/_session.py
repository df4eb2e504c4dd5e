"""An ONNX Runtime session over PyTorch tensors, without copies."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnxruntime.capi import _pybind_state as binding

from onnxtrain.functions import DOMAIN
from onnxtrain.fusion import Bfloat16ProductPass, Bfloat16RoundingPass, NativeOpsPass, WideCompositesPass
from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._exceptions import (
    ORTModuleDeviceException,
    ORTModuleInitException,
    ORTModuleONNXModelException,
)
from onnxtrain.ortmodule.capture._layout import Layout
from onnxtrain.ortmodule.sessions._float64 import expand_float64, has_float64
from onnxtrain.ortmodule.sessions._layout import lay_out, restride
from onnxtrain.ortmodule.sessions._threads import CoreSharing, threads_for
from onnxtrain.passes import (
    AbsentInputsPass,
    CrossEntropyPass,
    PositiveAxesPass,
    has_narrow_floats,
    infer_shapes,
    widen_narrow_floats,
)
from onnxtrain.runtime.kernels import kernel_library, register_kernels
from onnxtrain.runtime.session import rest_threads
from onnxtrain.runtime.session_settings import SessionSettings

_LOWEST = (1, 30)
_VERSION = tuple(map(int, ort.__version__.split(".")[:2]))
_BOOL_AS_BYTES = _VERSION < (1, 32)
"""Older versions are told that bytes are booleans; newer ones know booleans from DLPack, and take no word for it."""
_RUN_OPTIONS = binding.RunOptions()
_to_dlpack = _torch.to_dlpack
_from_dlpack = _torch.from_dlpack  # the C function: it is called once per output


def check_onnxruntime() -> None:
    """Checks that the installed onnxruntime can run what ORTModule makes.

    Raises:
        ORTModuleInitException: it is older than 1.30. 1.20 lacks DLPack, by which memory is shared with PyTorch; those
            up to 1.28 can end the process over tensors without elements.
    """
    if tuple(map(int, ort.__version__.split(".")[:2])) < _LOWEST:
        raise ORTModuleInitException(
            f"ORTModule needs onnxruntime 1.30 or newer; installed is {ort.__version__}, which can end the process "
            "over tensors without elements. Upgrade it"
        )


def common_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Returns the device that all tensors are on, the CPU if there are none.

    Raises:
        ORTModuleDeviceException: they are on several, or on one that no session can be made for.
    """
    devices = {tensor.device for tensor in tensors}
    kinds = {device.type for device in devices}
    if len(devices) > 1 or not kinds <= {"cpu", "cuda"}:
        names = ", ".join(sorted(map(str, devices)))
        raise ORTModuleDeviceException(
            f"its tensors are on {names}; ONNX Runtime sessions run on one CPU or CUDA device"
        )
    if "cuda" in kinds and "CUDAExecutionProvider" not in ort.get_available_providers():
        raise ORTModuleDeviceException(
            f"its tensors are on {next(iter(devices))}, and this onnxruntime has no CUDA provider; "
            "install onnxruntime-gpu in its place"
        )
    return next(iter(devices), torch.device("cpu"))


def suited(model: ir.Model, device: torch.device, layouts: Mapping[int, Layout] | None = None) -> ir.Model:
    """Returns a model as ONNX Runtime takes it on a device; may change `model`.

    Args:
        model: the model.
        device: where it will run.
        layouts: how some outputs lie in memory; the others are contiguous.
    """
    if layouts:
        lay_out(model, layouts)
    if not model.graph.outputs:
        return model
    CrossEntropyPass()(model)
    if device.type == "cpu" and has_narrow_floats(model):
        model = widen_narrow_floats(WideCompositesPass()(model).model)
        if kernel_library() is not None:
            NativeOpsPass()(model)
            Bfloat16ProductPass(of_rounded=True)(model)
            Bfloat16RoundingPass()(model)
    if device.type == "cpu" and has_float64(model):
        model = expand_float64(model)
    if _has_no_elements(model.graph):
        model = infer_shapes(model.clone())
        PositiveAxesPass()(model)
    AbsentInputsPass()(model)
    return model


class Session:
    """Runs an ONNX model on tensors of one device.

    Args:
        model: the model; initializers are constants, parameters are inputs.
        device: where inputs are and outputs will be.
        severity: the least severity of what ONNX Runtime prints.
        layouts: how some outputs lie in memory; the others are contiguous.

    Attributes:
        nodes: number of nodes of the model.
    """

    def __init__(
        self,
        model: ir.Model,
        device: torch.device,
        severity: int,
        layouts: Mapping[int, Layout] | None = None,
    ) -> None:
        self._layouts = layouts or {}
        model = suited(model, device, layouts)
        self.nodes = model.graph.num_nodes()
        self._outputs = [value.name for value in model.graph.outputs]
        if not self._outputs:  # gradients that reach no input; ONNX Runtime wants a result
            return
        options = SessionSettings(
            severity=severity,
            threads=threads_for(model),
            # Among ops of bodies, ONNX Runtime's default order frees values earlier (ResNet-18: 610 MB instead of 889).
            in_file_order=kernel_library() is not None,
            # Beyond the basic ones it fuses scales and epsilons into attributes, which are float32.
            basic_optimizations=has_float64(model, ("MatMul", "ReduceMean")),
        ).options()
        self._device = device
        if device.type == "cpu" and any(node.domain == DOMAIN for node in model.graph.all_nodes()):
            names = [name for domain, name, _ in model.functions if domain == DOMAIN]
            register_kernels(options, names)  # for 2 ms: onnxruntime makes a schema of each op anew
        # It takes an Expand to no elements for one that does nothing.
        disabled = ["ExpandElimination"] if _has_no_elements(model.graph) else []
        proto = ir.to_proto(model).SerializeToString()
        try:
            session = ort.InferenceSession(
                proto, options, providers=_providers(device), disabled_optimizers=disabled
            )
        except binding.NotImplemented as error:
            raise ORTModuleONNXModelException(_missing_kernel(model, str(error))) from error
        rest_threads(session)
        self._sharing = CoreSharing(device)
        self._session = session  # keeps the native one alive
        self._native = session._sess
        self._inputs = [value.name for value in model.graph.inputs]
        self._bools = [i for i, value in enumerate(model.graph.outputs) if value.dtype == ir.DataType.BOOL]
        self._empty = [i for i, value in enumerate(model.graph.outputs) if 0 in (value.shape or ())]
        native = ort.OrtDevice.make(device.type, device.index or 0)._get_c_device()
        self._devices = [native] * len(self._outputs)
        plain = not any(_may_pass_on(node) for node in model.graph)
        self._inputs_known = [_KnownInput(value, native, plain) for value in model.graph.inputs]

    def run(self, tensors: Sequence[torch.Tensor], *, trusted: bool = True) -> list[torch.Tensor]:
        """Returns the outputs for these inputs, in the order of the graph.

        Args:
            tensors: the inputs.
            trusted: whether those that have been in the same place in memory before have the same shape and dtype now.
        """
        if not self._outputs:
            return []
        feeds = binding.OrtValueVector()
        push = feeds.push_back
        for tensor, known in zip(tensors, self._inputs_known, strict=True):
            value = known.at.get(tensor.data_ptr())
            if value is not None and trusted and tensor.is_contiguous():
                push(value)
            else:
                known.push(feeds, tensor)
        results = binding.OrtValueVector()
        if self._device.type == "cuda":  # DLPack carries no stream: what the inputs wait for must be done
            torch.cuda.current_stream(self._device).synchronize()
        arguments = _RUN_OPTIONS, self._inputs, feeds, self._outputs, results, self._devices
        if self._sharing.is_settled:
            self._native.run_with_ortvaluevector(*arguments)
        else:
            self._sharing.watch(lambda: self._native.run_with_ortvaluevector(*arguments))
        outputs: list[torch.Tensor] = results.to_dlpacks(_from_dlpack)
        for index in self._bools:
            outputs[index] = outputs[index].view(torch.bool)
        # PyTorch (2.13) cannot resize memory that came through DLPack, and `out=torch.empty(0)` asks it to.
        for index in self._empty:
            outputs[index] = torch.empty_like(outputs[index])
        for index, order in self._layouts.items():
            restride(outputs[index], order)
        return outputs


def is_of_onnxruntime(error: BaseException) -> bool:
    """Whether ONNX Runtime raised it."""
    return type(error).__module__.startswith("onnxruntime")


def _has_no_elements(graph: ir.Graph) -> bool:
    """Whether a value of the graph has a size of zero."""
    values = itertools.chain(graph.inputs, *(node.outputs for node in graph))
    return any(value.shape is not None and 0 in value.shape for value in values)


def _providers(device: torch.device) -> list[str | tuple[str, dict[str, str]]]:
    if device.type == "cuda":
        return [("CUDAExecutionProvider", {"device_id": str(device.index or 0)}), "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]


_NO_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(\d+\) node with name '([^']*)'")


def _missing_kernel(model: ir.Model, message: str) -> str:
    """Returns ONNX Runtime's message with the dtypes, which it does not tell."""
    found = _NO_KERNEL.search(message)
    if found is None:
        return f"ONNX Runtime cannot run the graph: {message}"
    op_type, name = found.groups()
    nodes = [node for node in model.graph if node.op_type == op_type and name in ("", node.name)]
    values = [value for node in nodes for value in node.inputs] or list(model.graph.inputs)
    dtypes = {
        value.dtype.numpy().name: None for value in values if value is not None and value.dtype is not None
    }
    where = f" (node '{name}')" if name else ""
    return f"ONNX Runtime has no kernel of {op_type} for {', '.join(dtypes)}{where}"


def _may_pass_on(node: ir.Node) -> bool:
    """Whether a node may have a value for its result that it was given, and not a copy: no operator on tensors does."""
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in graphs for attribute in node.attributes.values()) or any(
        value.type is not None and not isinstance(value.type, ir.TensorType)
        for value in (*node.inputs, *node.outputs)
        if value is not None
    )


_ELEMENTS = {
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


_PLACES = 16


class _KnownInput:
    """An input of a session, and what ONNX Runtime has been told of its memory.

    Parameters lie where they were in the call before, and results of a session where earlier ones have been. To
    describe a tensor to ONNX Runtime takes longer than to see that it need not be. A description holds no memory, which
    is why an input that ONNX Runtime may give back as a result is none that is known.

    Attributes:
        at: descriptions of tensors by their address.
    """

    __slots__ = ("_device", "_shape", "at")

    def __init__(self, declared: ir.Value, device: Any, plain: bool) -> None:
        shape = declared.shape
        fixed = plain and shape is not None and all(isinstance(size, int) for size in shape)
        self._shape = tuple(shape) if fixed and shape is not None and not declared.is_graph_output() else None
        self._device = device
        self.at: dict[int, Any] = {}

    def push(self, feeds: binding.OrtValueVector, tensor: torch.Tensor) -> None:
        """Appends a tensor's memory to the inputs of a run."""
        element = _ELEMENTS.get(tensor.dtype)
        if element is None or tensor.shape != self._shape or not tensor.is_contiguous() or not tensor.numel():
            _push(feeds, tensor)
            return
        if len(self.at) >= _PLACES:
            self.at.clear()
        described = binding.OrtValueVector()
        address = tensor.data_ptr()
        described.push_back_batch([tensor], [address], [element], [self._shape], [self._device])
        self.at[address] = described[0]
        feeds.push_back(described[0])


def _without_elements(tensor: torch.Tensor) -> Any:
    """Returns ONNX Runtime's value for a tensor without elements."""
    shape = tuple(tensor.shape)
    if tensor.dtype == torch.bfloat16:  # which numpy does not have
        words = np.empty(shape, np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(words, ir.DataType.BFLOAT16.value)._ortvalue
    array = np.empty(shape, torch.empty(0, dtype=tensor.dtype).numpy().dtype)
    return ort.OrtValue.ortvalue_from_numpy(array)._ortvalue


def _push(feeds: binding.OrtValueVector, tensor: torch.Tensor) -> None:
    """Appends a tensor's memory to the inputs of a run."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.numel() == 0:  # DLPack refuses a null pointer
        feeds.push_back(_without_elements(tensor))
    elif tensor.dtype == torch.bool and _BOOL_AS_BYTES:
        feeds.push_back(_to_dlpack(tensor.detach().view(torch.uint8)), True)
    else:
        feeds.push_back(_to_dlpack(tensor))
