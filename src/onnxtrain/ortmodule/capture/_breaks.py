"""Where Dynamo ended a graph before the module's end: what follows there is PyTorch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import fx


def break_reason(graph_module: fx.GraphModule) -> str | None:
    """Returns why and where Dynamo ended the graph; None if the function ends there."""
    reason: Any = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    lines = [line.strip() for line in reason.reason.splitlines() if line.strip()]
    explanation = next((line for line in lines if line.startswith("Explanation: ")), None)
    text = explanation.removeprefix("Explanation: ") if explanation else lines[0]
    frame = _last_frame(reason)
    return text if frame is None else f"{Path(frame.filename).name}:{frame.lineno}: {text}"


def _last_frame(reason: Any) -> Any:
    return reason.user_stack[-1] if reason.user_stack else None
