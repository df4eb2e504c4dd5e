"""One module per family of ops; importing this package registers them all."""

from __future__ import annotations

import importlib
import pkgutil

__all__ = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]

for _name in __all__:
    importlib.import_module(f"{__name__}.{_name}")
