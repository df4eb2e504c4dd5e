"""The native kernels of package `onnxtrain-kernels`, where it is installed.

They take the place of the bodies of onnxtrain's functions in a session; without them ONNX Runtime runs the bodies.
`ONNXTRAIN_KERNELS` is `off` (bodies only), `on` (an error where there are no kernels) or `auto`, the default.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
import weakref

import onnxruntime as ort

from onnxtrain.errors import InputError
from onnxtrain.runtime.lock import ProcessLock

__all__ = ["kernel_library", "register_kernels"]

VARIABLE = "ONNXTRAIN_KERNELS"
FUNCTIONS = 1
"""Version of the functions in domain `onnxtrain` that artifacts contain."""

_registered: weakref.WeakSet[ort.SessionOptions] = weakref.WeakSet()
_registering = ProcessLock()


def kernel_library() -> str | None:
    """Returns the path of the custom op library that sessions on the CPU register; None where bodies are to run.

    Raises:
        InputError: `ONNXTRAIN_KERNELS` is something else, or `on` where no kernels can be used.
    """
    asked = os.environ.get(VARIABLE, "").strip().lower() or "auto"
    if asked not in ("auto", "on", "off"):
        raise InputError(f"{VARIABLE}='{asked}': expected 'auto' (the default), 'on' or 'off'.")
    if asked == "off":
        return None
    path, problem = _installed()
    if path is None and asked == "on":
        raise InputError(f"{VARIABLE}=on, but {problem}. Install onnxtrain[kernels], or set {VARIABLE}=off.")
    return path


@functools.cache
def _installed() -> tuple[str | None, str]:
    """Returns the path of the library, or None and why there is none."""
    try:
        kernels = importlib.import_module("onnxtrain_kernels")
    except ImportError:
        return None, "package onnxtrain-kernels is not installed"
    if kernels.FUNCTIONS != FUNCTIONS:
        problem = (
            f"the installed onnxtrain-kernels computes version {kernels.FUNCTIONS} of the functions, "
            f"and this onnxtrain needs version {FUNCTIONS}"
        )
        warnings.warn(f"{problem}: training runs without native kernels", RuntimeWarning, stacklevel=4)
        return None, problem
    try:
        return str(kernels.library()), ""
    except FileNotFoundError as error:
        return None, str(error)


def register_kernels(options: ort.SessionOptions) -> None:
    """Lets the sessions made with these options use the native kernels; options may be used several times."""
    path = kernel_library()
    if path is None:
        return
    with _registering:
        if options not in _registered:
            options.register_custom_ops_library(path)
            _registered.add(options)
