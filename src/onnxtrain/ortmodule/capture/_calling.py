"""The call of a function that Dynamo captures: what Dynamo's own wrapper does each time, less what only others need.

That wrapper serves exports, `fullgraph`, stances and more; asking for all of them costs a small model's call a tenth of
its time. Where any of them is in use the wrapper itself is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._torch import (
    ForceDispatchKeyGuard,
    GenerationTracker,
    ShortenTraceback,
    TracingContext,
    UncapturedHigherOrderOpError,
    Unsupported,
    UserError,
    current_trace,
    eval_frame,
    install_generation_tagging_init,
    set_eval_frame,
    set_isolated_recompiles,
)

_tracing = TracingContext.try_get
_includes = _torch.dispatch_keys_included
_excludes = _torch.dispatch_keys_excluded
_transforms = _torch.get_dynamic_layer_stack_depth
_leave_transforms = _torch.pop_dynamic_layer_stack_and_undo_to_depth


def captured_call(context: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` as Dynamo captures it.

    Args:
        context: what `torch._dynamo.optimize` returns.
        function: the function, or method.
    """
    compiled: Callable[..., Any] = context(function)
    switched_on = isinstance(
        context, eval_frame.OptimizeContext
    )  # TORCHDYNAMO_DISABLE leaves functions as they are
    if not switched_on or context.fullgraph or len(context.enter_exit_hooks) > 1:
        return compiled
    if set_isolated_recompiles is None:
        return compiled
    return _Captured(compiled, context, set_isolated_recompiles).run


class _Captured:
    def __init__(self, compiled: Any, context: Any, isolate: Callable[[int], int]) -> None:
        self._compiled: Callable[..., Any] = compiled
        self._function: Callable[..., Any] = compiled._torchdynamo_orig_callable
        self._callback = context.callback
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
            or _tracing() is not None
        ):
            return self._compiled(*args, **kwargs)
        prior = set_eval_frame(None)
        depth = _transforms()
        recompiles = self._isolate(self._recompiles)
        GenerationTracker.generation += 1  # modules made since are no part of the call
        try:
            with ForceDispatchKeyGuard(_includes(), _excludes()):
                set_eval_frame(self._callback)
                return self._function(*args, **kwargs)
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
    """Lets the code that Dynamo is making call what a backend returns without a wrapper in between.

    Dynamo wraps it in `torch.compiler.disable`, as :func:`without_capture` does with less ado, and puts it in the
    globals of that code. Here the wrapper is exchanged when the capture ends.

    Args:
        run: what the backend is about to return to Dynamo.
    """
    trace = current_trace()
    if trace is None:  # the backend is called by someone else
        return

    def unwrap() -> None:
        for name, value in list(trace.global_scope.items()):
            of_dynamo = name.startswith("__compiled_fn")
            if of_dynamo and getattr(value, "_torchdynamo_orig_callable", None) is run:
                trace.global_scope[name] = without_capture(run)

    trace.add_cleanup_hook(unwrap)


def without_capture(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that Dynamo does not look into, nor into what it calls.

    As `torch.compiler.disable` does it, which also asks about exports and stances in each call.
    """

    @_torch.skip
    def call(*args: Any) -> Any:
        prior = set_eval_frame(None)
        try:
            return function(*args)
        finally:
            set_eval_frame(prior)

    return call
