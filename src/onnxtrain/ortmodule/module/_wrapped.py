"""Defines the state of an ORTModule: the wrapped module, its options and report, and its compiled calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from onnxtrain.ortmodule._exceptions import ORTModuleTorchModelException
from onnxtrain.ortmodule._options import DebugOptions
from onnxtrain.ortmodule._report import Report
from onnxtrain.ortmodule.capture._break_even import BreakEven
from onnxtrain.ortmodule.module._engine import compile_module
from onnxtrain.ortmodule.module._pytorch_work import being_traced, has_hooks, watched
from onnxtrain.ortmodule.sessions._export import CompiledGraphs


class Wrapped:
    """The state of an ORTModule. The wrapped module is compiled lazily, in its first call.

    Attributes:
        module: the user's module.
        options: what to log and save, and which graphs may fall back to PyTorch.
        report: a record of each captured graph, filled by the engine.
        graphs: the graphs that ONNX Runtime runs, filled by the engine.
        call: calls the compiled module; equivalent to `module(*args, **kwargs)`.
        binds_methods: True if `self` is the ORTModule in methods of the module's class.
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
        # During a trace, `torch.compile` returns the module unchanged, and `call` would stay uncompiled forever.
        if being_traced():
            return self.module(*args, **kwargs)
        _refuse_partitioned(self.module)
        self.call = self._compile(self.module)
        if any(_is_lazy(layer) for layer in self.module.modules()):
            # PyTorch runs the first call of a lazy module: it draws the parameters when the call reaches their layer,
            # after the random numbers of the layers before it. Dynamo would draw them first, and then put the generator
            # back.
            return self.module(*args, **kwargs)
        return self.call(*args, **kwargs)

    # The first call may come from a module that is being captured, whose capture must not include the compilation.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compile(self, module: torch.nn.Module) -> Callable[..., Any]:
        break_even = BreakEven(not self.options.capture_all)
        compiled = compile_module(module, self.options, self.report, self.graphs, break_even)
        return watched(compiled, module, self.report, self.options.fallback_policy, break_even)

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a forward function of the module in ONNX Runtime, without the module's own hooks.

        Args:
            function: `module.forward`, or a function that replaces it.
            *args: positional arguments for `function`.
            **kwargs: keyword arguments for `function`.
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
    """Raises ORTModuleTorchModelException if DeepSpeed's ZeRO stage 3 has partitioned the parameters."""
    # DeepSpeed (0.19) gathers such parameters in hooks of each layer and in patches of PyTorch functions. A captured
    # layer would read the partitioned parameters, which are empty tensors.
    names = [name for name, parameter in module.named_parameters() if hasattr(parameter, "ds_id")]
    if names:
        raise ORTModuleTorchModelException(
            f"capturing {type(module).__name__}: ZeRO stage 3 of DeepSpeed has partitioned its parameters "
            f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}). Use stage 1 or 2, or shard by PyTorch: "
            "ORTModule(fully_shard(module)), see docs/pytorch/with-other-tools.md"
        )


def _is_lazy(layer: torch.nn.Module) -> bool:
    """True if a layer, e.g. LazyLinear, has uninitialized parameters."""
    return isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params()


class BoundForward:
    """`model.forward` of an ORTModule: like the wrapped module's bound method, but runs in ONNX Runtime.

    Args:
        wrapped: the state of the ORTModule.
    """

    # `inspect.signature` follows `__wrapped__`. transformers' Trainer drops dataset columns that are not
    # arguments of `model.forward`.

    def __init__(self, wrapped: Wrapped) -> None:
        self._wrapped = wrapped
        self.__wrapped__: Callable[..., Any] = wrapped.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The module's forward may be a wrapper around this method, which is just being captured.
        if torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        return self._wrapped.forward(self.__wrapped__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Not yet set while the object is copied or unpickled: the lookup below would recurse forever.
        if name in ("_wrapped", "__wrapped__"):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        return f"<ORTModule forward of {self.__wrapped__!r}>"


class _WithoutHooks(torch.nn.Module):
    """A module that calls a forward function of another module, without that module's own hooks.

    Args:
        module: the other module.
        function: the forward function.
    """

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.function = function
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    # Global module hooks must not run for this module.
    _call_impl = forward
    __call__ = forward
