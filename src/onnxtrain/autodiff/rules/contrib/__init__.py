"""Trains ops of onnxruntime's domain com.microsoft; importing this package registers them all.

An op goes into the file that is named like the file of its nearest standard op, one folder up: com.microsoft's
FusedConv in `contrib/conv.py`, as Conv is in `conv.py`. `contrib/_shared.py` holds the few helpers of several files.

Most ops are registered with `defbody`, which writes what the op computes in standard ops, after onnxruntime's
`ContribOperators.md`: these ops take its place in the graph that is differentiated. An op that is not made of standard
ops has a rule (`vjp` with `domain=MS` and a `signature`) and stays. If a gradient has to pass an op with an input or
attribute that its body does not handle, `_shared.refused` makes the error.

Each op has a row in `OPS` of `tests/autodiff/test_contrib.py`, which compares it with onnxruntime's own kernel.
"""

from __future__ import annotations

import importlib
import pkgutil

__all__ = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]

# As one folder up: a new file is found by itself.
for _name in __all__:
    importlib.import_module(f"{__name__}.{_name}")
