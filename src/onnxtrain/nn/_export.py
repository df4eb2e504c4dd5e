"""What exporters to ONNX would lose otherwise."""

from __future__ import annotations

import torch

__all__ = ["exact", "is_tracing", "stop_gradient"]


def is_tracing() -> bool:
    """Returns whether TorchScript is tracing, where a size is a tensor and must not be compared."""
    # TorchScript wants no more than one code in such a comment.
    return bool(torch.jit._trace.is_tracing())  # type: ignore[no-untyped-call]


def exact(number: float, like: torch.Tensor) -> float | torch.Tensor:
    """Returns a number, as a tensor where an exporter would round it: the one of Dynamo writes float32."""
    if like.dtype == torch.float64 and torch.compiler.is_exporting():
        return torch.tensor(number, dtype=like.dtype, device=like.device)
    return number


def stop_gradient(x: torch.Tensor) -> torch.Tensor:
    """Returns `x.detach()`, in a form that survives `torch.onnx.export`.

    The exporters leave nothing of a `detach`, so that gradients made from the exported graph would flow where
    PyTorch's do not. While a module is being exported, the value therefore passes through `where(True, x, x)`, which
    no exporter removes and which `onnxtrain.passes.mark_stopped_gradients` knows. It changes no value; everywhere else
    this is `x.detach()` alone.

    Example:
        >>> stop_gradient(torch.ones(2, requires_grad=True) * 3)
        tensor([3., 3.])
    """
    stopped = x.detach()
    if is_tracing() or torch.compiler.is_exporting():
        return torch.where(torch.ones((), dtype=torch.bool, device=x.device), stopped, stopped)
    return stopped
