"""Calls captured functions and compiled graphs with less overhead than Dynamo's own wrappers.

Dynamo's wrapper (PyTorch 2.13) checks in each call for exports, `fullgraph`, stances and more, which takes 10% of the
time of a small model's call. If one of these features is in use, Dynamo's wrapper is called instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._torch import (
    GenerationTracker,
    ShortenTraceback,
    UncapturedHigherOrderOpError,
    Unsupported,
    UserError,
    current_trace,
    eval_frame,
    install_generation_tagging_init,
    set_eval_frame,
    set_isolated_recompiles,
)
from onnxtrain.ortmodule.capture.dynamo._repeated_captures import RepeatedCaptures

_guards_of_thread = _torch.guards_of_thread
_transforms = _torch.get_dynamic_layer_stack_depth
_leave_transforms = _torch.pop_dynamic_layer_stack_and_undo_to_depth


def captured_call(context: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function`: Dynamo captures it on the first call, and later calls run the captured graphs.

    Args:
        context: the OptimizeContext that `torch._dynamo.optimize` returns.
        function: a function or method.
    """
    compiled: Callable[..., Any] = context(function)
    # With TORCHDYNAMO_DISABLE=1 the context has another type and returns functions unchanged.
    switched_on = isinstance(context, eval_frame.OptimizeContext)
    if not switched_on or context.fullgraph or len(context.enter_exit_hooks) > 1:
        return compiled
    # PyTorch before 2.13 lacks this function: Dynamo's wrapper is used.
    if set_isolated_recompiles is None:
        return compiled
    return _Captured(compiled, context, set_isolated_recompiles).run


class _Captured:
    """Calls a captured function with less overhead than `OptimizeContext`, Dynamo's wrapper (PyTorch 2.13).

    Under a stance other than the default, or within a trace, Dynamo's wrapper is called instead.

    Args:
        compiled: Dynamo's wrapper of the function.
        context: the OptimizeContext that created the wrapper.
        isolate: sets the id of the compiled function that the next calls belong to; returns the previous id.
    """

    def __init__(self, compiled: Any, context: Any, isolate: Callable[[int], int]) -> None:
        self._compiled: Callable[..., Any] = compiled
        self._function: Callable[..., Any] = compiled._torchdynamo_orig_callable
        self._callback = context.callback
        self._repeated_captures: RepeatedCaptures = context.callback.repeated_captures
        self._recompiles = context._isolate_recompiles_id
        self._isolate = isolate
        install_generation_tagging_init()

    @_torch.skip
    def run(self, *args: Any, **kwargs: Any) -> Any:
        stance = eval_frame._stance
        if (
            stance.stance != "default"
            or stance.backend
            or stance.skip_guard_eval_unsafe
            or getattr(_guards_of_thread, "tracing_context", None) is not None
        ):
            return self._compiled(*args, **kwargs)
        self._repeated_captures.calls += 1
        prior = set_eval_frame(None)
        depth = _transforms()
        recompiles = self._isolate(self._recompiles)
        # Otherwise Dynamo would treat modules created since the last call as modules created during this call.
        GenerationTracker.generation += 1
        # Dynamo's wrapper also restores the dispatch keys, which takes 2 us. An error in a captured graph restores the
        # modes that set them (`restoring_modes`), and after a return the caller's modes are those of eager PyTorch.
        try:
            set_eval_frame(self._callback)
            return self._function(*args, **kwargs)
        # As in Dynamo's wrapper: frames of Dynamo's own code in a traceback don't help the user.
        except (Unsupported, UncapturedHigherOrderOpError, UserError) as error:
            raise error.with_traceback(None) from error.__cause__
        except ShortenTraceback as error:
            raise error.remove_dynamo_frames() from None
        finally:
            set_eval_frame(None)
            _leave_transforms(depth)
            self._isolate(recompiles)
            set_eval_frame(prior)


def call_directly(run: Callable[..., Any]) -> None:
    """Makes Dynamo's generated code call a compiled graph without Dynamo's wrapper, which is slower.

    Args:
        run: the compiled graph, which the backend is about to return to Dynamo.
    """
    trace = current_trace()
    # None if the backend is not called by Dynamo.
    if trace is None:
        return

    # Dynamo (PyTorch 2.13) wraps the backend's result in `torch.compiler.disable`, and stores the wrapper in the
    # globals of the generated code as `__compiled_fn_<number>`. A call of the wrapper takes some microseconds longer
    # than a call of `without_capture(run)`. Dynamo calls this hook at the end of the capture, when the wrapper exists.

    def unwrap() -> None:
        for name, value in list(trace.global_scope.items()):
            of_dynamo = name.startswith("__compiled_fn")
            if of_dynamo and getattr(value, "_torchdynamo_orig_callable", None) is run:
                trace.global_scope[name] = without_capture(run)

    trace.add_cleanup_hook(unwrap)


def without_capture(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function` so that Dynamo captures neither it nor the functions that it calls.

    `torch.compiler.disable` does the same, but checks for exports and stances in each call.
    """

    @_torch.skip
    def call(*args: Any) -> Any:
        prior = set_eval_frame(None)
        try:
            return function(*args)
        finally:
            set_eval_frame(prior)

    return call
