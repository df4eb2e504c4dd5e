"""Makes the ops of ONNX Runtime's com.microsoft domain trainable. Importing this package registers all of them.

An op is defined in a file with the same name as the closest standard op's file one folder up: FusedConv is in
`contrib/conv.py` because Conv is in `conv.py`. `contrib/_shared.py` holds helpers for several files.

Most ops are registered with `defbody`, which decomposes the op into standard ops, following ONNX Runtime's
`ContribOperators.md`. The body replaces the op in the graph that is differentiated. An op that cannot be decomposed has
a rule (`vjp` with `domain=MS` and a `signature`) and remains in the graph. If a gradient flows through an op with an
input or attribute that its body does not support, `_shared.unsupported` creates the error.

Each op has a row in `OPS` in `tests/autodiff/test_contrib.py`, which compares the op with ONNX Runtime's own kernel.
"""

from __future__ import annotations

import importlib
import pkgutil

__all__ = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]

# As in the parent package, new files are found automatically.
for _name in __all__:
    importlib.import_module(f"{__name__}.{_name}")
