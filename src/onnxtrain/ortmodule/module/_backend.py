"""Offer ORTModule's engine as a backend of `torch.compile(module, backend="onnxtrain")`."""

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
    """Compiles a graph that Dynamo has captured for ONNX Runtime.

    `torch.compile(..., backend="onnxtrain")` calls it, and finds it by the entry point `torch_dynamo_backends`. Forward
    and backward run as they do in an `ORTModule`. What Dynamo captures, when it captures again, and which arguments are
    constants follows `torch.compile` and `torch._dynamo.config`, not ORTModule's settings.

    Args:
        graph_module: the graph.
        example_inputs: its arguments.
        options: `torch.compile(options={...})`: arguments of :class:`~onnxtrain.ortmodule.DebugOptions` by name, and
            `report`, a :class:`~onnxtrain.ortmodule.Report` to record the graphs in.

    Returns:
        A callable that takes what the graph takes and returns what it returns.

    Raises:
        TypeError: an option is unknown or has the wrong type.
        ORTModuleInitException: the installed onnxruntime is older than 1.30.
        ORTModuleFallbackException: the graph does not run in ONNX Runtime, and the policy forbids PyTorch.

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
    """Returns one backend for all graphs with the same options."""
    # The backend numbers its graphs, so that each must not get a backend of its own.
    if not isinstance(report, Report | None):
        raise TypeError(
            f"torch.compile: the option report must be a Report, received {type(report).__name__}"
        )
    return onnxruntime_backend(DebugOptions(**options), report)
