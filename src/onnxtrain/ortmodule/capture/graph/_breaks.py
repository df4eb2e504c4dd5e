"""Say where and why Dynamo ended a graph early (a graph break): the statement there runs in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import fx


def break_reason(graph_module: fx.GraphModule) -> str | None:
    """Returns e.g. "model.py:12: Unsupported Tensor.item() call"; None if the graph ends where the function ends."""
    reason: Any = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    # Dynamo's text has a paragraph for each way out; the explanation is the one that names the cause.
    lines = [line.strip() for line in reason.reason.splitlines() if line.strip()]
    explanation = next((line for line in lines if line.startswith("Explanation: ")), None)
    text = explanation.removeprefix("Explanation: ") if explanation else lines[0]
    frame = _last_frame(reason)
    return text if frame is None else f"{Path(frame.filename).name}:{frame.lineno}: {text}"


# Dynamo (PyTorch 2.13) begins its text with one of these, or has it below where the graph ends in an inlined function.
_WHATEVER_THE_SIZE = (
    "Data-dependent branching",
    "Unsupported Tensor.item() call",
    "Call to `torch._dynamo.graph_break()`",
    "marked as skipped",
    "torch.compiler.disable",
    "data-dependent expression",
    "step_unsupported",
)


def ends_for_a_symbol(graph_module: fx.GraphModule) -> bool:
    """Returns whether a graph may have ended early because a size is a symbol: with a number it may go on."""
    reason: Any = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return False
    return not any(text in reason.reason for text in _WHATEVER_THE_SIZE)


def _last_frame(reason: Any) -> Any:
    return reason.user_stack[-1] if reason.user_stack else None
