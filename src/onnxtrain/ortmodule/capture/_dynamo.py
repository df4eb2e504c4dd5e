"""What ORTModule asks of Dynamo so that all of a module is captured, and only once."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from onnxtrain._building import with_room
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
from onnxtrain.ortmodule.capture._calling import captured_call
from onnxtrain.ortmodule.capture._captures import Captures, without_tracebacks_in_metrics
from onnxtrain.ortmodule.capture._data_dependent import data_dependent_results, without_advice
from onnxtrain.ortmodule.capture._inactive_dropout import inactive_dropout_returns_its_input
from onnxtrain.ortmodule.capture._mixed_dtypes import RefusedByPyTorch
from onnxtrain.ortmodule.capture._process_wide import ProcessWide

_RECOMPILE_LIMIT = 256
"""Graphs of one function: the layers after a graph break in a container share the forward of their class."""


def capture(module: torch.nn.Module, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a callable that does what `module(*args, **kwargs)` does, with `backend` for its graphs."""
    settings = dict(_SETTINGS)
    if any(isinstance(layer, torch.nn.RNNBase) for layer in module.modules()):
        settings["allow_rnn"] = True
    _enter_layers()
    # Not the module itself, whose OptimizedModule would fire global hooks a second time. Hooks of the module are
    # called as ever, since _call_impl is not captured, only the forward that it calls.
    own_call = type(module).__call__ is not torch.nn.Module.__call__
    function = MethodType(type(module).__call__, module) if own_call else module._call_impl
    # A model does not run in PyTorch because others of its class had many graphs.
    context: Any = dynamo_optimize(backend, _RECOMPILE_LIMIT)
    if callable(getattr(context, "callback", None)):  # not where Dynamo is switched off
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
    # A symbolic number has no place among ONNX attributes: another one captures another graph.
    "specialize_float": True,
    # Else `numpy.random` in a captured function draws from PyTorch's generator, whatever seed NumPy has.
    "use_numpy_random_stream": True,
    # Counted over all models of a class; past the limit Dynamo would run the next one in PyTorch without a word to us.
    "accumulated_recompile_limit": sys.maxsize,
    # A mark in profiles, whose making takes part of each call.
    "record_runtime_overhead": False,
} | ({} if isolates_recompiles else {"recompile_limit": _RECOMPILE_LIMIT})

if hasattr(dynamo_config, "invalidate_compile_context_weakrefs"):
    # Else (PyTorch 2.13) captures keep weak references to parameters, as for all backends that are not registered by
    # name, and `set_swap_module_params_on_conversion(True)` cannot swap them in `model.double()`.
    _SETTINGS["invalidate_compile_context_weakrefs"] = True


_DATA_DEPENDENT = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
"""What depends on the data has a size that depends on it, which ONNX computes like any other."""


_DATA_DEPENDENT_FAILURES = ("unbacked symbol", "Runtime assertion failed for expression")
"""Dynamo (2.13) fails at a size that goes unused, as of a mask beside an index, and at one that moves to another axis
in place, which it looks for on the axis where it was."""


_OPERATOR_ERRORS = (TorchRuntimeError, RefusedByPyTorch, IndexError)
"""What a capture raises where PyTorch refuses the arguments of an operator; Dynamo (2.13) raises the first and last."""


class _WithSettings:
    """What Dynamo calls to capture a frame, with settings of our own meanwhile."""

    def __init__(self, callback: Any, settings: dict[str, Any], captures: Captures) -> None:
        self._callback = callback
        self._settings = settings
        self._captures = captures
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend  # Dynamo asks for it

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        self._captures.add(frame.f_code)
        with (
            dynamo_config.patch(self._settings),
            without_tracebacks_in_metrics(),
            inactive_dropout_returns_its_input(),
        ):
            try:
                return with_room(self._captured, frame, *args, **kwargs)
            except _OPERATOR_ERRORS:
                # PyTorch refuses an operator. The function runs as it is, once, and meets the error itself: it may
                # catch it, and what ran before must not run again.
                return ConvertFrameReturn(apply_to_code=False)

    def _captured(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with dynamo_config.patch(_DATA_DEPENDENT), data_dependent_results():
                return self._callback(*args, **kwargs)
        except InternalTorchDynamoError as error:
            if not any(failure in str(error) for failure in _DATA_DEPENDENT_FAILURES):
                raise
        except _OPERATOR_ERRORS:
            # Perhaps an operator that takes the number that `item()` gives, but not the symbol that Dynamo has for it.
            # Without such symbols the graph ends at `item()`: `x[:, x[0].argmax().item()]`.
            pass
        with without_advice():
            return self._callback(*args, **kwargs)


_WITH_FAST_PATH = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)


class _WithoutFastPath:
    """Calls without the kernels that PyTorch has for whole layers in inference, and ONNX has not.

    They compute what the layers' operators compute, with one exception that eager PyTorch has between training and
    inference, too: at padded positions `TransformerEncoder` returns zeros.
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
