"""Breaks the graph before operators that may raise inside `try`, so that Python runs the `except`.

A graph that Dynamo (PyTorch 2.13) captures raises when it runs, outside the captured function: the IndexError of
`y[count]` bypasses the function's own `except IndexError` (https://github.com/pytorch/torchdynamo/issues/318).
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

_TORCH_DIRECTORY = str(Path(torch.__file__).parent)


def _break_inside_try() -> Callable[[], None]:
    """Patches Dynamo to break the graph before an operator inside `try` that may raise; returns the undo function."""
    before = OutputGraph.create_proxy

    def create_proxy(
        self: Any, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any
    ) -> Any:
        if kind.startswith("call") and _is_caught(self.current_tx, target, (args, kwargs)):
            graph_break(
                gb_type="Data-dependent error in a try block",
                context=str(target),
                explanation="What the code does next depends on whether this raises.",
                hints=["Move it out of the `try` block."],
            )
        return before(self, kind, target, args, kwargs, *rest, **more)

    return replace((OutputGraph, "create_proxy", create_proxy))


caught_errors = ProcessWide(_break_inside_try)


def _is_caught(frame: Any, target: Any, arguments: Any) -> bool:
    """True if a node may raise for some data, and the user's code would handle the error.

    Args:
        frame: Dynamo's `InstructionTranslator` for the function that contains the node.
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
    # An index lookup whose handlers only re-raise, such as `except IndexError: raise IndexError(...)`, stays in the
    # graph: a break would change only the text of the error.
    looks_up = any(isinstance(value, torch.Tensor) and value.dtype in _INDEX_DTYPES for value in values)
    return looks_up and any(_resumes(*handler) for handler in handlers)


_INDEX_DTYPES = (torch.int32, torch.int64)


def _handlers(frame: Any) -> Iterator[tuple[Any, int]]:
    """Yields the user's handlers that enclose the current instruction or a call that led to it, innermost first.

    These are `except` clauses and `contextlib.suppress` blocks, not `finally` or other `with` blocks.

    Args:
        frame: Dynamo's `InstructionTranslator` for the function that contains the instruction.

    Yields:
        The frame and the index in `frame.instructions` of the handler's first instruction after PUSH_EXC_INFO.
    """
    while frame is not None:
        # PyTorch itself calls hooks inside `try`.
        of_torch = frame.f_code.co_filename.startswith(_TORCH_DIRECTORY)
        entry = None if of_torch else frame.current_instruction.exn_tab_entry
        while entry is not None:
            handler = entry.target
            # Cleanup handlers, which CPython generates around handlers, don't start with this opcode.
            if handler.opname == "PUSH_EXC_INFO":
                first = frame.indexof[handler] + 1
                if _is_except(frame.instructions[first:]) or _suppresses(frame, handler):
                    yield frame, first
            entry = handler.exn_tab_entry
        frame = frame.parent


def _is_except(instructions: list[Any]) -> bool:
    """True if a handler is an `except` clause, not the handler of `finally` or `with`, which re-raises the error."""
    if instructions[0].opname == "POP_TOP":  # `except:`
        return True
    for instruction in instructions:
        if instruction.opname == "CHECK_EXC_MATCH":
            return True
        if not instruction.opname.startswith(("LOAD_", "BUILD_TUPLE")):
            return False
    return False


def _resumes(frame: Any, first: int) -> bool:
    """True if a handler swallows the error: its bytecode has a POP_EXCEPT before the first `raise`.

    Args:
        frame: Dynamo's `InstructionTranslator` for the function that contains the handler.
        first: index in `frame.instructions` of the handler's first instruction.
    """
    names = (instruction.opname for instruction in frame.instructions[first:])
    return next((name for name in names if name in ("RAISE_VARARGS", "POP_EXCEPT")), "") != "RAISE_VARARGS"


def _suppresses(frame: Any, handler: Any) -> bool:
    """True if a handler belongs to `with contextlib.suppress(...)`."""
    managers = (
        getattr(block.with_context, "cm_obj", None) for block in frame.block_stack if block.target is handler
    )
    return any(isinstance(manager, contextlib.suppress) for manager in managers)


def _checks_data(target: Any) -> bool:
    """True if a target is an assertion, or a linear algebra function, which may fail for some matrices."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return target in (assert_async, assert_scalar) or (
        name.startswith("linalg_") or "cholesky" in name or name == "inverse"
    )
