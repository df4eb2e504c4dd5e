"""Runs ONNX Runtime sessions on the memory of PyTorch tensors, without copies."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir
import onnxruntime as ort
import torch
from onnxruntime.capi import _pybind_state as binding

from onnxtrain.functions import DOMAIN
from onnxtrain.fusion import (
    ROW_OPS,
    Bfloat16ProductPass,
    Bfloat16RoundingPass,
    DoubleSumPass,
    ElementwisePass,
    NativeOpsPass,
    RowsPass,
    TransposePass,
    WideCompositesPass,
)
from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._exceptions import (
    ORTModuleDeviceException,
    ORTModuleInitException,
    ORTModuleONNXModelException,
)
from onnxtrain.ortmodule.capture.graph._layout import Layout
from onnxtrain.ortmodule.sessions._feeds import Feeds
from onnxtrain.ortmodule.sessions._float64 import expand_float64, has_float64
from onnxtrain.ortmodule.sessions._layout import lay_out, restride
from onnxtrain.ortmodule.sessions._threads import CoreSharing, threads_for
from onnxtrain.passes import (
    AbsentInputsPass,
    CrossEntropyPass,
    ExactSigmoidPass,
    ImplicitExpandPass,
    LongSumsPass,
    PositiveAxesPass,
    RacingScatterPass,
    has_narrow_floats,
    infer_shapes,
    widen_narrow_floats,
)
from onnxtrain.passes.portable import InfinitiesPass, TrainingBatchNormPass
from onnxtrain.runtime.kernels import kernel_library, register_kernels
from onnxtrain.runtime.session import rest_threads
from onnxtrain.runtime.session_settings import SessionSettings

_LOWEST_VERSION = (1, 30)
_RUN_OPTIONS = binding.RunOptions()
# A name of this module, because each call of a model uses it once per tensor.
_from_dlpack = _torch.from_dlpack
# In each call, maps of these take less time than comprehensions, which are Python functions (Python 3.11).
_data_ptr, _is_contiguous = map(operator.methodcaller, ("data_ptr", "is_contiguous"))


def check_onnxruntime() -> None:
    """Checks that the installed onnxruntime can run the graphs of ORTModule.

    Raises:
        ORTModuleInitException: the installed onnxruntime is older than 1.30.
    """
    # 1.20 lacks DLPack, through which memory is shared with PyTorch. In 1.21 to 1.28 some graphs fail on empty tensors,
    # and `any` of an empty tensor crashes the process.
    if tuple(map(int, ort.__version__.split(".")[:2])) < _LOWEST_VERSION:
        raise ORTModuleInitException(
            f"ORTModule needs onnxruntime 1.30 or newer; installed is {ort.__version__}, which can crash on "
            "tensors without elements. Upgrade it"
        )


def common_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Returns the device that all tensors are on, or the CPU if there are no tensors.

    Raises:
        ORTModuleDeviceException: the tensors are on several devices, or on a device without an execution provider.
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
    """Rewrites nodes that ONNX Runtime has no kernel for, or computes incorrectly, on a device.

    Appends a Transpose to each output in `layouts`, so that its axes are in memory order.

    Args:
        model: the model; it may be changed in place.
        device: the device on which the model will run.
        layouts: for each output that is not contiguous in eager PyTorch, by index: its axes in memory order, slowest
            first, e.g. {0: (0, 2, 3, 1)} for an output in channels_last.

    Returns:
        The rewritten model: `model` itself, or a copy.
    """
    if layouts:
        lay_out(model, layouts)
    if not model.graph.outputs:
        return model
    CrossEntropyPass()(model)
    if device.type == "cuda":
        TrainingBatchNormPass()(model)
        # The CUDA provider has bfloat16 kernels for few ops.
        if has_narrow_floats(model, [ir.DataType.BFLOAT16]):
            model = widen_narrow_floats(model, [ir.DataType.BFLOAT16])
        InfinitiesPass()(model)
    # As in PyTorch's CPU kernels, float16 and bfloat16 are computed in float32 and rounded after each op.
    if device.type == "cpu" and has_narrow_floats(model):
        model = widen_narrow_floats(WideCompositesPass()(model).model)
        if kernel_library() is not None:
            NativeOpsPass()(model)
            Bfloat16ProductPass(of_rounded=True)(model)
            Bfloat16RoundingPass()(model)
    if device.type == "cpu" and has_float64(model):
        model = expand_float64(model)
    # Reductions over negative axes fail for an empty batch.
    if _has_no_elements(model.graph):
        model = infer_shapes(model.clone())
        PositiveAxesPass()(model)
    # CUDA's kernels have neither fault.
    if device.type == "cpu":
        if kernel_library() is not None:
            # Most values of a backward graph are inputs, or computed from inputs, whose shapes are known.
            model = infer_shapes(model)
            ImplicitExpandPass()(model)
            RowsPass()(model)
            # Before `LongSumsPass`: the kernel's own sums are as accurate.
            ElementwisePass()(model)
        elif any(node.op_type in ROW_OPS for node in model.graph):
            model = infer_shapes(model)
            RowsPass(gathers=False)(model)
        LongSumsPass()(model)
        if kernel_library() is not None:
            DoubleSumPass()(model)
            TransposePass()(model)
        ExactSigmoidPass()(model)
        RacingScatterPass()(model)
    AbsentInputsPass()(model)
    return model


class Session:
    """Runs an ONNX model on tensors of one device.

    Args:
        model: the model. Parameters are inputs; initializers are constants.
        device: the device of inputs and outputs.
        severity: minimum severity of the messages that ONNX Runtime prints, e.g. 3 for errors.
        layouts: for each output that is not contiguous in eager PyTorch, by index: its axes in memory order, slowest
            first, e.g. {0: (0, 2, 3, 1)} for an output in channels_last.

    Attributes:
        nodes: number of nodes of the model after rewriting, e.g. 12.
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
        # ONNX Runtime rejects a model without outputs, e.g. the backward graph if no gradient reaches any input.
        if not self._outputs:
            return
        options = SessionSettings(
            severity=severity,
            threads=threads_for(model),
            # Without native kernels, function bodies are inlined to many nodes. For these, ONNX Runtime's default order
            # frees values earlier than the order of the file (ResNet-18: 610 MB instead of 889 MB).
            in_file_order=kernel_library() is not None,
            # Optimizations beyond the basic ones fuse scales and epsilons into attributes, which are float32 only.
            basic_optimizations=has_float64(model, ("MatMul", "ReduceMean")),
        ).options()
        self._device = device
        # Registered only if needed: it takes 2 ms, because ONNX Runtime creates a schema of each op for each session.
        if device.type == "cpu" and any(node.domain == DOMAIN for node in model.graph.all_nodes()):
            names = [name for domain, name, _ in model.functions if domain == DOMAIN]
            register_kernels(options, names)
        # ONNX Runtime's ExpandElimination (1.32) removes an Expand from [3, 1] to [3, 0] as a no-op.
        disabled = ["ExpandElimination"] if _has_no_elements(model.graph) else []
        proto = ir.to_proto(model).SerializeToString()
        try:
            session = ort.InferenceSession(
                proto, options, providers=_providers(device), disabled_optimizers=disabled
            )
        except binding.NotImplemented as error:
            raise ORTModuleONNXModelException(_missing_kernel(model, str(error))) from error
        # Otherwise the threads of the new session would spin for 35 ms.
        rest_threads(session)
        self._sharing = CoreSharing(device)
        # Calls use the native session, whose methods have less overhead. `session` keeps it alive.
        self._session = session
        self._native = session._sess
        self._inputs = [value.name for value in model.graph.inputs]
        self._bools = [i for i, value in enumerate(model.graph.outputs) if value.dtype == ir.DataType.BOOL]
        self._empty = [i for i, value in enumerate(model.graph.outputs) if 0 in (value.shape or ())]
        native = ort.OrtDevice.make(device.type, device.index or 0)._get_c_device()
        self._devices = [native] * len(self._outputs)
        self._changes_outputs = bool(self._bools or self._empty or self._layouts)
        copies_inputs = not any(_may_return_an_input(node) for node in model.graph)
        self._feeds = Feeds(model.graph.inputs, native, copies_inputs)

    def run(
        self, values: Sequence[torch.Tensor | binding.OrtValue], *, trusted: bool = True
    ) -> list[torch.Tensor]:
        """Runs the model; returns its outputs in the order of the graph.

        Args:
            values: the inputs: tensors, and OrtValues returned by another session's `run_keeping`.
            trusted: True to reuse the cached OrtValue of an earlier tensor at the same address. Pass False if a tensor
                may reuse the memory of an earlier tensor with a different shape or dtype.
        """
        if not self._outputs:
            return []
        results = self._run(values, trusted)
        outputs: list[torch.Tensor] = results.to_dlpacks(_from_dlpack)
        return self._as_in_pytorch(outputs) if self._changes_outputs else outputs

    def run_keeping(
        self, tensors: Sequence[torch.Tensor], count: int
    ) -> tuple[list[torch.Tensor], list[binding.OrtValue]]:
        """Runs the model; returns the first `count` outputs as tensors, and the residuals that follow as OrtValues.

        Another session's `run`, e.g. of the backward graph, accepts OrtValues directly.
        """
        if not self._outputs:
            return [], []
        results = self._run(tensors, True)
        outputs = [_from_dlpack(results.dlpack_at(index)) for index in range(count)]
        if self._changes_outputs:
            outputs = self._as_in_pytorch(outputs)
        # Converting each OrtValue to a tensor and back would take a noticeable part of a small model's call.
        return outputs, [results[index] for index in range(count, len(self._outputs))]

    def _run(
        self, values: Sequence[torch.Tensor | binding.OrtValue], trusted: bool
    ) -> binding.OrtValueVector:
        """Runs the model; returns its outputs as OrtValues."""
        # A single lookup if the tensors of a call have the same addresses as those of an earlier call.
        feeds = self._feeds.earlier.get(tuple(map(_data_ptr, values))) if trusted else None
        # A transposed view may have the address of an earlier tensor.
        if feeds is None or not all(map(_is_contiguous, values)):
            feeds = self._feeds.of(values, trusted)
        results = binding.OrtValueVector()
        # No CUDA stream is passed through DLPack: kernels that compute inputs must finish before ONNX Runtime reads
        # them.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        arguments = _RUN_OPTIONS, self._inputs, feeds, self._outputs, results, self._devices
        if self._sharing.is_settled:
            self._native.run_with_ortvaluevector(*arguments)
        else:
            self._sharing.watch(lambda: self._native.run_with_ortvaluevector(*arguments))
        return results

    def _as_in_pytorch(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Makes outputs match eager PyTorch: restores the bool dtype, and the strides of outputs with a layout.

        Outputs without elements get new memory, which PyTorch can resize.

        Args:
            outputs: outputs of the graph, from the first one on. The list is modified in place and returned.
        """
        count = len(outputs)
        # DLPack returns Boolean tensors as bytes.
        for index in self._bools:
            if index < count:
                outputs[index] = outputs[index].view(torch.bool)
        # PyTorch (2.13) cannot resize memory from DLPack. An empty output may be resized when it is passed as `out=`.
        for index in self._empty:
            if index < count:
                # Not `empty_like`, which keeps strides from DLPack that `torch.view_as_complex` rejects.
                outputs[index] = outputs[index].new_empty(outputs[index].shape)
        for index, order in self._layouts.items():
            restride(outputs[index], order)
        return outputs


def is_of_onnxruntime(error: BaseException) -> bool:
    """True if `error` is an instance of one of ONNX Runtime's exception classes."""
    # ONNX Runtime's exception classes have no common base class.
    return type(error).__module__.startswith("onnxruntime")


def _has_no_elements(graph: ir.Graph) -> bool:
    """True if a value of the graph has an axis of size 0."""
    values = itertools.chain(graph.inputs, *(node.outputs for node in graph))
    return any(value.shape is not None and 0 in value.shape for value in values)


def _providers(device: torch.device) -> list[str | tuple[str, dict[str, str]]]:
    """Returns ONNX Runtime's execution providers for a device, in order of preference."""
    # Nodes without a CUDA kernel run on the CPU.
    if device.type == "cuda":
        # TF32, which rounds factors to 10 bits, is used as in PyTorch's matrix products.
        tf32 = torch.get_float32_matmul_precision() != "highest"
        options = {"device_id": str(device.index or 0), "use_tf32": str(int(tf32))}
        return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]


_NO_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(\d+\) node with name '([^']*)'")


def _missing_kernel(model: ir.Model, message: str) -> str:
    """Returns an error message for a missing kernel.

    E.g. "ONNX Runtime has no kernel of Erf for float64 (node 'erf/Erf')".

    Args:
        model: the model for which no session could be created.
        message: ONNX Runtime's own message. It doesn't name the dtypes, which usually are the cause.
    """
    match = _NO_KERNEL.search(message)
    if match is None:
        return f"ONNX Runtime cannot run the graph: {message}"
    op_type, name = match.groups()
    nodes = [node for node in model.graph if node.op_type == op_type and name in ("", node.name)]
    values = [value for node in nodes for value in node.inputs] or list(model.graph.inputs)
    # A dict instead of a set, whose order would differ between processes.
    dtypes = {
        value.dtype.numpy().name: None for value in values if value is not None and value.dtype is not None
    }
    where = f" (node '{name}')" if name else ""
    return f"ONNX Runtime has no kernel of {op_type} for {', '.join(dtypes)}{where}"


def _may_return_an_input(node: ir.Node) -> bool:
    """True if a result of a node may alias one of its inputs.

    Kernels on tensors always return new memory. Nodes with subgraphs, sequences or optionals may return an input.
    """
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in graphs for attribute in node.attributes.values()) or any(
        value.type is not None and not isinstance(value.type, ir.TensorType)
        for value in (*node.inputs, *node.outputs)
        if value is not None
    )
