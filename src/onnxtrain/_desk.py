"""Imports onnx and onnx_ir; raises an error with installation advice if one of them is missing.

Packages that build graphs import this module first.
"""

from __future__ import annotations

from onnxtrain._late_sympy import late_sympy

# Devices install onnxtrain without the extra `build`.
try:
    import onnx as _onnx  # noqa: F401

    with late_sympy():
        import onnx_ir as _onnx_ir  # noqa: F401
except ModuleNotFoundError as error:
    # If onnx itself lacks a package, its own message names that package.
    if error.name not in ("onnx", "onnx_ir"):
        raise
    raise ModuleNotFoundError(
        f"{error.name} is not installed; all of onnxtrain needs it, except onnxtrain.api, the part for devices: "
        "pip install 'onnxtrain[build]'",
        name=error.name,
    ) from error
