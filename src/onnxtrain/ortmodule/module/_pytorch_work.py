"""Detects operators that run in PyTorch, outside all captured graphs, during a call of the model.

Dynamo may run a function in PyTorch without calling its backend, for many reasons: a graph break inside a loop, a
function disabled for Dynamo, a `torch.func` transform, a recompile limit. So a dispatch mode observes all operators. It
is active in every call, because uncaptured code may run for the first time long after the first call.
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
from onnxtrain.ortmodule.capture._break_even import BreakEven
from onnxtrain.ortmodule.capture.dynamo import _calling

_TORCH_DIRECTORY = f"{Path(torch.__file__).parent}{os.sep}"
_LAYERS = f"{_TORCH_DIRECTORY}nn{os.sep}modules{os.sep}"
_DYNAMO = f"{_TORCH_DIRECTORY}_dynamo{os.sep}"
_DYNAMO_CALLS = (f"{_DYNAMO}eval_frame.py", f"{_DYNAMO}external_utils.py")
"""Files of Dynamo that are on the stack when generated code runs. Its other files are on the stack during a capture."""
_WORKERS = (f"{_TORCH_DIRECTORY}distributed{os.sep}", f"{_TORCH_DIRECTORY}nn{os.sep}parallel{os.sep}")
_DTENSOR = f"{_TORCH_DIRECTORY}distributed{os.sep}tensor{os.sep}"
_ORTMODULE_DIRECTORY = f"{Path(__file__).parents[1]}{os.sep}"
_CALLERS = (__file__, _calling.__file__)
"""Files of ORTModule that call the user's code. Operators called from its other files are ORTModule's own."""
# The functions that `with mode:` calls, without its overhead.
_push = _torch.push_dispatch_mode
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
"""Operators that copy, create or read data, which are ignored: e.g. `loss.item()` for a log is not a computation."""


def watched(
    call: Callable[..., Any],
    plain: torch.nn.Module,
    report: Report,
    policy: FallbackPolicy,
    break_even: BreakEven,
) -> Callable[..., Any]:
    """Wraps a compiled module to warn, once per source location, about operators that run in PyTorch.

    Args:
        call: the compiled module.
        plain: the module itself. It is called instead under `torch.jit.trace`, `torch.export` etc.
        report: receives one record per source location.
        policy: if it forbids this fallback, a call that has run such operators raises ORTModuleTorchModelException.
        break_even: marks calls that PyTorch runs because a capture would not pay off yet; these are not reported.
    """
    return _Watched(call, plain, _Watch(report, policy, break_even)).run


def unwatched(compute: Callable[..., Any], *args: Any) -> Any:
    """Calls `compute(*args)` without recording its operators, which ORTModule itself runs; returns the result."""
    # The watch calls a Python function per operator, which takes longer than most operators.
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
    """True if a tracer is active. The module must then run in PyTorch, so that the tracer sees its operators.

    The tracers are `torch.jit.trace`, `torch.export`, `torch.onnx.export`, `make_fx` and FakeTensorMode.
    """
    return (
        _is_tracing()
        or _dispatch_mode(_FAKE) is not None
        or torch.compiler.is_exporting()
        or is_fx_symbolic_tracing()
    )


def has_hooks(module: torch.nn.Module) -> bool:
    """True if calling the module runs hooks: its own forward or backward hooks, or global hooks."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or bool(has_any_global_hook())  # type: ignore[no-untyped-call]


class _Watched:
    """Calls a compiled module while a `_Watch` records the operators that run in PyTorch.

    Args:
        call: the compiled module.
        plain: the module itself.
        watch: records operators that run in PyTorch.
    """

    def __init__(self, call: Callable[..., Any], plain: torch.nn.Module, watch: _Watch) -> None:
        self._call = call
        self._plain = plain
        self._watch = watch
        self._raised: Counter[Any] = Counter()
        self._left: dict[int, CodeType] = {}

    # The method may be called from a module that is being captured, and must not be captured with it.
    @_torch.skip
    def run(self, *args: Any, **kwargs: Any) -> Any:
        if being_traced():
            return self._plain(*args, **kwargs)
        watch = self._watch
        thread = watch.break_even.of_thread
        # The watch calls a Python function per operator. PyTorch will probably run this call if it ran the last one.
        watches = not thread.in_pytorch
        thread.in_pytorch = False
        if watches:
            _push(watch)
        try:
            result = self._call(*args, **kwargs)
        except Exception as error:
            if not thread.in_pytorch:
                self._capture_again(error)
            # Dynamo wraps the exceptions of its backend.
            own = getattr(error, "inner_exception", None)
            # Dynamo never captures a call that raises, so the operators are not reported.
            watch.found.clear()
            if isinstance(own, OnnxTrainError):
                raise own from own.__cause__
            raise
        finally:
            if watches:
                _pop(None)
        if thread.in_pytorch:
            watch.report.calls_in_pytorch += 1
            return result
        # The code of a generator runs after the call, without the watch.
        if type(result) is GeneratorType:
            watch.found[result.__qualname__, "what the generator computes"] = None
        if self._raised:
            self._raised.clear()
            for code in self._left.values():
                c_eval_frame.reset_code(code)
            self._left.clear()
        if watch.found:
            watch.publish()
        return result

    def _capture_again(self, error: Exception) -> None:
        """Lets Dynamo capture functions again after an exception has passed through them."""
        # Dynamo (PyTorch 2.13) doesn't capture a call that raises, and runs that function in PyTorch from then on: one
        # batch of a wrong shape would move it out of ONNX Runtime. But if every call raises, e.g. in a hook that stops
        # the model early, all captures would be in vain. After `_MAX_RETRIES` captures, there are none until a call
        # returns.
        codes = _capturable_codes(error.__traceback__)
        # Code is identified by id: generated code may have a dict among its constants, and is not hashable then.
        place = (type(error), id(codes[-1]) if codes else None)
        self._raised[place] += 1
        if self._raised[place] <= _MAX_RETRIES:
            for code in codes:
                c_eval_frame.reset_code(code)
        else:
            self._left.update({id(code): code for code in codes})


_MAX_RETRIES = 2
"""Number of additional captures after exceptions of one type raised in one function."""


def _capturable_codes(trace: TracebackType | None) -> list[CodeType]:
    """Returns the code objects in a traceback, except for functions that Dynamo never captures."""
    codes = []
    for frame, _ in traceback.walk_tb(trace):
        name = frame.f_code.co_filename
        if name.startswith(_LAYERS) or not name.startswith(
            (_TORCH_DIRECTORY, _ORTMODULE_DIRECTORY, "<eval_with_key>")
        ):
            codes.append(frame.f_code)
    return codes


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run in PyTorch, and the places in the user's code that call them.

    Args:
        report: receives one record per place.
        policy: whether operators may run in PyTorch.
        break_even: marks calls that PyTorch runs because a capture would not pay off yet.

    Attributes:
        found: (place, operator) pairs that `publish` will report, in order of execution, as keys of a dict, e.g.
            {("Net.forward (net.py:12)", "aten.sin"): None}.
    """

    # E.g. torch.cond. The operators in its subgraphs are watched.
    supports_higher_order_operators = True

    def __init__(self, report: Report, policy: FallbackPolicy, break_even: BreakEven) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.break_even = break_even
        self.found: dict[tuple[str, str], None] = {}
        self.report = report
        self._policy = policy
        self._known: dict[str, dict[str, None]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise Dynamo would not capture anything while the mode is active.
        return True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.break_even.in_pytorch:
            return func(*args, **(kwargs or {}))
        # A nested ORTModule has its own watch, which has recorded the operator.
        nested = getattr(_inside, "handler", False)
        if not nested and _computes(func, args) and _torch.current_graph_task_id() == -1:
            place = _source_location(sys._getframe(1))
            if place is not None:
                self.found[place, str(getattr(func, "overloadpacket", func))] = None
        _inside.handler = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            _inside.handler = nested

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def publish(self) -> None:
        """Adds the recorded operators to the report, and warns of places in the code that are not yet in it.

        Raises:
            ORTModuleTorchModelException: operators were recorded, and the policy forbids operators in PyTorch.
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
            first = all(graph.name != name for graph in self.report)
            self.report.record(GraphRecord(name, "inference", "-", len(operators), fallback_reason=message))
            if first:
                warnings.warn(f"ORTModule: {name} runs in PyTorch: {message}", stacklevel=4)


def _reason() -> str:
    """Returns the clause that ends a fallback message: why Dynamo did not capture the operators of this call."""
    if _torch.peek_interpreter_stack() is not None:
        return "under a transform of torch.func, which Dynamo does not capture"
    if _torch.dynamo_config.disable or _torch.eval_frame._stance.stance != "default":
        return "while Dynamo is switched off (TORCHDYNAMO_DISABLE, torch.compiler.set_stance)"
    return "of which Dynamo captured no graph; TORCH_LOGS=graph_breaks in the environment shows why"


def _computes(func: Any, args: tuple[Any, ...]) -> bool:
    """True if an operator computes with a tensor; False for views, copies, new tensors and `item()`."""
    # The operators in its subgraphs are watched.
    if isinstance(func, HigherOrderOperator):
        return False
    if func.is_view or func.namespace == "prim" or func.overloadpacket.__name__ in _MOVES_DATA:
        return False
    return any(isinstance(leaf, torch.Tensor) for leaf in _leaves(args))


def _leaves(args: tuple[Any, ...]) -> list[Any]:
    return [leaf for arg in args for leaf in (arg if isinstance(arg, list | tuple) else (arg,))]


def _source_location(frame: FrameType | None) -> str | None:
    """Returns the place that calls an operator: the user's function or, if there is none, the PyTorch layer.

    Args:
        frame: the stack frame that calls the operator.

    Returns:
        The place, e.g. "Net.forward (net.py:12)". None if the operator is called by ORTModule itself, by Dynamo during
        a capture, or by PyTorch's code for distributed training.
    """
    layer = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name in _CALLERS:
            break
        if name.startswith(_ORTMODULE_DIRECTORY) or (name.startswith(_DYNAMO) and name not in _DYNAMO_CALLS):
            return None
        # Operators with which DistributedDataParallel and FSDP communicate are not computations of the model, but
        # operators on DTensors are.
        if layer is None and name.startswith(_WORKERS) and not name.startswith(_DTENSOR):
            return None
        if name.startswith(_LAYERS) and layer is None and frame.f_code.co_name != "_call_impl":
            layer = frame
        if not name.startswith((_TORCH_DIRECTORY, "<eval_with_key>")):
            return _described(frame)
        frame = frame.f_back
    return _described(layer) if layer is not None else "PyTorch's own code"


def _described(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"
