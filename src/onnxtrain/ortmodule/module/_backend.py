"""Provides ORTModule's engine as a backend of `torch.compile(module, backend="onnxtrain")`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from onnxtrain.ortmodule._options import DebugOptions
from onnxtrain.ortmodule._report import Report
from onnxtrain.ortmodule.module._engine import Backend, onnxruntime_backend
from onnxtrain.ortmodule.sessions._session import check_onnxruntime


def compile_backend(
    graph_module: fx.GraphModule, example_inputs: list[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles a graph captured by Dynamo into a callable that runs it in ONNX Runtime.

    `torch.compile(..., backend="onnxtrain")` finds this function through the entry point `torch_dynamo_backends`.
    Forward and backward run as in an `ORTModule`. Capture, recompilation and the choice of constant arguments follow
    `torch.compile` and `torch._dynamo.config`, not ORTModule's settings.

    Args:
        graph_module: the captured graph.
        example_inputs: arguments of the captured call.
        options: the `options` of `torch.compile`: arguments of :class:`~onnxtrain.ortmodule.DebugOptions` by name, and
            `report`, a :class:`~onnxtrain.ortmodule.Report` to which a record of each graph is added.

    Returns:
        A callable that takes the graph's inputs and returns its outputs.

    Raises:
        TypeError: an option is unknown or has the wrong type.
        ORTModuleInitException: the installed onnxruntime is older than 1.30.
        ORTModuleFallbackException: the graph cannot run in ONNX Runtime, and the policy forbids PyTorch.
        ValueError: an option has an invalid value; see :class:`~onnxtrain.ortmodule.DebugOptions`.

    Example:
        >>> import torch
        >>> from onnxtrain.ortmodule import Report, compile_backend
        >>> report = Report()
        >>> model = torch.compile(torch.nn.Linear(2, 1), backend=compile_backend, options={"report": report})
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> report.runs_in_onnxruntime
        True
    """
    check_onnxruntime()
    return _backend(**(options or {}))(graph_module, example_inputs)


@functools.lru_cache(maxsize=64)
def _backend(report: Report | None = None, **options: Any) -> Backend:
    """Returns the backend for the given options; equal options share one backend."""
    # Cached, because a backend numbers its graphs.
    if not isinstance(report, Report | None):
        raise TypeError(
            f"torch.compile: the option report must be a Report, received {type(report).__name__}"
        )
    return onnxruntime_backend(DebugOptions(**options), report)
