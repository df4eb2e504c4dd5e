"""Dropout that is off returns its input itself in eager PyTorch; Dynamo's fake tensors say that it returns a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def inactive_dropout_returns_its_input() -> Iterator[None]:
    """Makes fake tensors agree with eager PyTorch about the memory of `dropout(x, training=False)`, or with p = 0.

    PyTorch's Python dispatcher (2.13), under which Dynamo computes fake tensors, has a dropout of its own that clones
    its input then. A write to the result would not be seen to reach the input: not its memory, whose elements may be
    one, not its version, and not the caller's other views of it.
    """
    operator: Any = torch.ops.aten.dropout.default
    kernels: dict[Any, Callable[..., Any]] = operator.py_kernels
    before = dict(kernels)
    for key, kernel in before.items():
        kernels[key] = _without_copy(kernel)
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        kernels.update(before)
        operator._dispatch_cache.clear()


def _without_copy(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns dropout by `kernel` where it is on, and its input where it is off."""

    def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return kernel(x, p, train) if train and p != 0 else x

    return dropout
