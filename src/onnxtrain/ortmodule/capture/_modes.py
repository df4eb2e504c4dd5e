"""Restores the thread's modes after an error in a captured graph, and sets the modes that a graph leaves changed."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import fx
from torch.autograd import forward_ad

from onnxtrain.ortmodule import _torch

# Functions that enter a mode, and the functions that leave it, which take the result of the former.
_LEAVE: dict[Any, Callable[[Any], object]] = {
    _torch.enter_autocast: _torch.exit_autocast,
    _torch.enter_inference_mode: _torch.exit_inference_mode,
}

# Getters and setters of the other modes that captured graphs change.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.is_grad_enabled, _torch.set_grad_enabled),
    (_torch.is_fwd_grad_enabled, _torch.set_fwd_grad_enabled),
    (_torch.get_inplace_requires_grad_allowed, _torch.set_inplace_requires_grad_allowed),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_torch.saved_tensors_hooks_error, _torch.set_saved_tensors_hooks_error),
    *_torch.sdpa_settings,
)


_WITHOUT_CONTEXT = {
    torch.is_grad_enabled: _torch.set_grad_enabled,
    torch.get_default_dtype: torch.set_default_dtype,
    torch.get_deterministic_debug_mode: _torch.set_deterministic_algorithms,
    **_torch.sdpa_switches,
}
"""Getters in `_SETTINGS`, with the functions that a captured graph calls for them, also outside `with` statements."""

_MODE_SETTERS = "_?(set|enable)_|autocast_(increment|decrement)_nesting$"
"""Regular expression for the start of the names of PyTorch's functions that set modes."""


def restoring_modes(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """Returns a function that runs a graph in PyTorch and, if the graph raises an error, restores the caller's modes.

    A captured graph enters and leaves `torch.no_grad`, `torch.autocast`, function transforms etc. by separate calls, so
    an error in between would leave them active. A setter in `_WITHOUT_CONTEXT` that the graph calls only once is not
    undone: the call does not belong to a `with` statement, so its effect also outlasts an error in eager PyTorch.
    """
    nodes = list(_nodes(graph_module))
    calls: Counter[Any] = Counter(node.target for node in nodes)
    kept = [get for get, setter in _WITHOUT_CONTEXT.items() if calls[setter] == 1]
    leave = {node.name: _LEAVE[node.target] for node in nodes if node.target in _LEAVE}
    is_dual = any(node.target is _torch.enter_dual_level for node in nodes)

    def call(*args: Any) -> Any:
        # Otherwise the first call goes through FX's `__call__`, which prints errors and drops their tracebacks.
        _torch.compile_now(graph_module)
        transforms = _torch.get_dynamic_layer_stack_depth()
        with settings_restored_on_error(kept):
            try:
                return graph_module.forward(*args)
            except BaseException as error:
                _torch.pop_dynamic_layer_stack_and_undo_to_depth(transforms)
                for name, entered in _entered(error.__traceback__, leave):
                    leave[name](entered)
                if is_dual and forward_ad._current_level < 0:
                    # PyTorch doesn't tell whether the graph has left its level. There is at most one.
                    with contextlib.suppress(RuntimeError):
                        _torch.enter_dual_level()
                    _torch.exit_dual_level(level=0)
                raise

    return call


def leaving_modes(graph_module: fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `run`, so that each call also changes the caller's modes as the captured graph does.

    A captured graph may call e.g. `torch.set_grad_enabled` or `torch.set_default_dtype` outside a `with` statement,
    and thereby change the mode of the caller. ONNX Runtime skips these calls, so they are made after `run`.

    Must be called in the gradient mode in which the graph begins.
    """
    nodes = graph_module.graph.nodes
    calls = [functools.partial(node.target, *node.args, **node.kwargs) for node in nodes if _sets_mode(node)]
    mode, inference = None, 0
    for node in nodes:
        # The end of an inference mode restores the mode before it.
        inference += (node.target is _torch.enter_inference_mode) - (
            node.target is _torch.exit_inference_mode
        )
        if node.target is _torch.set_grad_enabled and not inference:
            mode = node.args[0]
    if mode is not None and mode != torch.is_grad_enabled():
        calls.append(functools.partial(_torch.set_grad_enabled, mode))
    if not calls:
        return run

    def call(*args: Any) -> Any:
        results = run(*args)
        for set_mode in calls:
            set_mode()
        return results

    return call


def _sets_mode(node: fx.Node) -> bool:
    """True if a node calls a function that changes a mode other than the gradient mode."""
    name = getattr(node.target, "__name__", "")
    return (
        node.op == "call_function"
        and re.match(_MODE_SETTERS, name) is not None
        and node.target is not _torch.set_grad_enabled
        and not node.all_input_nodes
    )


@contextlib.contextmanager
def settings_restored_on_error(kept: Collection[Callable[[], Any]] = ()) -> Iterator[None]:
    """Context manager that restores the modes in :data:`_SETTINGS` if its block raises.

    Args:
        kept: getters of the modes that are not restored.
    """
    before = [get() for get, _ in _SETTINGS]
    try:
        yield
    except BaseException:
        for (get, restore), value in zip(_SETTINGS, before, strict=True):
            if get not in kept and get() != value:
                restore(value)
        raise


@contextlib.contextmanager
def left_on_error(interpreter: fx.Interpreter) -> Iterator[None]:
    """Context manager that exits autocast, inference mode and forward-mode AD levels if an error leaves them active.

    Without it, autocast would remain enabled. An inference mode would end only when its guard is garbage-collected, and
    the guard would then restore the gradient mode from before the inference mode.

    Args:
        interpreter: the interpreter that runs a graph in the `with` block.
    """
    try:
        yield
    except BaseException:
        for node, entered in reversed(list(interpreter.env.items())):
            if node.target in _LEAVE and not any(user in interpreter.env for user in node.users):
                _LEAVE[node.target](entered)
        executed = Counter(node.target for node in interpreter.env)
        if executed[_torch.enter_dual_level] > executed[_torch.exit_dual_level]:
            _torch.exit_dual_level(level=0)
        raise


def _nodes(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yields the nodes of a graph and of the graphs that it calls."""
    for part in graph_module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def _entered(
    traceback: TracebackType | None, leave: dict[str, Callable[[Any], object]]
) -> list[tuple[str, Any]]:
    """Finds the modes that a graph had entered, but not left, when it raised.

    Args:
        traceback: the traceback of the exception.
        leave: maps the name of each node that enters a mode to the function that leaves the mode.

    Returns:
        The name and the result of each node that entered such a mode, last node first.
    """
    found = []
    while traceback is not None and leave:
        frame = traceback.tb_frame
        # FX uses this file name for generated functions. They set each variable to None after its last use.
        if frame.f_code.co_filename.startswith("<eval_with_key>"):
            variables = frame.f_locals
            found += [(n, variables[n]) for n in leave if variables.get(n) is not None]
        traceback = traceback.tb_next
    return found[::-1]
