"""Tell Dynamo that a dropout which is off returns its input itself, as in eager PyTorch, and not a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

# A context variable: another thread may export a model meanwhile, which needs PyTorch's own dropout.
_CAPTURING: ContextVar[bool] = ContextVar("onnxtrain_capturing", default=False)


@contextlib.contextmanager
def inactive_dropout_returns_its_input() -> Iterator[None]:
    """Makes fake tensors of `dropout(x, training=False)`, or with p = 0, share the memory of `x`."""
    # PyTorch's Python dispatcher (2.13), under which Dynamo computes fake tensors, has a dropout of its own, which
    # clones its input. A write to the result would not be seen to change `x`, its version counter, and other views.
    _wrap_kernels()
    token = _CAPTURING.set(True)
    try:
        yield
    finally:
        _CAPTURING.reset(token)


def _wrap_kernels() -> None:
    """Puts :class:`_Dropout` in the place of the dispatcher's kernels of dropout, for good."""
    operator: Any = torch.ops.aten.dropout.default
    kernels: dict[Any, Callable[..., Any]] = operator.py_kernels
    # In each capture: modules of PyTorch that are imported later may register further kernels.
    for key, kernel in list(kernels.items()):
        if not isinstance(kernel, _Dropout):
            kernels[key] = _Dropout(kernel)
            operator._dispatch_cache.clear()


class _Dropout:
    """A kernel of dropout that returns its input itself if the dropout is off and an ORTModule is being captured."""

    def __init__(self, kernel: Callable[..., torch.Tensor]) -> None:
        self._kernel = kernel

    def __call__(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return x if _CAPTURING.get() and not (train and p != 0) else self._kernel(x, p, train)
