"""Captures a module with Dynamo, with settings that make Dynamo capture the whole module, and only once."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, MethodType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from onnxtrain.ortmodule._torch import (
    ConvertFrameReturn,
    FrameAction,
    FrameExecStrategy,
    InternalTorchDynamoError,
    TorchRuntimeError,
    dynamo_config,
    dynamo_optimize,
    isolates_recompiles,
    trace_rules,
)
from onnxtrain.ortmodule.capture._break_even import BreakEven
from onnxtrain.ortmodule.capture._errors import RefusedByPyTorch, SymbolicBatchRefused
from onnxtrain.ortmodule.capture._modes import settings_restored_on_error
from onnxtrain.ortmodule.capture._nodes import without_messages
from onnxtrain.ortmodule.capture.dynamo._batch_axis import symbolic_batch
from onnxtrain.ortmodule.capture.dynamo._calling import captured_call
from onnxtrain.ortmodule.capture.dynamo._captures import Captures
from onnxtrain.ortmodule.capture.dynamo._fast_path import without_fast_path
from onnxtrain.ortmodule.capture.dynamo._repeated_captures import RepeatedCaptures
from onnxtrain.ortmodule.capture.dynamo.patches import patched
from onnxtrain.ortmodule.capture.dynamo.patches._asserted_numbers import AssertedNumber, asserted_numbers
from onnxtrain.ortmodule.capture.dynamo.patches._missing_fakes import missing_fakes
from onnxtrain.ortmodule.capture.dynamo.speedups import Speedups, without_unused_imports

# After a graph break in a container each layer is captured separately, and layers of one class share one function.
_RECOMPILE_LIMIT = 256
"""Number of graphs per function after which Dynamo runs the function in PyTorch."""


def capture(
    module: torch.nn.Module, backend: Callable[..., Any], break_even: BreakEven
) -> Callable[..., Any]:
    """Returns a callable equivalent to `module(*args, **kwargs)` that runs graphs compiled by `backend`.

    Args:
        module: the module.
        backend: compiles a captured graph.
        break_even: estimates whether another capture pays off.
    """
    settings = dict(_SETTINGS)
    # By default Dynamo (PyTorch 2.13) runs LSTM, GRU and RNN in PyTorch, without a warning
    # (https://github.com/pytorch/pytorch/issues/141184).
    if any(isinstance(layer, torch.nn.RNNBase) for layer in module.modules()):
        settings["allow_rnn"] = True
    _inline_layers()
    # The module itself is not passed to Dynamo: its OptimizedModule would call global hooks a second time. The module's
    # own hooks run as in eager PyTorch, because `_call_impl` is not captured, only the `forward` that it calls.
    overrides_call = type(module).__call__ is not torch.nn.Module.__call__
    function = MethodType(type(module).__call__, module) if overrides_call else module._call_impl
    # The limit is per compiled function. Otherwise a model would run in PyTorch if other models of its class had many
    # graphs.
    with without_unused_imports():
        context: Any = dynamo_optimize(backend, _RECOMPILE_LIMIT)
    # With TORCHDYNAMO_DISABLE=1 the context has no callback.
    if callable(getattr(context, "callback", None)):
        captures = Captures(backend)
        context.callback = _Callback(context.callback, settings, captures, break_even)
        weakref.finalize(context.callback, captures.release).atexit = False
    return without_fast_path(module, captured_call(context, function))


_SETTINGS = {
    # By default hooks are not guarded: a hook that is registered after the first call would not run.
    "skip_nnmodule_hook_guards": False,
    # By default `numpy.random` in a captured function draws from PyTorch's generator, and ignores NumPy's seed.
    "use_numpy_random_stream": True,
    # Dynamo counts over all models of a class. Beyond the limit it runs the next model in PyTorch, without a warning.
    "accumulated_recompile_limit": sys.maxsize,
    # Profiler marks take time in each call.
    "record_runtime_overhead": False,
} | ({} if isolates_recompiles else {"recompile_limit": _RECOMPILE_LIMIT})

if hasattr(dynamo_config, "invalidate_compile_context_weakrefs"):
    # For backends that are not registered by name, Dynamo (PyTorch 2.13) keeps weak references to parameters. These
    # prevent `set_swap_module_params_on_conversion(True)` from swapping the parameters in `model.double()`.
    _SETTINGS["invalidate_compile_context_weakrefs"] = True


# ONNX computes sizes at run time: `x[mask]` and `int(counter)` need not break the graph, as they do by default.
_DATA_DEPENDENT = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
_PYTHON_ASSERTS = {"rewrite_assert_with_torch_assert": False}


# TorchRuntimeError and IndexError are Dynamo's (PyTorch 2.13).
_OPERATOR_ERRORS = (TorchRuntimeError, RefusedByPyTorch, IndexError)
"""Exceptions that a capture raises if PyTorch rejects the arguments of an operator."""


@dataclasses.dataclass
class _Call:
    """A call to an ORTModule during which functions are captured.

    Attributes:
        number: number of calls to the ORTModule so far, including this call.
        speedups: state that the captures of this call share.
    """

    number: int
    speedups: Speedups = dataclasses.field(default_factory=Speedups)


class _Callback:
    """Wraps Dynamo's callback, which captures a frame, to use ORTModule's settings and patches.

    Args:
        callback: Dynamo's own callback.
        settings: names and values of `torch._dynamo.config`, e.g. {"allow_rnn": True}.
        captures: records the captured code objects.
        break_even: estimates whether another capture of a function pays off.

    Attributes:
        repeated_captures: decides which functions are no longer captured. `_Captured.run` increments its `calls`.
    """

    def __init__(
        self, callback: Any, settings: dict[str, Any], captures: Captures, break_even: BreakEven
    ) -> None:
        self._callback = callback
        self._settings = settings
        self._captures = captures
        self._break_even = break_even
        self._missed: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()
        self.repeated_captures = RepeatedCaptures()
        self._call = _Call(0)
        # Dynamo reads this attribute of its callbacks.
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if self._waits(frame.f_code):
            return ConvertFrameReturn(
                FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False
            )
        if self.repeated_captures.record(frame.f_code, frame.f_locals):
            return ConvertFrameReturn(apply_to_code=False)
        self._captures.add(frame.f_code)
        # The state recorded by captures of another call may be invalid for the arguments of this call.
        if self._call.number != self.repeated_captures.calls:
            self._call = _Call(self.repeated_captures.calls)
        with dynamo_config.patch(self._settings), patched():
            try:
                return self._call.speedups.run(self._captured_with_any_batch, frame, *args, **kwargs)
            except _OPERATOR_ERRORS:
                # PyTorch rejects the arguments of an operator. Python runs the function, once, and raises the error:
                # the function may handle it, and statements before it must not run twice.
                return ConvertFrameReturn(apply_to_code=False)

    def _waits(self, code: CodeType) -> bool:
        """True if PyTorch should run a function in this call because another capture doesn't pay off yet.

        Counts the calls in which no graph of the function is valid. False if the function has no graphs yet.
        """
        # A function may need several graphs in one call, e.g. the forward of layers of one class.
        if self.repeated_captures.needs_capture(code) or not self._captures.has_graphs(code):
            return False
        missed = self._missed[code] = self._missed.get(code, 0) + 1
        if missed <= self._break_even.calls:
            self._break_even.in_pytorch = True
            self.repeated_captures.wait(code)
            return True
        del self._missed[code]
        return False

    # Each of the following methods makes several attempts, with ever fewer symbols.

    def _captured_with_any_batch(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        """Captures a frame, with a symbolic batch size if possible, or leaves it to PyTorch if Dynamo fails."""
        try:
            with symbolic_batch(frame.f_locals):
                return self._captured_with_data_dependent_sizes(frame, *args, **kwargs)
        # A function that takes numbers only may reject a symbol.
        except (SymbolicBatchRefused, InternalTorchDynamoError, *_OPERATOR_ERRORS):
            pass
        return self._captured_with_fixed_batch(frame, *args, **kwargs)

    def _captured_with_fixed_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Captures a frame with symbols only for sizes that have changed, or leaves it to PyTorch if Dynamo fails."""
        try:
            return self._captured_with_data_dependent_sizes(*args, **kwargs)
        except InternalTorchDynamoError:
            # Some Python functions require a number where Dynamo has a symbol from the second shape on, e.g.
            # `random.Random(len(x))`. With fixed sizes each shape has its own graph.
            pass
        try:
            with dynamo_config.patch(automatic_dynamic_shapes=False), _without_advice():
                return self._attempt(*args, **kwargs)
        except InternalTorchDynamoError:
            return ConvertFrameReturn()

    def _captured_with_data_dependent_sizes(self, *args: Any, **kwargs: Any) -> Any:
        """Captures a frame with symbols for data-dependent sizes and numbers, or without them if that fails."""
        try:
            try:
                with dynamo_config.patch(_DATA_DEPENDENT), missing_fakes(), asserted_numbers():
                    return self._attempt(*args, **kwargs)
            except AssertedNumber:
                # Python executes the `assert` statements of the function: each breaks the graph.
                with dynamo_config.patch(_DATA_DEPENDENT | _PYTHON_ASSERTS), missing_fakes():
                    return self._attempt(*args, **kwargs)
        except InternalTorchDynamoError:
            # Dynamo (PyTorch 2.13) fails for an unused data-dependent size, e.g. of `x[mask, index]`, for a
            # data-dependent size that moves to another axis in place, and for Python functions that require a number,
            # e.g. `itertools.repeat(x, count)`.
            pass
        except GuardOnDataDependentSymNode:
            # Python branches on a data-dependent number in a way for which Dynamo (PyTorch 2.13) doesn't break the
            # graph, unlike for `if count > 2`: `if count`, `count or 1`, `names[count]`.
            pass
        except _OPERATOR_ERRORS:
            # Perhaps the operator takes the number that `item()` returns, but not Dynamo's symbol for it, as in
            # `x[:, x[0].argmax().item()]`. Without such symbols `item()` breaks the graph.
            pass
        with _without_advice():
            return self._attempt(*args, **kwargs)

    def _attempt(self, *args: Any, **kwargs: Any) -> Any:
        """Captures a frame with Dynamo; raises if that fails."""
        # Dynamo switches some modes while it traces a function, e.g. saved-tensor hooks in `torch.func.grad`.
        with settings_restored_on_error(), self._call.speedups.attempt():
            return self._callback(*args, **kwargs)


def _without_advice() -> Any:
    """Suppresses Dynamo's advice to set `capture_scalar_outputs`, which ORTModule has disabled for this attempt."""
    return without_messages("torch._dynamo.variables.tensor", "Graph break from `Tensor.item()`")


def _inline_layers() -> None:
    """Lets Dynamo capture PyTorch's own layers when no captured function calls them, for the rest of the process.

    By default Dynamo (PyTorch 2.13) captures the `forward` of such a layer only by inlining it into a captured caller.
    A Sequential that is called directly, and the layers of a Sequential with a graph break, run in PyTorch, without a
    warning. The setting stays on after the capture: if it were switched off and other compiled code called a layer,
    Dynamo would mark the layer's code as skipped, and ORTModule could no longer capture it.
    """
    base = Path(inspect.getfile(torch.nn.Module))  # contains the code that calls hooks, and no layer
    layers = [path.as_posix() for path in base.parent.glob("*.py") if path.name != base.name]
    trace_rules.get_legacy_mod_inlinelist().update(layers)
