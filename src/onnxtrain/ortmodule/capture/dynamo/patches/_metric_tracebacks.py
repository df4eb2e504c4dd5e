"""Frees the tracebacks that Dynamo keeps for its metrics.

For the message of a possible error, Dynamo (PyTorch 2.13) stores the traceback of the first assignment to each metric,
in `MetricsContext._edits`, and never clears it. The tracebacks keep the code objects on the stack alive. After a graph
break, one of these is the code that Dynamo has generated for the beginning of the function, which refers to the graph:
a model's graphs would outlive the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from onnxtrain.ortmodule._torch import get_metrics_context


@contextlib.contextmanager
def metric_tracebacks() -> Iterator[None]:
    """Context manager for a capture; clears the tracebacks kept by Dynamo's metrics when the outermost capture ends."""
    try:
        yield
    finally:
        metrics = get_metrics_context()
        if not metrics.in_progress():
            metrics._edits.clear()
