"""Raises an error with installation advice if PyTorch is missing.

Packages that need PyTorch import this module first.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    # A broken PyTorch installation, which lacks one of its own modules, raises its own error.
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "PyTorch is not installed; onnxtrain.ortmodule, nn, optim and utils.data need it: "
        "pip install 'onnxtrain[torch]'",
        name="torch",
    ) from error
