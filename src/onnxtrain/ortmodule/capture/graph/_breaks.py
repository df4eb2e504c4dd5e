"""Describes where and why Dynamo broke a graph. The statement at a graph break runs in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import fx


def break_reason(graph_module: fx.GraphModule) -> str | None:
    """Returns the location and cause of the graph break that ended a graph; None if the function ends with the graph.

    Returns:
        A message, e.g. "model.py:12: Unsupported Tensor.item() call".
    """
    reason: Any = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    # Dynamo's message has several paragraphs, e.g. hints. The explanation names the cause.
    lines = [line.strip() for line in reason.reason.splitlines() if line.strip()]
    explanation = next((line for line in lines if line.startswith("Explanation: ")), None)
    text = explanation.removeprefix("Explanation: ") if explanation else lines[0]
    frame = _last_frame(reason)
    return text if frame is None else f"{Path(frame.filename).name}:{frame.lineno}: {text}"


# Reasons for graph breaks that don't depend on symbolic sizes. Dynamo's message (PyTorch 2.13) begins with one of
# these, or contains it if the graph break is in an inlined function.
_INDEPENDENT_OF_SIZES = (
    "Data-dependent branching",
    "Unsupported Tensor.item() call",
    "Call to `torch._dynamo.graph_break()`",
    "marked as skipped",
    "torch.compiler.disable",
    "data-dependent expression",
    "step_unsupported",
)


def may_depend_on_symbols(graph_module: fx.GraphModule) -> bool:
    """True if a graph break may be due to a symbolic size, so that a capture with fixed sizes may avoid it."""
    reason: Any = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return False
    return not any(text in reason.reason for text in _INDEPENDENT_OF_SIZES)


def _last_frame(reason: Any) -> Any:
    return reason.user_stack[-1] if reason.user_stack else None
