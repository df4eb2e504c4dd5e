"""Reads the loss of `--loss FILE.py:NAME`: a function or a criterion that a Python file defines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from onnxtrain.cli._settings import names_python
from onnxtrain.errors import InputError, MissingPackageError

_MODULE = "onnxtrain_loss_file"


def python_loss(text: str) -> Any:
    """Runs a Python file, and returns the object that `--loss` names, e.g. a function of PyTorch tensors.

    Only the command that builds a run calls this: the run holds the loss as ONNX ops, and resuming it runs no Python.

    Args:
        text: path of the file and name of the object, e.g. "losses.py:detection".

    Raises:
        InputError: the file is missing or raises an exception, or it does not define the name.
        MissingPackageError: the file imports a package that is not installed.
    """
    assert names_python(text)
    file, _, name = text.rpartition(":") if not text.endswith(".py") else (text, "", "")
    path = Path(file)
    if not path.is_file():
        raise InputError(f"--loss {text}: there is no file '{path}'.")
    module = _run(path, text)
    if name and hasattr(module, name):
        return getattr(module, name)
    own = [
        key
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_") and getattr(value, "__module__", None) == _MODULE
    ]
    defined = f"it defines {', '.join(own)}" if own else "it defines no function"
    example = f"--loss {path}:{own[0] if own else 'NAME'}"
    problem = f"'{path}' does not define '{name}'" if name else "the name of the function is missing"
    raise InputError(f"--loss {text}: {problem}; {defined}. Pass e.g. {example}")


def _run(path: Path, text: str) -> Any:
    """Runs a file as a module, which can import files beside it, as a script can."""
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # PyTorch's tracing looks modules up by name.
    sys.modules[_MODULE] = module
    folder = str(path.absolute().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"--loss {text}: the file imports {error.name!r}, which is not installed."
        ) from error
    # The user's file may raise any exception.
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise InputError(f"--loss {text}: running the file raised {message}") from error
    finally:
        sys.path.remove(folder)
    return module
