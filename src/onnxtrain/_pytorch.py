"""Says what to install if PyTorch is missing; packages for PyTorch import this module first."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    # A broken PyTorch, which lacks a module of its own, says so itself.
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "PyTorch is not installed, which onnxtrain.ortmodule, nn, optim and utils.data need; "
        "pip install 'onnxtrain[torch]'",
        name="torch",
    ) from error
