"""The exceptions of ORTModule, under the names that onnxruntime-training gave them.

::

    OnnxTrainError
    └── ORTModuleFallbackException               why something cannot run in ONNX Runtime
        ├── ORTModuleInitException (RuntimeError)     the runtime itself cannot be set up
        ├── ORTModuleDeviceException (RuntimeError)   tensors on a device that no session can be made for
        ├── ORTModuleIOError (InputError)             inputs or outputs without counterpart
        ├── ORTModuleTorchModelException (ModelError) the module cannot be wrapped, captured or changed so
        └── ORTModuleONNXModelException (ModelError)  the graph has no ONNX form, no gradient, or no kernel

While a graph is prepared these are caught and turned into a fallback to PyTorch with one warning, unless
:class:`~onnxtrain.ortmodule.FallbackPolicy` forbids it; then they reach the caller.
"""

from __future__ import annotations

from onnxtrain.errors import InputError, ModelError, OnnxTrainError


class ORTModuleFallbackException(OnnxTrainError):
    """Something cannot run in ONNX Runtime."""


class ORTModuleInitException(ORTModuleFallbackException, RuntimeError):
    """ONNX Runtime, or what is needed to use it, cannot be set up."""


class ORTModuleDeviceException(ORTModuleFallbackException, RuntimeError):
    """Parameters or inputs are on a device, or on several, that no session can be made for."""


class ORTModuleIOError(ORTModuleFallbackException, InputError):
    """An input or output has a type, dtype or layout that ONNX Runtime has no counterpart of."""


class ORTModuleTorchModelException(ORTModuleFallbackException, ModelError):
    """The PyTorch module cannot be wrapped, captured, or changed in the way that was asked for."""


class ORTModuleONNXModelException(ORTModuleFallbackException, ModelError):
    """A captured graph cannot be expressed in ONNX, differentiated, or run by ONNX Runtime."""
