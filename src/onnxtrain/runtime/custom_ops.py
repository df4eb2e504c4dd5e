"""Registers libraries of custom ops, whose kernels all sessions can run."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import onnxruntime as ort

from onnxtrain.errors import InputError
from onnxtrain.runtime.lock import ProcessLock

_paths: list[str] = []
# Number of libraries that are registered with session options. Weak, so that the options can be freed. ONNX Runtime
# rejects a session whose options have a library twice, and does not tell which ones they have.
_registered: weakref.WeakKeyDictionary[ort.SessionOptions, int] = weakref.WeakKeyDictionary()
_lock = ProcessLock()


def register_custom_ops_library(path: str | os.PathLike[str]) -> None:
    """Registers a shared library of custom ops with all ONNX Runtime sessions that this process opens from now on.

    The library is one for `onnxruntime.SessionOptions.register_custom_ops_library`, e.g. the result of
    `onnxruntime_extensions.get_library_path()`. Trainers, the on-device API, exports and gradient checks then run its
    kernels. Registering a library again has no effect. `ORTModule` has no ONNX custom ops and does not use it.

    To train through a custom op, register its gradient or its body, too: :func:`onnxtrain.register_gradient`,
    :func:`onnxtrain.register_body`.

    Args:
        path: path of the library, e.g. "libmy_ops.so".

    Raises:
        InputError: there is no such file, or ONNX Runtime cannot load it.
    """
    library = Path(path).absolute()
    if not library.is_file():
        raise InputError(f"Registering custom ops: there is no file '{library}'. Check the path.")
    with _lock:
        if str(library) in _paths:
            return
        try:
            ort.SessionOptions().register_custom_ops_library(str(library))
        # onnxruntime's exceptions have no common base class but Exception.
        except Exception as error:
            raise InputError(
                f"Registering custom ops: onnxruntime {ort.__version__} cannot load '{library}': {error}. The library "
                "must be built for this system and export RegisterCustomOps."
            ) from error
        _paths.append(str(library))


def add_custom_ops(options: ort.SessionOptions) -> None:
    """Registers the libraries of :func:`register_custom_ops_library` with session options, in place."""
    with _lock:
        for path in _paths[_registered.get(options, 0) :]:
            options.register_custom_ops_library(path)
        _registered[options] = len(_paths)
