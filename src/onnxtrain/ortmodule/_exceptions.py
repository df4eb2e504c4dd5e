"""Defines ORTModule's exceptions, which have the same names as in onnxruntime-training.

::

    OnnxTrainError
    └── ORTModuleFallbackException                    something cannot run in ONNX Runtime
        ├── ORTModuleInitException (RuntimeError)     the installed ONNX Runtime is too old
        ├── ORTModuleDeviceException (RuntimeError)   tensors on a device without an execution provider
        ├── ORTModuleIOError (InputError)             inputs or outputs that ONNX Runtime does not support
        ├── ORTModuleTorchModelException (ModelError) the module cannot be wrapped, captured or changed this way
        └── ORTModuleONNXModelException (ModelError)  the graph has no ONNX form, no gradient, or no kernel

ORTModule catches them while it prepares a graph: the graph then runs in PyTorch, with one warning. If
:class:`~onnxtrain.ortmodule.FallbackPolicy` forbids that, the exception reaches the caller.
"""

from __future__ import annotations

from onnxtrain.errors import InputError, ModelError, OnnxTrainError


# Three exceptions have a second base class from `onnxtrain.errors`: `except ModelError` catches an unusable model,
# whichever part of onnxtrain rejects it.
class ORTModuleFallbackException(OnnxTrainError):
    """Base class of ORTModule's exceptions: ONNX Runtime cannot run a module or a graph."""


class ORTModuleInitException(ORTModuleFallbackException, RuntimeError):
    """The installed version of ONNX Runtime is too old."""


class ORTModuleDeviceException(ORTModuleFallbackException, RuntimeError):
    """Parameters or inputs are on several devices, or on a device without an execution provider."""


class ORTModuleIOError(ORTModuleFallbackException, InputError):
    """An input or output has a type, dtype or layout that ONNX Runtime does not support."""


class ORTModuleTorchModelException(ORTModuleFallbackException, ModelError):
    """The PyTorch module cannot be wrapped, captured, or changed as the caller asked."""


class ORTModuleONNXModelException(ORTModuleFallbackException, ModelError):
    """A captured graph cannot be expressed in ONNX, differentiated, or run by ONNX Runtime."""
