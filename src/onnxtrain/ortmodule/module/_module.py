"""Defines ORTModule, which wraps a `torch.nn.Module` and runs its calls in ONNX Runtime."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._exceptions import ORTModuleTorchModelException
from onnxtrain.ortmodule._options import DebugOptions
from onnxtrain.ortmodule._report import Report
from onnxtrain.ortmodule.module._class_lookups import class_for, user_class
from onnxtrain.ortmodule.module._wrapped import BoundForward, Wrapped
from onnxtrain.ortmodule.sessions._session import check_onnxruntime


class ORTModule(torch.nn.Module):
    """Runs a module's forward and backward passes in ONNX Runtime; otherwise behaves like the module.

    An ORTModule has no state of its own. Reading, setting and deleting attributes, and the methods of
    `torch.nn.Module`, act on the wrapped module; names in `state_dict()` have no prefix. Methods that return `self`
    return the ORTModule. In methods of the user's class, `self` is the ORTModule, so `self(x)` also runs in ONNX
    Runtime. notes/ortmodule-api.md lists all methods. Differences from the wrapped module:

    - `model.module` is the wrapped module. If it is a DistributedDataParallel, `model.module` is the module inside
      it, as without ORTModule. `model.report()` shows where each graph runs, and
      `model.export_training_graph(folder)` writes the graphs;
    - `add_module` raises, as in onnxruntime-training; `register_module` and assignment work;
    - `modules()`, `named_modules()`, `get_submodule("")`, `apply` and hooks see the wrapped module as the root;
    - `compile` compiles the wrapped module; calls to the ORTModule still run in ONNX Runtime;
    - `repr(model)` is the `repr` of the wrapped module between `ORTModule(` and `)`.

    `isinstance(model, type(model.module))` is True. `type(model)` is ORTModule or a subclass.

    Args:
        module: the module to run. An ORTModule is unwrapped first.
        debug_options: logging, saved graphs, and the policy for falling back to PyTorch. Default: `DebugOptions()`.

    Raises:
        TypeError: an argument has the wrong type.
        ORTModuleTorchModelException: the module cannot be captured, e.g. because it is TorchScript.
        ORTModuleInitException: the installed onnxruntime is older than 1.30.

    Example:
        >>> model = ORTModule(torch.nn.Linear(2, 1))
        >>> list(model.state_dict())
        ['weight', 'bias']
        >>> model.eval() is model, model.training, model.module.training
        (True, False, False)
        >>> model
        ORTModule(Linear(in_features=2, out_features=1, bias=True))
    """

    __slots__ = ("_ort",)
    _ort: Wrapped
    _ort_own: ClassVar[frozenset[str]] = frozenset()
    """Names of attributes that ORTModule or its subclass defines. All other attributes are the wrapped module's."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if user_class(cls) is cls:
            cls._ort_own |= vars(cls).keys() - _NOT_OWN

    # torch.nn.Module.__init__ is not called: it would create a second set of parameters, buffers and hooks.
    def __init__(self, module: torch.nn.Module, debug_options: DebugOptions | None = None) -> None:
        if debug_options is None:
            debug_options = DebugOptions()
        elif not isinstance(debug_options, DebugOptions):
            raise TypeError(
                "ORTModule: debug_options must be DebugOptions or None, "
                f"received {type(debug_options).__name__}"
            )
        check_onnxruntime()
        _adopt(self, (_unwrap(module), debug_options))

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module or, if it is a DistributedDataParallel, the module inside it."""
        module = _wrapped_of(self).module
        # If `model` is an instance of DistributedDataParallel, torch.distributed.checkpoint (PyTorch 2.13) expects the
        # inner module from `model.module`.
        return module.module if isinstance(module, DistributedDataParallel) else module

    def report(self) -> Report:
        """Returns the report of the captured graphs, with the engine that runs each graph."""
        return _wrapped_of(self).report

    def export_training_graph(self, path: str | os.PathLike[str]) -> list[Path]:
        """Writes all graphs that have been compiled for ONNX Runtime to ONNX files.

        A graph for training has two files, `graph_<n>_forward.onnx` and `graph_<n>_backward.onnx`. A graph for
        inference has one file, `graph_<n>_inference.onnx`. If PyTorch runs some of a graph's operators, each part in
        ONNX Runtime has its own files, e.g. `graph_<n>_part_<k>_forward.onnx`.

        The files contain the models as the sessions run them, after fusion and other rewrites, and run in any stock
        ONNX Runtime. The inputs of a forward model are parameters, buffers, arguments and random numbers; its outputs
        are the graph's outputs, then the residuals. The inputs of a backward model are those inputs and outputs of the
        forward model that it reads, under the same names, then the cotangents, `<output>_ct`; its outputs are the
        gradients, `<input>_grad`.

        Args:
            path: a folder, which is created if it does not exist.

        Returns:
            The paths of the files.

        Raises:
            ORTModuleONNXModelException: nothing has run in ONNX Runtime yet.
        """
        return _wrapped_of(self).graphs.save(path)

    # If an ORTModule is a child of a compiled module, it is called, and not captured with the parent.
    # torch.compiler.disable would do the same, but its wrapper takes microseconds per call.
    @_torch.skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module, hooks included, in ONNX Runtime."""
        return _wrapped_of(self).call(*args, **kwargs)

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The wrapped module's `forward`, run in ONNX Runtime. The module's own hooks don't run."""
        return BoundForward(_wrapped_of(self))

    def add_module(self, name: str, module: torch.nn.Module | None) -> NoReturn:
        """Always raises, as in onnxruntime-training. Use `register_module` or `model.module.add_module` instead.

        Raises:
            ORTModuleTorchModelException: always.
        """
        raise ORTModuleTorchModelException(
            f"ORTModule does not support add_module (called for {name!r}): "
            f"use model.register_module({name!r}, ...), or model.module.add_module"
        )

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """Returns the wrapped module, for `torch.jit.script` to compile."""
        return _wrapped_of(self).module

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise ORTModuleTorchModelException(_DATA_PARALLEL)

    # Every attribute that ORTModule doesn't define is looked up on the wrapped module. `__getattr__` alone would not be
    # enough, because the base class torch.nn.Module has e.g. `parameters` and `training`, too.
    # Dynamo may capture a hook that reads an ORTModule, e.g. DeepSpeed's, but must not capture this method: Dynamo
    # reads `type(self)` through `__getattribute__`, in an infinite recursion.
    @_torch.skip
    def __getattribute__(self, name: str) -> Any:
        if name in type(self)._ort_own:
            return object.__getattribute__(self, name)
        wrapped = _wrapped_of(self)
        value = getattr(wrapped.module, name)
        if type(value) is MethodType and value.__self__ is wrapped.module:
            return _bound_method(self, wrapped, name, value)
        return value

    # Python calls this method if __getattribute__ has raised AttributeError.
    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"'{type(_wrapped_of(self).module).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_NAMES:
            raise AttributeError(
                f"setting '{name}' on an ORTModule: ORTModule uses this name itself; set model.module.{name} instead"
            )
        if name == "__class__" and any(base.__name__ == "FSDPModule" for base in value.__mro__):
            raise ORTModuleTorchModelException(
                f"setting the class of an ORTModule to {value.__name__}, as fully_shard does: "
                "wrap the sharded module instead, ORTModule(fully_shard(module))"
            )
        module = _wrapped_of(self).module
        # `model.forward = decorate(model.forward)`: the function stored in the module must not call the ORTModule.
        if isinstance(value, BoundForward):
            value = value.__wrapped__
        elif isinstance(value, MethodType) and value.__self__ is self:
            value = MethodType(value.__func__, module)
        setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_wrapped_of(self).module, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(_wrapped_of(self).module), *_OWN_NAMES})

    def __repr__(self) -> str:
        return f"ORTModule({_wrapped_of(self).module!r})"

    def __copy__(self) -> ORTModule:
        clone = _blank(user_class(type(self)))
        _adopt(clone, (copy.copy(_wrapped_of(self).module), _wrapped_of(self).options))
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> ORTModule:
        clone = _blank(user_class(type(self)))
        # Set before the module is copied, because the module may refer to this object.
        memo[id(self)] = clone
        _adopt(clone, copy.deepcopy((_wrapped_of(self).module, _wrapped_of(self).options), memo))
        return clone

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = (_wrapped_of(self).module, _wrapped_of(self).options)
        return _blank, (user_class(type(self)),), state, None, None, _adopt


_wrapped_of: Callable[[ORTModule], Wrapped] = ORTModule.__dict__["_ort"].__get__
"""Returns the state of an ORTModule. Reads the slot directly, because `__getattribute__` reads the wrapped module."""

_DATA_PARALLEL = (
    "ORTModule cannot be used with torch.nn.DataParallel, which copies the module in each call; "
    "use torch.nn.parallel.DistributedDataParallel(ORTModule(module))"
)

_RETURN_SELF = (
    "apply", "bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "ipu", "mtia", "requires_grad_",
    "share_memory", "to", "to_empty", "train", "type", "xpu",
)  # fmt: skip
"""Methods of torch.nn.Module that return `self`. On an ORTModule they return the ORTModule."""

_OWN_NAMES = ("module", "report", "export_training_graph")
"""Public names that an ORTModule has in addition to the wrapped module's."""

_NOT_OWN = frozenset({"__annotations__", "__doc__", "__init__", "__module__", "__slots__"})
"""Names in every class body that are nevertheless looked up on the wrapped module, e.g. `__doc__`."""


ORTModule._ort_own = frozenset(vars(ORTModule)) - _NOT_OWN


def _bound_method(self: ORTModule, wrapped: Wrapped, name: str, method: MethodType) -> Any:
    """Returns a method of the wrapped module in the form in which the ORTModule exposes it.

    Methods of the user's class are bound to the ORTModule; methods that return `self` return the ORTModule.

    Args:
        self: the ORTModule.
        wrapped: the state of the ORTModule.
        name: the name of the method.
        method: the method, bound to the wrapped module.
    """
    # Methods of the user's class are bound to the ORTModule, so that `self(x)` in them runs in ONNX Runtime. PyTorch's
    # methods stay bound to the module, because they read e.g. `_parameters`.
    of_torch = hasattr(torch.nn.Module, name) or method.__module__.startswith("torch.")
    if not of_torch:
        return MethodType(method.__func__, self) if wrapped.binds_methods else _return_ortmodule(self, method)
    if name in _RETURN_SELF or not hasattr(torch.nn.Module, name):
        return _return_ortmodule(self, method)
    return method


def _return_ortmodule(self: ORTModule, method: MethodType) -> Callable[..., Any]:
    """Wraps a method of the wrapped module to return the ORTModule instead of the wrapped module."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return self if result is method.__self__ else result

    return call


def _blank(cls: type[ORTModule]) -> ORTModule:
    """Returns an ORTModule without a wrapped module, for copying and unpickling."""
    blank: ORTModule = object.__new__(cls)
    return blank


def _adopt(self: ORTModule, state: tuple[torch.nn.Module, DebugOptions]) -> None:
    """Initializes an ORTModule that wraps a module, and sets its `__class__` to the result of :func:`class_for`.

    Warns if the module has attributes that ORTModule hides.

    Args:
        self: the ORTModule.
        state: the module and its options.
    """
    module, options = state
    hidden = [name for name in _OWN_NAMES if hasattr(module, name)]
    # `ORTModule.module` returns the same module as `DistributedDataParallel.module`.
    if isinstance(module, DistributedDataParallel):
        hidden.remove("module")
    if hidden:
        kind = type(module).__name__
        warnings.warn(
            f"ORTModule: {kind} defines {' and '.join(map(repr, hidden))}, which ORTModule uses itself: access the "
            f"module's own as model.module.{hidden[0]}. Methods of {kind} that torch.nn.Module does not have are "
            "therefore called on the wrapped module, and run in PyTorch",
            stacklevel=3,
        )
    object.__setattr__(self, "_ort", Wrapped(module, options, binds_methods=not hidden))
    own, users = cast(type, type(self)), cast(type, type(module))
    object.__setattr__(self, "__class__", class_for(own, users))


def _unwrap(module: object) -> torch.nn.Module:
    """Returns the module to wrap: the argument or, if it is an ORTModule, the module inside it.

    Args:
        module: the argument that the user passed, of any type.

    Raises:
        TypeError: the argument is not a module.
        ORTModuleTorchModelException: this kind of module cannot be wrapped, e.g. TorchScript.
    """
    # `isinstance` would read `__class__`, which is forwarded to the wrapped module.
    if type(module).__mro__.count(ORTModule):
        return _wrapped_of(cast(ORTModule, module)).module
    if not isinstance(module, torch.nn.Module):
        kind = module.__name__ if isinstance(module, type) else type(module).__name__
        wanted = "an instance of it" if isinstance(module, type) else "a torch.nn.Module"
        raise TypeError(f"ORTModule wraps a torch.nn.Module; received {kind!r}: pass {wanted}")
    if isinstance(module, torch.nn.DataParallel):
        raise ORTModuleTorchModelException(_DATA_PARALLEL)
    if isinstance(module, torch.jit.ScriptModule):
        raise ORTModuleTorchModelException(
            "ORTModule cannot capture TorchScript: "
            f"pass the module that this {type(module).__name__} was made from"
        )
    if isinstance(module, _torch.OptimizedModule):
        raise ORTModuleTorchModelException(
            "ORTModule captures with torch.compile itself: pass the module that torch.compile was called on"
        )
    return module
