"""Compiles a module into a callable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onnxtrain.ortmodule._options import DebugOptions
from onnxtrain.ortmodule._report import Report

__all__ = ["compile_module"]


def compile_module(module: torch.nn.Module, options: DebugOptions, report: Report) -> Callable[..., Any]:
    """Returns a callable that does what `module(*args, **kwargs)` does, hooks included."""
    # Dynamo leaves hooks out of its guards by default, and would not see one that comes after the first call.
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    # `_call_impl`, not the module: an OptimizedModule would fire the global hooks a second time.
    compiled: Callable[..., Any] = torch.compile(module._call_impl, backend="aot_eager")
    return compiled
