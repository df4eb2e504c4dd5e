"""Stand in for a `torch.nn.Module` with an ORTModule, which runs the module's calls in ONNX Runtime."""

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
    """Runs forward and backward of a module in ONNX Runtime; everything else is the module's own.

    The ORTModule has no state of its own: every attribute, read, set or deleted, and every method of
    `torch.nn.Module` is that of the wrapped module, whose names carry no prefix. Methods that return `self`
    return the ORTModule. The methods that the user's class adds see the ORTModule as their `self`, so that
    `self(x)` in them runs in ONNX Runtime too. docs/ortmodule-api.md lists all methods; what differs:

    - `model.module` is the wrapped module; of a wrapped DistributedDataParallel it is the module inside of that, as
      without ORTModule. `model.report()` tells which graphs run where, and `model.export_training_graph(folder)`
      writes them;
    - `add_module` raises, as it did in onnxruntime-training; `register_module` and assignment work;
    - `modules()`, `named_modules()`, `get_submodule("")`, `apply` and hooks see the wrapped module as root;
    - `compile` compiles the wrapped module; calls of the ORTModule still run in ONNX Runtime;
    - `repr(model)` has the text of the wrapped module between `ORTModule(` and `)`.

    `isinstance(model, type(model.module))` holds; `type(model)` tells an ORTModule.

    Args:
        module: the module to run. An ORTModule is unwrapped first.
        debug_options: what to log and save, and whether graphs may fall back to PyTorch.

    Raises:
        TypeError: an argument has the wrong type.
        ORTModuleTorchModelException: a kind of module that cannot be captured.
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
    """Names of the attributes that ORTModule, or a subclass of it, defines itself; all others are the module's."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if user_class(cls) is cls:
            cls._ort_own |= vars(cls).keys() - _NOT_OWN

    # torch.nn.Module.__init__ is not called: it would make a second set of parameters, buffers and hooks.
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
        """The wrapped module; of a wrapped DistributedDataParallel, the module inside of it."""
        module = _of(self).module
        # torch.distributed.checkpoint (PyTorch 2.13) finds names by way of `model.module` if `model` is an instance of
        # DistributedDataParallel, and takes the result for the module inside.
        return module.module if isinstance(module, DistributedDataParallel) else module

    def report(self) -> Report:
        """Returns which graphs run where; see :class:`~onnxtrain.ortmodule.Report`."""
        return _of(self).report

    def export_training_graph(self, path: str | os.PathLike[str]) -> list[Path]:
        """Writes the graphs that ONNX Runtime has compiled so far for this model as ONNX files.

        A graph that has run in training mode is two files, `graph_<n>_forward.onnx` and `graph_<n>_backward.onnx`; one
        for inference is `graph_<n>_inference.onnx`. Where PyTorch runs some operators, each part in ONNX Runtime has
        files of its own, `graph_<n>_part_<k>_forward.onnx`. They are those of the sessions, operator for operator, with
        fused and float64 computations as onnxtrain writes them, and run in any stock runtime. Inputs of forward are
        what PyTorch passes (parameters, buffers, arguments, and random numbers where it draws them); its outputs are
        the graph's own, then what backward takes of it. Inputs of backward are inputs and outputs of forward, by
        name, then `<output>_ct`, the cotangents; its outputs are `<input>_grad`.

        Args:
            path: a folder; it is made if it is not there.

        Returns:
            The files.

        Raises:
            ORTModuleONNXModelException: nothing has run in ONNX Runtime yet.
        """
        return _of(self).graphs.save(path)

    # As the child of a module that is compiled itself, it is called from there, and not captured with it.
    # Not torch.compiler.disable, whose wrapper costs each call microseconds.
    @_torch.skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Does what the wrapped module does when called, hooks included."""
        return _of(self).call(*args, **kwargs)

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """Does what the wrapped module's forward does: the hooks of the module itself do not run."""
        return BoundForward(_of(self))

    def add_module(self, name: str, module: torch.nn.Module | None) -> NoReturn:
        """Raises: onnxruntime-training forbade it, and callers rely on that.

        Raises:
            ORTModuleTorchModelException: always.
        """
        raise ORTModuleTorchModelException(
            f"ORTModule does not support add_module (called for {name!r}): "
            f"use model.register_module({name!r}, ...), or model.module.add_module"
        )

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """Returns the wrapped module, for `torch.jit.script` to compile."""
        return _of(self).module

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise ORTModuleTorchModelException(_DATA_PARALLEL)

    # Every attribute that is not ORTModule's own is the wrapped module's: `__getattr__` alone would not do, as
    # torch.nn.Module, the base class, has parameters(), training and all the others, too.
    # Dynamo, which may capture a hook that reads an ORTModule (DeepSpeed's does), must not follow: Dynamo reads
    # `type(self)` by way of `__getattribute__`, without end.
    @_torch.skip
    def __getattribute__(self, name: str) -> Any:
        if name in type(self)._ort_own:
            return object.__getattribute__(self, name)
        wrapped = _of(self)
        value = getattr(wrapped.module, name)
        if type(value) is MethodType and value.__self__ is wrapped.module:
            return _bound(self, wrapped, name, value)
        return value

    # Python comes here when __getattribute__ has found nothing.
    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"'{type(_of(self).module).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_NAMES:
            raise AttributeError(
                f"setting '{name}' of an ORTModule: the name is its own; set model.module.{name} instead"
            )
        if name == "__class__" and any(base.__name__ == "FSDPModule" for base in value.__mro__):
            raise ORTModuleTorchModelException(
                f"giving an ORTModule the class {value.__name__}, as fully_shard does: "
                "wrap the module that has it, ORTModule(fully_shard(module))"
            )
        module = _of(self).module
        # `model.forward = decorate(model.forward)`: what is stored in the module must not lead back here.
        if isinstance(value, BoundForward):
            value = value.__wrapped__
        elif isinstance(value, MethodType) and value.__self__ is self:
            value = MethodType(value.__func__, module)
        setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_of(self).module, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(_of(self).module), *_OWN_NAMES})

    def __repr__(self) -> str:
        return f"ORTModule({_of(self).module!r})"

    def __copy__(self) -> ORTModule:
        clone = _blank(user_class(type(self)))
        _adopt(clone, (copy.copy(_of(self).module), _of(self).options))
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> ORTModule:
        clone = _blank(user_class(type(self)))
        # Before the module is copied, which may refer to this object.
        memo[id(self)] = clone
        _adopt(clone, copy.deepcopy((_of(self).module, _of(self).options), memo))
        return clone

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = (_of(self).module, _of(self).options)
        return _blank, (user_class(type(self)),), state, None, None, _adopt


_of: Callable[[ORTModule], Wrapped] = ORTModule.__dict__["_ort"].__get__
"""Returns the `Wrapped` of an ORTModule: a slot read past `__getattribute__`, which would look at the module."""

_DATA_PARALLEL = (
    "ORTModule cannot be used with torch.nn.DataParallel, which copies the module in each call; "
    "use torch.nn.parallel.DistributedDataParallel(ORTModule(module))"
)

_RETURN_SELF = (
    "apply", "bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "ipu", "mtia", "requires_grad_",
    "share_memory", "to", "to_empty", "train", "type", "xpu",
)  # fmt: skip
"""Methods of torch.nn.Module that return `self`: those of an ORTModule return the ORTModule."""

_OWN_NAMES = ("module", "report", "export_training_graph")
"""Public names that an ORTModule adds to those of the wrapped module."""

_NOT_OWN = frozenset({"__annotations__", "__doc__", "__init__", "__module__", "__slots__"})
"""Names in every class body. Looked up on an ORTModule they mean the wrapped module's, e.g. its `__doc__`."""


ORTModule._ort_own = frozenset(vars(ORTModule)) - _NOT_OWN


def _bound(self: ORTModule, wrapped: Wrapped, name: str, method: MethodType) -> Any:
    """Returns a bound method of the wrapped module as a method of the ORTModule."""
    # The user's own methods get the ORTModule as `self`, so that `self(x)` in them runs in ONNX Runtime. PyTorch's get
    # the module: they read `_parameters` and the like.
    of_torch = hasattr(torch.nn.Module, name) or method.__module__.startswith("torch.")
    if not of_torch:
        return MethodType(method.__func__, self) if wrapped.binds_methods else _returning(self, method)
    if name in _RETURN_SELF or not hasattr(torch.nn.Module, name):
        return _returning(self, method)
    return method


def _returning(self: ORTModule, method: MethodType) -> Callable[..., Any]:
    """Returns a method that returns the ORTModule where it would return the wrapped module."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return self if result is method.__self__ else result

    return call


def _blank(cls: type[ORTModule]) -> ORTModule:
    """Returns an ORTModule that holds no module yet, for copying and unpickling."""
    blank: ORTModule = object.__new__(cls)
    return blank


def _adopt(self: ORTModule, state: tuple[torch.nn.Module, DebugOptions]) -> None:
    """Makes an ORTModule hold a module, with options; it changes the class of the ORTModule."""
    module, options = state
    hidden = [name for name in _OWN_NAMES if hasattr(module, name)]
    # `ORTModule.module` gives what DistributedDataParallel's gives.
    if isinstance(module, DistributedDataParallel):
        hidden.remove("module")
    if hidden:
        kind = type(module).__name__
        warnings.warn(
            f"ORTModule: {kind} has {' and '.join(map(repr, hidden))}, which ORTModule has too: reach it by "
            f"model.module.{hidden[0]}. The methods of {kind} that are not torch.nn.Module's now run on the "
            "wrapped module: what they call of it runs in PyTorch",
            stacklevel=3,
        )
    object.__setattr__(self, "_ort", Wrapped(module, options, binds_methods=not hidden))
    own, users = cast(type, type(self)), cast(type, type(module))
    object.__setattr__(self, "__class__", class_for(own, users))


def _unwrap(module: object) -> torch.nn.Module:
    """Returns the module to wrap; raises for what cannot be wrapped."""
    # `isinstance` would ask `__class__`, which an ORTModule answers as the wrapped module does.
    if type(module).__mro__.count(ORTModule):
        return _of(cast(ORTModule, module)).module
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
