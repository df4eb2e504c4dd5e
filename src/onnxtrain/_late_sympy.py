"""Imports onnx_ir without sympy, which it needs for arithmetic on symbolic dimensions only.

onnx_ir 1.1 imports sympy with its own modules, which takes more than half of the time and memory of importing it.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

# The modules of onnx_ir with an `import sympy`.
_READERS = ("onnx_ir._core", "onnx_ir._symbolic_shapes")


@contextmanager
def late_sympy() -> Iterator[None]:
    """Context manager in which onnx_ir is imported: it imports sympy when it first computes with a dimension."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds `_READERS` as the other finders do, and has `_LateLoader` load them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _READERS or "sympy" in sys.modules:
            return None
        others = (f for f in sys.meta_path if not isinstance(f, _Finder) and hasattr(f, "find_spec"))
        spec = next((s for f in others if (s := f.find_spec(fullname, path, target)) is not None), None)
        # Loaders of extension modules have no code.
        code = getattr(spec.loader, "get_code", lambda _: None)(fullname) if spec is not None else None
        if spec is None or spec.loader is None or code is None:
            return spec
        spec.loader = _LateLoader(spec.loader, code)
        return spec


class _LateLoader(Loader):
    """Runs the code of a module, whose `import sympy` it answers with a stand-in."""

    def __init__(self, loader: Loader, code: CodeType) -> None:
        self._loader = loader
        self._code = code

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        sympy = _Sympy()

        def import_(
            name: str,
            globals_: Mapping[str, object] | None = None,
            locals_: Mapping[str, object] | None = None,
            fromlist: Sequence[str] | None = (),
            level: int = 0,
        ) -> Any:
            if name == "sympy" and not fromlist:
                return sympy
            return builtins.__import__(name, globals_, locals_, fromlist, level)

        # Of this module alone: an entry of sys.modules would be seen by the whole process.
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_}
        try:
            exec(self._code, vars(module))
        except Exception:
            # Another version may need more of sympy at import than the stand-in has.
            vars(module)["__builtins__"] = vars(builtins)
            exec(self._code, vars(module))
        vars(sympy)["_importing"] = False


class _Sympy:
    """Stands for sympy in a module of onnx_ir."""

    _importing = True

    def __getattr__(self, name: str) -> Any:
        if self._importing:
            # `onnx_ir._symbolic_shapes` has a table of functions.
            return lambda *args: getattr(importlib.import_module("sympy"), name)(*args)
        value = vars(self)[name] = getattr(importlib.import_module("sympy"), name)
        return value
