"""Holds the gradient rules, one module per family of ops; importing this package registers them all.

Modules with a leading underscore are shared by several families. Ops of com.microsoft stand in `contrib/`, those of
ai.onnx.ml in `ml.py`.
"""

from __future__ import annotations

import importlib
import pkgutil

__all__ = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]

# A new file registers its rules without being named anywhere else.
for _name in __all__:
    importlib.import_module(f"{__name__}.{_name}")
