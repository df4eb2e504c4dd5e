"""What PyTorch computes during a call of the model, outside of all captured graphs.

Dynamo gives up on a function in many ways (a graph break inside a loop, a function disabled for it, a `torch.func`
transform, a limit reached) and runs it in PyTorch. Its backend never hears of that, so the operators themselves are
watched, in every call: code that no graph holds may come to run long after the first one.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, GeneratorType, TracebackType
from typing import Any

import torch

from onnxtrain.errors import OnnxTrainError
from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule._exceptions import ORTModuleTorchModelException
from onnxtrain.ortmodule._options import FallbackPolicy
from onnxtrain.ortmodule._report import GraphRecord, Report
from onnxtrain.ortmodule._torch import (
    HigherOrderOperator,
    TorchDispatchMode,
    c_eval_frame,
    has_any_global_hook,
    is_fx_symbolic_tracing,
)
from onnxtrain.ortmodule.capture import _calling

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LAYERS = f"{_TORCH}nn{os.sep}modules{os.sep}"
_DYNAMO = f"{_TORCH}_dynamo{os.sep}"
_DYNAMO_CALLS = (f"{_DYNAMO}eval_frame.py", f"{_DYNAMO}external_utils.py")
"""They are on the stack when code runs; its other files, when Dynamo looks ahead with fake tensors."""
_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_CALLERS = (__file__, _calling.__file__)
"""They call the module; what else is in this package computes."""
_push = _torch.push_dispatch_mode  # `with` would keep books that a compiled call does not need
_pop = _torch.pop_dispatch_mode
_dispatch_mode = _torch.get_dispatch_mode
_is_tracing = _torch.is_tracing
_FAKE = _torch.FAKE_MODE
_inside = threading.local()

_MOVES_DATA = frozenset({
    "_local_scalar_dense", "_to_copy", "alias", "clone", "contiguous", "copy_", "detach", "detach_", "empty_like",
    "full_like", "is_pinned", "lift_fresh", "lift_fresh_copy", "ones_like", "pin_memory", "record_stream",
    "resize_", "set_", "zero_", "zeros_like", "fill_",
})  # fmt: skip
"""Operators that copy or make data; reading a number for an `if` or a log is no part of the model's arithmetic."""


def watched(
    call: Callable[..., Any], plain: torch.nn.Module, report: Report, policy: FallbackPolicy
) -> Callable[..., Any]:
    """Returns `call`, which warns of what PyTorch computes in it, once per place in the code, and reports it.

    Args:
        call: a compiled module.
        plain: the module: what is traced or exported is its code.
        report: gets one record per place.
        policy: whether that is allowed; if not, such a call raises ORTModuleTorchModelException when it is done.
    """
    return _Watched(call, plain, _Watch(report, policy)).run


def unwatched(compute: Callable[..., Any], *args: Any) -> Any:
    """Returns `compute(*args)`, whose operators are ORTModule's own: the watch would cost more than they do."""
    count = _torch.count_dispatch_modes()
    watch = _torch.dispatch_mode_at(count - 1) if count else None
    if type(watch) is not _Watch:
        return compute(*args)
    _pop(None)
    try:
        return compute(*args)
    finally:
        _push(watch)


def being_traced() -> bool:
    """Whether the call is for a tool that wants to know what a module computes, and not the numbers.

    They are `torch.jit.trace`, `torch.export`, `torch.onnx.export`, `make_fx`, and tensors without memory.
    """
    return (
        _is_tracing()
        or _dispatch_mode(_FAKE) is not None
        or torch.compiler.is_exporting()
        or is_fx_symbolic_tracing()
    )


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module calls hooks, of its own or global ones."""
    own = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(own) or bool(has_any_global_hook())  # type: ignore[no-untyped-call]


class _Watched:
    def __init__(self, call: Callable[..., Any], plain: torch.nn.Module, watch: _Watch) -> None:
        self._call = call
        self._plain = plain
        self._watch = watch
        self._raised: Counter[Any] = Counter()
        self._left: set[CodeType] = set()

    # It may be called from a module that is being captured, which must not take this for its own code.
    @_torch.skip
    def run(self, *args: Any, **kwargs: Any) -> Any:
        if being_traced():
            return self._plain(*args, **kwargs)
        watch = self._watch
        _push(watch)
        try:
            result = self._call(*args, **kwargs)
        except Exception as error:
            self._capture_again(error)
            own = getattr(error, "inner_exception", None)  # Dynamo wraps what its backend raises
            watch.found.clear()  # a call that raises is never captured
            if isinstance(own, OnnxTrainError):
                raise own from own.__cause__
            raise
        finally:
            _pop(None)
        if type(result) is GeneratorType:  # its code runs after the call
            watch.found[result.__qualname__, "what the generator computes"] = None
        if self._raised:
            self._raised.clear()
            for code in self._left:
                c_eval_frame.reset_code(code)
            self._left.clear()
        if watch.found:
            watch.publish()
        return result

    def _capture_again(self, error: Exception) -> None:
        """Lets Dynamo capture the functions that an exception has left.

        It cannot capture a call that raises, runs it in PyTorch, and would do so ever after: one batch of a wrong shape
        would move the function out of ONNX Runtime. Where every call raises (a hook that stops the model early) it is
        not tried again until one does not.
        """
        codes = _codes(error.__traceback__)
        place = (type(error), codes[-1] if codes else None)
        self._raised[place] += 1
        if self._raised[place] <= _TRIES:
            for code in codes:
                c_eval_frame.reset_code(code)
        else:
            self._left.update(codes)


_TRIES = 2


def _codes(trace: TracebackType | None) -> list[CodeType]:
    """The functions on the way of an exception that Dynamo may capture."""
    codes = []
    for frame, _ in traceback.walk_tb(trace):
        name = frame.f_code.co_filename
        if name.startswith(_LAYERS) or not name.startswith((_TORCH, _OWN, "<eval_with_key>")):
            codes.append(frame.f_code)
    return codes


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True  # torch.cond and its like, which run what they are given

    def __init__(self, report: Report, policy: FallbackPolicy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[
            tuple[str, str], None
        ] = {}  # places with their operators, in the order of computation
        self._report = report
        self._policy = policy
        self._known: dict[str, dict[str, None]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else Dynamo would capture nothing

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        nested = getattr(_inside, "handler", False)  # an ORTModule inside of another one has said it
        if not nested and _computes(func, args) and _torch.current_graph_task_id() == -1:
            place = _place(sys._getframe(1))
            if place is not None:
                self.found[place, str(getattr(func, "overloadpacket", func))] = None
        _inside.handler = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            _inside.handler = nested

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def publish(self) -> None:
        """Reports what was found, and warns of new places.

        Raises:
            ORTModuleTorchModelException: the policy forbids it.
        """
        found, self.found = self.found, {}
        allowed = FallbackPolicy.UNSUPPORTED_TORCH_MODEL in self._policy
        changed = {}
        for place, operator in found:
            known = self._known.setdefault(place, {})
            if operator not in known or not allowed:
                known[operator] = None
                changed[place] = known
        for place, operators in changed.items():
            message = f"{', '.join(operators)} in {place}, {_reason()}"
            if not allowed:
                raise ORTModuleTorchModelException(message)
            name = f"uncaptured {list(self._known).index(place)}"
            first = all(graph.name != name for graph in self._report)
            self._report.record(GraphRecord(name, "inference", "-", len(operators), fallback_reason=message))
            if first:
                warnings.warn(f"ORTModule: {name} runs in PyTorch: {message}", stacklevel=4)


def _reason() -> str:
    if _torch.peek_interpreter_stack() is not None:
        return "under a transform of torch.func, which Dynamo does not capture"
    if _torch.dynamo_config.disable or _torch.eval_frame._stance.stance != "default":
        return "while Dynamo is switched off (TORCHDYNAMO_DISABLE, torch.compiler.set_stance)"
    return "of which Dynamo captured no graph; TORCH_LOGS=graph_breaks in the environment shows why"


def _computes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the operator does arithmetic on a tensor: views, copies and reads of a number do not."""
    if isinstance(func, HigherOrderOperator):
        return False  # what it runs is watched, too
    if func.is_view or func.namespace == "prim" or func.overloadpacket.__name__ in _MOVES_DATA:
        return False
    return any(isinstance(leaf, torch.Tensor) for leaf in _leaves(args))


def _leaves(args: tuple[Any, ...]) -> list[Any]:
    return [leaf for arg in args for leaf in (arg if isinstance(arg, list | tuple) else (arg,))]


def _place(frame: FrameType | None) -> str | None:
    """The user's function that calls the operator, or else PyTorch's layer; None if ORTModule or a capture does."""
    layer = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name in _CALLERS:
            break
        if name.startswith(_OWN) or (name.startswith(_DYNAMO) and name not in _DYNAMO_CALLS):
            return None
        if name.startswith(_LAYERS) and layer is None and frame.f_code.co_name != "_call_impl":
            layer = frame
        if not name.startswith((_TORCH, "<eval_with_key>")):
            return _described(frame)
        frame = frame.f_back
    return _described(layer) if layer is not None else "PyTorch's own code"


def _described(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"
