"""End graphs before what may raise within a `try`, whose `except` is Python's to execute.

A graph raises when it runs, outside of the captured function: an IndexError of `y[count]` would pass the function's own
`except IndexError`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from onnxtrain.ortmodule._torch import OutputGraph, assert_async, assert_scalar, graph_break
from onnxtrain.ortmodule.capture._nodes import depends_on_data
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace

_TORCH = str(Path(torch.__file__).parent)


def _watch_nodes() -> Callable[[], None]:
    """Has Dynamo ask about each node of a graph that it makes; returns the function that takes that back."""
    before = OutputGraph.create_proxy

    def create_proxy(
        self: Any, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any
    ) -> Any:
        if kind.startswith("call") and _is_caught(self.current_tx, target, (args, kwargs)):
            graph_break(
                gb_type="Error of the data in a try block",
                context=str(target),
                explanation="What the code does next depends on whether this raises.",
                hints=["Compute it outside of `try`."],
            )
        return before(self, kind, target, args, kwargs, *rest, **more)

    return replace((OutputGraph, "create_proxy", create_proxy))


without_caught_errors = ProcessWide(_watch_nodes)
"""Makes graphs end before what may raise within a `try`, while it is open."""


def _is_caught(frame: Any, target: Any, arguments: Any) -> bool:
    """Returns whether a node may raise for some data, and code of the user's would do something about it.

    Args:
        frame: what Dynamo knows of the function that it is in, its `InstructionTranslator`.
        target: target of the node.
        arguments: arguments of the node.
    """
    handlers = list(_handlers(frame))
    if not handlers:
        return False
    found: list[Any] = []
    torch.fx.node.map_aggregate(arguments, found.append)
    values = [leaf.node.meta.get("example_value") for leaf in found if isinstance(leaf, torch.fx.Proxy)]
    if _checks_data(target) or any(map(depends_on_data, values)):
        return True
    # `except IndexError: raise IndexError(...)` around a lookup would cost a graph, and changes but the text.
    looks_up = any(isinstance(value, torch.Tensor) and value.dtype in _INDICES for value in values)
    return looks_up and any(_resumes(*handler) for handler in handlers)


_INDICES = (torch.int32, torch.int64)


def _handlers(frame: Any) -> Iterator[tuple[Any, int]]:
    """Yields the `except` clauses around the code that Dynamo is in, and around its callers: frame and instruction."""
    while frame is not None:
        # PyTorch calls hooks within a `try`.
        of_torch = frame.f_code.co_filename.startswith(_TORCH)
        entry = None if of_torch else frame.current_instruction.exn_tab_entry
        while entry is not None:
            handler = entry.target
            # Handlers of handlers, which tidy up, do not begin so.
            if handler.opname == "PUSH_EXC_INFO":
                first = frame.indexof[handler] + 1
                if _is_except(frame.instructions[first:]) or _suppresses(frame, handler):
                    yield frame, first
            entry = handler.exn_tab_entry
        frame = frame.parent


def _is_except(instructions: list[Any]) -> bool:
    """Returns whether a handler is that of `except`, and not of `finally` or `with`, which pass the error on."""
    if instructions[0].opname == "POP_TOP":  # `except:`
        return True
    for instruction in instructions:
        if instruction.opname == "CHECK_EXC_MATCH":
            return True
        if not instruction.opname.startswith(("LOAD_", "BUILD_TUPLE")):
            return False
    return False


def _resumes(frame: Any, first: int) -> bool:
    """Returns whether a handler, from its instruction `first` on, does anything but raise."""
    names = (instruction.opname for instruction in frame.instructions[first:])
    return next((name for name in names if name in ("RAISE_VARARGS", "POP_EXCEPT")), "") != "RAISE_VARARGS"


def _suppresses(frame: Any, handler: Any) -> bool:
    """Returns whether the `with` of a handler is `with contextlib.suppress(...)`."""
    managers = (
        getattr(block.with_context, "cm_obj", None) for block in frame.block_stack if block.target is handler
    )
    return any(isinstance(manager, contextlib.suppress) for manager in managers)


def _checks_data(target: Any) -> bool:
    """Returns whether a node is a check, or a factorisation, which not every matrix has."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return target in (assert_async, assert_scalar) or (
        name.startswith("linalg_") or "cholesky" in name or name == "inverse"
    )
