"""Capture a module by Dynamo, with settings under which all of it is captured, and only once."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from onnxtrain._building import with_room, without_older_objects
from onnxtrain.ortmodule._torch import (
    ConvertFrameReturn,
    InternalTorchDynamoError,
    TorchRuntimeError,
    dynamo_config,
    dynamo_optimize,
    isolates_recompiles,
    skip,
    trace_rules,
)
from onnxtrain.ortmodule.capture.autograd._refused_calls import RefusedByPyTorch
from onnxtrain.ortmodule.capture.dynamo._batch_axis import SymbolRefused, batch_axis_as_symbol
from onnxtrain.ortmodule.capture.dynamo._calling import captured_call
from onnxtrain.ortmodule.capture.dynamo._captures import Captures, without_tracebacks_in_metrics
from onnxtrain.ortmodule.capture.dynamo._hook_guards import without_covered_hook_guards
from onnxtrain.ortmodule.capture.dynamo._in_vain import CapturesInVain
from onnxtrain.ortmodule.capture.dynamo._known_breaks import KnownBreaks, ending_before
from onnxtrain.ortmodule.capture.dynamo._measurements import without_unread_measurements
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide
from onnxtrain.ortmodule.capture.dynamo.patches._caught_errors import without_caught_errors
from onnxtrain.ortmodule.capture.dynamo.patches._containers import as_python_contains
from onnxtrain.ortmodule.capture.dynamo.patches._id_guards import guarded_objects_are_kept
from onnxtrain.ortmodule.capture.dynamo.patches._inactive_dropout import inactive_dropout_returns_its_input
from onnxtrain.ortmodule.capture.dynamo.patches._missing_fakes import data_dependent_results, without_advice
from onnxtrain.ortmodule.capture.dynamo.patches._module_integers import changed_integers_are_symbols
from onnxtrain.ortmodule.capture.dynamo.patches._random_objects import random_objects_draw_in_python
from onnxtrain.ortmodule.capture.graph._assertions import AssertedNumber, without_asserted_numbers

# After a graph break in a container each layer is captured by itself, and layers of one class share one function.
_RECOMPILE_LIMIT = 256
"""Graphs of one function after which Dynamo runs it in PyTorch."""


def capture(module: torch.nn.Module, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a callable that does what `module(*args, **kwargs)` does, and has `backend` compile its graphs."""
    settings = dict(_SETTINGS)
    # By default Dynamo (PyTorch 2.13) skips LSTM, GRU and RNN, which would run in PyTorch without a word.
    if any(isinstance(layer, torch.nn.RNNBase) for layer in module.modules()):
        settings["allow_rnn"] = True
    _enter_layers()
    # Not the module itself, whose OptimizedModule would fire global hooks a second time. Hooks of the module are
    # called as ever, since _call_impl is not captured, only the forward that it calls.
    overrides_call = type(module).__call__ is not torch.nn.Module.__call__
    function = MethodType(type(module).__call__, module) if overrides_call else module._call_impl
    # With a limit of its own: else a model would run in PyTorch because others of its class had many graphs.
    context: Any = dynamo_optimize(backend, _RECOMPILE_LIMIT)
    # With TORCHDYNAMO_DISABLE=1 the context has no callback.
    if callable(getattr(context, "callback", None)):
        captures = Captures(backend)
        context.callback = _WithSettings(context.callback, settings, captures)
        weakref.finalize(context.callback, captures.release).atexit = False
    compiled = captured_call(context, function)
    if any(isinstance(layer, _WITH_FAST_PATH) for layer in module.modules()):
        return _WithoutFastPath(compiled).run
    return compiled


_SETTINGS = {
    # Hooks are not guarded by default: one that comes after the first call would not run.
    "skip_nnmodule_hook_guards": False,
    # Else `numpy.random` in a captured function draws from PyTorch's generator, whatever seed NumPy has.
    "use_numpy_random_stream": True,
    # Counted over all models of a class. Past the limit Dynamo runs the next one in PyTorch, and tells nobody.
    "accumulated_recompile_limit": sys.maxsize,
    # A mark in profiles that takes time in each call.
    "record_runtime_overhead": False,
} | ({} if isolates_recompiles else {"recompile_limit": _RECOMPILE_LIMIT})

if hasattr(dynamo_config, "invalidate_compile_context_weakrefs"):
    # Else (PyTorch 2.13) captures keep weak references to parameters, as for all backends that are not registered by
    # name, and `set_swap_module_params_on_conversion(True)` cannot swap them in `model.double()`.
    _SETTINGS["invalidate_compile_context_weakrefs"] = True


# ONNX computes sizes at run time: `x[mask]` and `int(counter)` need not end the graph as they do by default.
_DATA_DEPENDENT = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
_OWN_ASSERTIONS = {"rewrite_assert_with_torch_assert": False}


# Dynamo (PyTorch 2.13) raises the first and the last.
_OPERATOR_ERRORS = (TorchRuntimeError, RefusedByPyTorch, IndexError)
"""Exceptions of a capture in which PyTorch refuses the arguments of an operator."""


@dataclasses.dataclass
class _Call:
    """A call of an ORTModule that needs captures.

    Attributes:
        number: how many calls of the ORTModule have begun, this one included.
        captures: how many captures it has needed so far.
        breaks: notes in which calls of functions graphs have ended.
    """

    number: int
    captures: int = 0
    breaks: KnownBreaks = dataclasses.field(default_factory=KnownBreaks)


class _WithSettings:
    """Dynamo's callback that captures a frame, called with settings of ORTModule.

    Args:
        callback: Dynamo's own callback.
        settings: names and values of `torch._dynamo.config`, e.g. {"allow_rnn": True}.
        captures: notes the code objects that are captured.

    Attributes:
        in_vain: tells which functions are not captured any more; whoever calls the compiled function counts its calls.
    """

    def __init__(self, callback: Any, settings: dict[str, Any], captures: Captures) -> None:
        self._callback = callback
        self._settings = settings
        self._captures = captures
        self.in_vain = CapturesInVain()
        self._call = _Call(0)
        # Dynamo reads this attribute of its callbacks.
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if self.in_vain.are_over(frame.f_code, frame.f_locals):
            return ConvertFrameReturn(apply_to_code=False)
        self._captures.add(frame.f_code)
        # What captures of another call have noted may be wrong for the arguments of this one.
        if self._call.number != self.in_vain.calls:
            self._call = _Call(self.in_vain.calls)
        self._call.captures += 1
        is_cached = dynamo_config.fake_tensor_cache_enabled and self._call.captures <= _CACHED_CAPTURES
        with (
            without_older_objects(),
            dynamo_config.patch(self._settings | {"fake_tensor_cache_enabled": is_cached}),
            without_tracebacks_in_metrics(),
            without_unread_measurements(),
            inactive_dropout_returns_its_input(),
            without_caught_errors(),
            as_python_contains(),
            random_objects_draw_in_python(),
            guarded_objects_are_kept(),
            changed_integers_are_symbols(),
            without_covered_hook_guards(),
            ending_before(self._call.breaks),
        ):
            try:
                return with_room(self._captured_or_left, frame, *args, **kwargs)
            except _OPERATOR_ERRORS:
                # PyTorch refuses an operator. The function runs as it is, once, and meets the error itself: it may
                # catch it, and what ran before must not run again.
                return ConvertFrameReturn(apply_to_code=False)

    def _attempt(self, *args: Any, **kwargs: Any) -> Any:
        """Captures a frame by Dynamo, which may raise."""
        with self._call.breaks.attempt():
            return self._callback(*args, **kwargs)

    def _captured_or_left(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        """Captures a frame, or leaves it to PyTorch where Dynamo fails."""
        try:
            with batch_axis_as_symbol(frame.f_locals):
                return self._captured(frame, *args, **kwargs)
        # What takes a number may refuse the symbol that Dynamo has for a size.
        except (SymbolRefused, InternalTorchDynamoError, *_OPERATOR_ERRORS):
            pass
        return self._captured_by_number(frame, *args, **kwargs)

    def _captured_by_number(self, *args: Any, **kwargs: Any) -> Any:
        """Captures a frame, with symbols for sizes that have changed only, or leaves it to PyTorch."""
        try:
            return self._captured(*args, **kwargs)
        except InternalTorchDynamoError:
            # Some functions of Python want a number, not the symbol that Dynamo has for a size from the second shape
            # on: `random.Random(len(x))`. With sizes as numbers each shape has a graph of its own.
            pass
        try:
            with dynamo_config.patch(automatic_dynamic_shapes=False), without_advice():
                return self._attempt(*args, **kwargs)
        except InternalTorchDynamoError:
            return ConvertFrameReturn()

    def _captured(self, *args: Any, **kwargs: Any) -> Any:
        """Captures a frame with data-dependent sizes as symbols, or else without."""
        try:
            try:
                with (
                    dynamo_config.patch(_DATA_DEPENDENT),
                    data_dependent_results(),
                    without_asserted_numbers(),
                ):
                    return self._attempt(*args, **kwargs)
            except AssertedNumber:
                # The graph ends at each `assert` of the function, which Python executes.
                with dynamo_config.patch(_DATA_DEPENDENT | _OWN_ASSERTIONS), data_dependent_results():
                    return self._attempt(*args, **kwargs)
        except InternalTorchDynamoError:
            # Dynamo (PyTorch 2.13) fails at a size that nothing uses, as of `x[mask, index]`, at one that moves to
            # another axis in place, which it looks for on the axis where it was, and at functions of Python that want
            # a number: `itertools.repeat(x, count)`.
            pass
        except GuardOnDataDependentSymNode:
            # Python decides by a number of the data in a way at which Dynamo (PyTorch 2.13) does not end the graph, as
            # it does at `if count > 2`: `if count`, `count or 1`, `names[count]`.
            pass
        except _OPERATOR_ERRORS:
            # Perhaps an operator that takes the number that `item()` gives, but not the symbol that Dynamo has for it.
            # Without such symbols the graph ends at `item()`: `x[:, x[0].argmax().item()]`.
            pass
        with without_advice():
            return self._attempt(*args, **kwargs)


_CACHED_CAPTURES = 4
"""Captures of one call in which PyTorch keeps the shapes and dtypes that it has worked out for an operator.

Each capture starts with none of them. Where layers repeat this makes a capture up to a fifth shorter; where breaks end
graphs after a few operators, with symbols for sizes, it makes each a tenth to a fifth longer (PyTorch 2.13).
"""

_WITH_FAST_PATH = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)


class _WithoutFastPath:
    """Calls a compiled module with PyTorch's kernels for whole layers switched off.

    In inference eager PyTorch runs such a layer as one kernel, which ONNX lacks. The results are those of the layer's
    operators, but for padded positions: there `TransformerEncoder` returns zeros with the kernel.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @skip
    def run(self, *args: Any, **kwargs: Any) -> Any:
        with without_fast_path():
            return self._call(*args, **kwargs)


def _disable_fast_path() -> Callable[[], None]:
    """Switches the kernels off; returns the function that sets the switch as it was."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)


without_fast_path = ProcessWide(_disable_fast_path)
"""Keeps PyTorch from running a whole layer as one kernel while it is open."""


def _enter_layers() -> None:
    """Lets Dynamo capture the forward of PyTorch's own modules.

    By default they are captured only as parts of a caller. After a graph break inside of a Sequential its layers
    would run in PyTorch, as would a Sequential by itself, and no backend would ever hear of them. It stays so for the
    process: a layer that other compiled code skipped once would be skipped for good.
    """
    base = Path(inspect.getfile(torch.nn.Module))  # has no layer, but the code that calls hooks
    layers = [path.as_posix() for path in base.parent.glob("*.py") if path.name != base.name]
    trace_rules.get_legacy_mod_inlinelist().update(layers)
