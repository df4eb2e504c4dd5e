"""Trains PyTorch modules with stock ONNX Runtime: `model = ORTModule(model)`, and nothing else changes.

Forward and backward run in ONNX Runtime; parameters, buffers, hooks and optimizers remain PyTorch's own.
`model.report()` shows where each graph runs. notes/ortmodule-api.md lists every method of `torch.nn.Module`.
"""

from __future__ import annotations

# The first import: if PyTorch is missing, its error says what to install.
import onnxtrain._pytorch  # noqa: F401  # isort: skip

from onnxtrain._building import without_collection, without_older_objects

# Among the many objects of PyTorch, a collection during the imports takes up to 0.2 s and frees nothing.
with without_collection():
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

    # Moves the new objects to the oldest generation, which the next collection leaves out.
    with without_older_objects():
        pass

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
