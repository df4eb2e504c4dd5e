"""Makes the fake tensor of an inactive dropout alias the dropout's input.

In eager PyTorch, `dropout(x, training=False)` returns `x` itself. Dynamo computes fake tensors under PyTorch's Python
dispatcher, whose dropout (PyTorch 2.13) clones the input: a write to the result would not count as a write to `x`, nor
increment its version counter (https://github.com/pytorch/pytorch/pull/185981 fixes it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

# A context variable: meanwhile another thread may export a model, which needs PyTorch's own dropout.
_CAPTURING: ContextVar[bool] = ContextVar("onnxtrain_capturing", default=False)


@contextlib.contextmanager
def inactive_dropout() -> Iterator[None]:
    """Context manager in which an inactive dropout returns its input itself under the Python dispatcher.

    A dropout is inactive if `training=False` or `p=0`.
    """
    _wrap_kernels()
    token = _CAPTURING.set(True)
    try:
        yield
    finally:
        _CAPTURING.reset(token)


def _wrap_kernels() -> None:
    """Wraps the Python dispatcher's dropout kernels in :class:`_Dropout`, permanently."""
    operator: Any = torch.ops.aten.dropout.default
    kernels: dict[Any, Callable[..., Any]] = operator.py_kernels
    # In each capture: modules of PyTorch that are imported later may register further kernels.
    for key, kernel in list(kernels.items()):
        if not isinstance(kernel, _Dropout):
            kernels[key] = _Dropout(kernel)
            operator._dispatch_cache.clear()


class _Dropout:
    """Wrapper of a dropout kernel that returns the input itself if the dropout is inactive during a capture."""

    def __init__(self, kernel: Callable[..., torch.Tensor]) -> None:
        self._kernel = kernel

    def __call__(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return x if _CAPTURING.get() and not (train and p != 0) else self._kernel(x, p, train)
