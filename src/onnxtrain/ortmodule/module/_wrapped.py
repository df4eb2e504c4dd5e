"""Hold what an ORTModule wraps: a module, its options and report, and its compiled calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from onnxtrain.ortmodule._exceptions import ORTModuleTorchModelException
from onnxtrain.ortmodule._options import DebugOptions
from onnxtrain.ortmodule._report import Report
from onnxtrain.ortmodule._torch import dynamo_config
from onnxtrain.ortmodule.module._engine import compile_module
from onnxtrain.ortmodule.module._pytorch_work import being_traced, has_hooks, watched
from onnxtrain.ortmodule.sessions._export import CompiledGraphs


class Wrapped:
    """A module with its options and report, which is compiled when it is first called.

    Attributes:
        module: the user's module.
        options: what to log and save, and which graphs may fall back to PyTorch.
        report: a record of each captured graph; the engine fills it.
        graphs: the graphs that ONNX Runtime runs; the engine fills it.
        call: does what `module(*args, **kwargs)` does.
        binds_methods: True if methods of the user's class get the ORTModule as their `self`.
    """

    def __init__(self, module: torch.nn.Module, options: DebugOptions, binds_methods: bool) -> None:
        self.module = module
        self.options = options
        self.report = Report()
        self.graphs = CompiledGraphs()
        self.binds_methods = binds_methods
        self.call: Callable[..., Any] = self._first_call
        self._forward: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        # Under a trace `torch.compile` returns the module as it is: `call` would stay uncompiled for good.
        if being_traced():
            return self.module(*args, **kwargs)
        _refuse_partitioned(self.module)
        self.call = self._compile(self.module)
        if any(_is_lazy(layer) for layer in self.module.modules()):
            # Dynamo gives lazy parameters their shapes when it captures the first call. A size that varied in another
            # model of the process would be symbolic there, which no parameter can be made of.
            with dynamo_config.patch(automatic_dynamic_shapes=False):
                return self.call(*args, **kwargs)
        return self.call(*args, **kwargs)

    # The first call may come from a module that is being captured: what follows is no part of that.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compile(self, module: torch.nn.Module) -> Callable[..., Any]:
        compiled = compile_module(module, self.options, self.report, self.graphs)
        return watched(compiled, module, self.report, self.options.fallback_policy)

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a forward of the module in ONNX Runtime, without the hooks of the module itself.

        Args:
            function: `module.forward`, or the forward that the user has put in its place.
            *args: of the call.
            **kwargs: of the call.
        """
        # Without hooks `forward` and `__call__` do the same, so one set of graphs serves both.
        if function == self.module.forward and not has_hooks(self.module):
            return self.call(*args, **kwargs)
        if being_traced():
            return function(*args, **kwargs)
        if self._forward is None or self._forward[0] != function:
            caller = _WithoutHooks(self.module, function)
            self._forward = (function, self._compile(caller))
        return self._forward[1](*args, **kwargs)


def _refuse_partitioned(module: torch.nn.Module) -> None:
    """Raises ORTModuleTorchModelException for parameters that ZeRO stage 3 of DeepSpeed has partitioned."""
    # DeepSpeed (0.19) gathers them in hooks of each layer and in functions that it puts in PyTorch's place. A captured
    # layer would read what is left of them: empty tensors.
    names = [name for name, parameter in module.named_parameters() if hasattr(parameter, "ds_id")]
    if names:
        raise ORTModuleTorchModelException(
            f"capturing {type(module).__name__}: ZeRO stage 3 of DeepSpeed has partitioned its parameters "
            f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}). Use stage 1 or 2, or shard by PyTorch: "
            "ORTModule(fully_shard(module)), see docs/many-machines.md"
        )


def _is_lazy(layer: torch.nn.Module) -> bool:
    """True if a layer, e.g. LazyLinear, has parameters without a shape yet."""
    return isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params()


class BoundForward:
    """`model.forward`, as the wrapped module's bound method, but run by ONNX Runtime.

    Args:
        wrapped: what the ORTModule holds.
    """

    # `inspect.signature` follows `__wrapped__`: the Trainer of transformers drops columns of a data set that are no
    # arguments of `model.forward`.

    def __init__(self, wrapped: Wrapped) -> None:
        self._wrapped = wrapped
        self.__wrapped__: Callable[..., Any] = wrapped.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A wrapper around this method may itself have become the module's forward, and be captured just now.
        if torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        return self._wrapped.forward(self.__wrapped__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Not set yet, while the object is copied or unpickled: to look them up here would not end.
        if name in ("_wrapped", "__wrapped__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        return f"<ORTModule forward of {self.__wrapped__!r}>"


class _WithoutHooks(torch.nn.Module):
    """A module that calls the forward of another one, so that only hooks of submodules run.

    Args:
        module: the other module.
        function: its forward.
    """

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.function = function
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    # Global hooks, which see every module, must not see this one.
    _call_impl = forward
    __call__ = forward
