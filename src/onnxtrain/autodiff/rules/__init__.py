"""Defines the VJP rules, one module per family of ops. Importing this package registers all of them.

Modules with a leading underscore are shared by several families. Rules for ops of com.microsoft are in `contrib/`,
rules for ops of ai.onnx.ml in `ml.py`.
"""

from __future__ import annotations

import importlib
import pkgutil

__all__ = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]

# Every public module is imported, so a new file registers its rules without being listed anywhere.
for _name in __all__:
    importlib.import_module(f"{__name__}.{_name}")
