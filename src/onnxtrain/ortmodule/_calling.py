"""The call of a function that Dynamo captures: what Dynamo's own wrapper does each time, less what only others need.

That wrapper serves exports, `fullgraph`, stances and more; asking for all of them costs a small model's call a tenth of
its time. Where any of them is in use the wrapper itself is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame, set_eval_frame_isolate_recompiles_id
from torch._dynamo import eval_frame
from torch._dynamo.exc import ShortenTraceback, UncapturedHigherOrderOpError, Unsupported, UserError
from torch._dynamo.mutation_guard import GenerationTracker, install_generation_tagging_init
from torch._guards import TracingContext

__all__ = ["call_directly", "captured_call", "without_capture"]

_tracing = TracingContext.try_get
_includes = torch._C._dispatch_tls_local_include_set
_excludes = torch._C._dispatch_tls_local_exclude_set
_DispatchKeys = torch._C._ForceDispatchKeyGuard
_transforms = torch._C._functorch.get_dynamic_layer_stack_depth
_leave_transforms = torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth


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
    return _Captured(compiled, context).run


class _Captured:
    def __init__(self, compiled: Any, context: Any) -> None:
        self._compiled: Callable[..., Any] = compiled
        self._function: Callable[..., Any] = compiled._torchdynamo_orig_callable
        self._callback = context.callback
        self._recompiles = context._isolate_recompiles_id
        install_generation_tagging_init()

    @torch._dynamo.decorators.skip
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
        recompiles = set_eval_frame_isolate_recompiles_id(self._recompiles)
        GenerationTracker.generation += 1  # modules made since are no part of the call
        try:
            with _DispatchKeys(_includes(), _excludes()):
                set_eval_frame(self._callback)
                return self._function(*args, **kwargs)
        except (Unsupported, UncapturedHigherOrderOpError, UserError) as error:
            raise error.with_traceback(None) from error.__cause__
        except ShortenTraceback as error:
            raise error.remove_dynamo_frames() from None
        finally:
            set_eval_frame(None)
            _leave_transforms(depth)
            set_eval_frame_isolate_recompiles_id(recompiles)
            set_eval_frame(prior)


def call_directly(run: Callable[..., Any], globals_of_caller: dict[str, Any]) -> None:
    """Lets code that Dynamo has made call what a backend has returned without a wrapper in between.

    Dynamo wraps it in `torch.compiler.disable`, as :func:`without_capture` does with less ado.

    Args:
        run: what the backend has returned.
        globals_of_caller: of the code, in which it calls the wrapper by a name.
    """
    for name, value in list(globals_of_caller.items()):
        if getattr(value, "_torchdynamo_orig_callable", None) is run:
            globals_of_caller[name] = without_capture(run)
            return


def without_capture(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that Dynamo does not look into, nor into what it calls.

    As `torch.compiler.disable` does it, which also asks about exports and stances in each call.
    """

    @torch._dynamo.decorators.skip
    def call(*args: Any) -> Any:
        prior = set_eval_frame(None)
        try:
            return function(*args)
        finally:
            set_eval_frame(prior)

    return call
