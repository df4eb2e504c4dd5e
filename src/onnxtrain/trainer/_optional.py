"""Packages that only some of what the trainer offers needs."""

from __future__ import annotations

import importlib
from typing import Any

from onnxtrain.errors import MissingPackageError


def optional(module: str, what: str, install: str) -> Any:
    """Returns a module of an optional package, imported now.

    Args:
        module: its name.
        what: what needs it, for the message.
        install: what to give to pip.

    Raises:
        MissingPackageError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if (error.name or "").split(".")[0] != package:
            raise  # something that the package itself lacks
        raise MissingPackageError(
            f"{what} needs {package}, which is not installed: pip install {install}"
        ) from error
