"""Train PyTorch modules with stock ONNX Runtime: `model = ORTModule(model)`, and nothing else changes.

Forward and backward run in ONNX Runtime; parameters, buffers, hooks and optimizers stay PyTorch's.
`model.report()` tells which graphs run where. docs/ortmodule-api.md has every method of `torch.nn.Module`.
"""

from __future__ import annotations

# The core of onnxtrain is installed without PyTorch. Without this check the user would read "No module named 'torch'",
# and not which extra brings it.
try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    # PyTorch is there, but lacks a module of its own: an advice to install PyTorch would mislead.
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "importing onnxtrain.ortmodule: PyTorch is not installed; pip install 'onnxtrain[torch]'",
        name="torch",
    ) from error

from onnxtrain.ortmodule._exceptions import (
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from onnxtrain.ortmodule._options import DebugOptions, FallbackPolicy, LogLevel
from onnxtrain.ortmodule._report import GraphRecord, PyTorchOp, Report
from onnxtrain.ortmodule.module._backend import compile_backend
from onnxtrain.ortmodule.module._module import ORTModule

__all__ = [
    "DebugOptions",
    "FallbackPolicy",
    "GraphRecord",
    "LogLevel",
    "ORTModule",
    "ORTModuleDeviceException",
    "ORTModuleFallbackException",
    "ORTModuleIOError",
    "ORTModuleInitException",
    "ORTModuleONNXModelException",
    "ORTModuleTorchModelException",
    "PyTorchOp",
    "Report",
    "compile_backend",
]
