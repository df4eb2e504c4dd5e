"""Defines `install()`, which lets code written for onnxruntime-training run unchanged on stock ONNX Runtime.

::

    import onnxtrain.compat
    onnxtrain.compat.install()

    from onnxruntime.training import artifacts, onnxblock           # onnxtrain.artifacts, onnxtrain.onnxblock
    from onnxruntime.training.api import CheckpointState, Module    # onnxtrain.api
    from torch_ort import ORTModule                                 # onnxtrain.ortmodule
    from onnxruntime.training.optim import FusedAdam                # onnxtrain.optim

The modules are the same objects under a second name. They are imported lazily, so that a device that has only the
packages needed by `onnxtrain.api` can use `onnxruntime.training.api`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distributions
from types import ModuleType
from typing import Any

from onnxtrain.errors import CompatError

__all__ = ["install", "uninstall"]

_OLD, _NEW = "onnxruntime.training", "onnxtrain"
_TORCH_ORT = "torch_ort"
# Modules of the old package that have a counterpart of the same name in onnxtrain.
_MODULES = ("api", "artifacts", "onnxblock", "optim", "ortmodule", "utils")
_INNER_MODULES = {
    "api": {
        "checkpoint_state": "runtime.state",
        "lr_scheduler": "runtime.scheduler",
        "module": "runtime.module",
        "optimizer": "runtime.optimizer",
    },
    "onnxblock.loss": {"loss": "onnxblock.loss"},
    "onnxblock.optim": {"optim": "onnxblock.optim"},
}
"""Maps modules of the old package to their submodules, and these to their counterparts in onnxtrain. Some classes could
only be imported from such a submodule."""

# Names of the distributions that contain the real package, normalized as in PEP 503.
_REAL_DISTRIBUTION = re.compile(r"(onnxruntime|ort)-(.*-)?training(-.*)?")


def install() -> None:
    """Makes `onnxruntime.training` and its modules importable: api, artifacts, onnxblock, optim, ortmodule, utils.data.

    `torch_ort` becomes importable too, as an alias of `onnxtrain.ortmodule`. If the package torch-ort is installed, it
    is imported instead, and its ORTModule is the onnxtrain class. Calling `install` again has no effect.

    Raises:
        CompatError: onnxruntime-training itself is installed, and would be shadowed.

    Example:
        >>> import onnxtrain.compat
        >>> onnxtrain.compat.install()
        >>> from onnxruntime.training.api import LinearLRScheduler
        >>> LinearLRScheduler.__module__
        'onnxtrain.runtime.scheduler'
        >>> onnxtrain.compat.uninstall()
    """
    if _FINDER in sys.meta_path:
        return
    real_package = _real_package()
    if real_package is not None:
        raise CompatError(
            f"installing the compatibility layer: {real_package} provides `{_OLD}` itself. Uninstall it "
            "and reinstall onnxruntime, or leave out onnxtrain.compat.install() and import from onnxtrain"
        )
    # First in the path, because the path-based finder would load onnxtrain's modules again under the old names.
    sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Undoes :func:`install`; modules already imported remain usable under their onnxtrain names."""
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    # Without these entries, importing an old name fails again, as it did before.
    for name in [name for name, module in sys.modules.items() if _is_old(name) or _is_alias(name, module)]:
        del sys.modules[name]
    runtime = sys.modules.get("onnxruntime")
    if runtime is not None and "training" in vars(runtime):
        del runtime.training


def _real_package() -> str | None:
    """Returns the name and version of an installed package that provides `onnxruntime.training`, or None."""
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.name or "").lower()
        if _REAL_DISTRIBUTION.fullmatch(name):
            return f"{distribution.name} {distribution.version}"
    # A training build has no such distribution. Its folder alone proves nothing, because uninstalling may leave it
    # behind. Only a training build has these classes in its native module.
    spec = importlib.util.find_spec(_OLD)
    if spec is not None and spec.origin is not None:
        native = importlib.import_module("onnxruntime.capi._pybind_state")
        if hasattr(native, "CheckpointState") or hasattr(native, "TrainingParameters"):
            return f"a training build of ONNX Runtime ('{spec.origin}')"
    return None


def _is_old(name: str) -> bool:
    """True if a module is `onnxruntime.training` or one of its submodules."""
    return name == _OLD or name.startswith(_OLD + ".")


def _is_alias(name: str, module: ModuleType) -> bool:
    """True if the module is our alias for `torch_ort`, rather than an installed torch-ort."""
    return name == _TORCH_ORT and module.__name__ != name


def _new_name(old: str) -> str:
    return f"{_NEW}.ortmodule" if old == _TORCH_ORT else _NEW + old.removeprefix(_OLD)


class _Finder(MetaPathFinder):
    """Import finder for `onnxruntime.training`, its submodules and `torch_ort`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # An installed torch-ort has precedence: it imports `onnxruntime.training.ortmodule`, which is ours.
        if fullname == _TORCH_ORT:
            if PathFinder.find_spec(fullname, path, target) is not None:
                return None
        elif not _is_old(fullname):
            return None
        return ModuleSpec(fullname, _AliasLoader(), is_package=fullname == _OLD)


class _AliasLoader(Loader):
    """Import loader that creates a lazy package `onnxruntime.training`, whose submodules are onnxtrain's modules."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _TrainingPackage(spec.name, __doc__) if spec.name == _OLD else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name == _OLD:
            return
        # The import system takes the module from sys.modules after this call. It is the same object as in onnxtrain, so
        # that classes imported under either name are identical.
        sys.modules[name] = _import_new(name, _new_name(name))
        for inner, home in _INNER_MODULES.get(name.removeprefix(f"{_OLD}."), {}).items():
            sys.modules[f"{name}.{inner}"] = importlib.import_module(f"{_NEW}.{home}")


class _TrainingPackage(ModuleType):
    """The module `onnxruntime.training`, which lazily imports its submodules and ORTModule."""

    def __getattr__(self, name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{_OLD}.{name}")
        if name == "ORTModule":
            return importlib.import_module(f"{_OLD}.ortmodule").ORTModule
        raise AttributeError(
            f"module {_OLD!r} has no attribute {name!r}; onnxtrain provides {', '.join(_MODULES)}"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_MODULES, "ORTModule"})


def _import_new(old: str, new: str) -> ModuleType:
    """Imports the onnxtrain module that replaces a module of the old package.

    Args:
        old: name of the module in the old package, for error messages.
        new: name of the module in onnxtrain, e.g. "onnxtrain.api".

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    if new.split(".")[1] in _MODULES:
        try:
            return importlib.import_module(new)
        except ModuleNotFoundError as error:
            # The module exists, but a package that it imports is missing: the original message names that package.
            if error.name != new:
                raise
            message = f"importing {old}: it comes with {new}, which this version of onnxtrain does not have"
            if new == f"{_NEW}.ortmodule":
                message += "; install a version that has it: pip install --upgrade 'onnxtrain[torch]'"
            raise ModuleNotFoundError(message, name=old) from error
    # Raised without a name: `from onnxruntime.training import ...` swallows an error with the module's name.
    raise ModuleNotFoundError(
        f"importing {old}: onnxtrain has no counterpart; it provides these modules of {_OLD}: {', '.join(_MODULES)}"
    )


_FINDER = _Finder()
