"""Imports optional packages. If a package is missing, the error explains how to install it."""

from __future__ import annotations

import importlib
from typing import Any

from onnxtrain.errors import MissingPackageError


def optional(module: str, what: str, install: str) -> Any:
    """Imports a module of an optional package.

    Args:
        module: name of the module, e.g. "sklearn.metrics".
        what: feature that needs the package, for error messages.
        install: arguments of `pip install`, e.g. "'onnxtrain[plots]'".

    Raises:
        MissingPackageError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if (error.name or "").split(".")[0] != package:
            # The package is installed, but one of its own dependencies is missing; the message names it.
            raise
        raise MissingPackageError(
            f"{what} needs {package}, which is not installed: pip install {install}"
        ) from error
