"""Preserves parts of a layer that PyTorch's exporters would lose: stopped gradients, float64 constants."""

from __future__ import annotations

import torch

__all__ = ["exact", "is_tracing", "stop_gradient"]


def is_tracing() -> bool:
    """True while TorchScript traces a module, e.g. in `torch.onnx.export(..., dynamo=False)`.

    During tracing, sizes are tensors, and the results of comparisons are recorded as constants. Layers therefore skip
    checks of sizes.
    """
    # TorchScript's parser accepts only one error code in a `type: ignore`.
    return bool(torch.jit._trace.is_tracing())  # type: ignore[no-untyped-call]


def exact(number: float, like: torch.Tensor) -> float | torch.Tensor:
    """Keeps the Dynamo exporter from rounding a number to float32 in an operation with a float64 tensor.

    Args:
        number: an operand, e.g. an epsilon.
        like: the other operand.

    Returns:
        During an export, a float64 tensor with the value of `number` if `like` is float64; else `number` itself.
    """
    # The Dynamo exporter emits a Python number that is combined with a float64 tensor as a float32 constant.
    if like.dtype == torch.float64 and torch.compiler.is_exporting():
        return torch.tensor(number, dtype=like.dtype, device=like.device)
    return number


def stop_gradient(x: torch.Tensor) -> torch.Tensor:
    """Returns `x.detach()`, in a form that survives `torch.onnx.export`.

    PyTorch's exporters drop a `detach`, so that gradients flow through the exported graph where they would stop in
    PyTorch. During an export, the value therefore passes through `where(True, x, x)`, which no exporter removes and
    which `onnxtrain.passes.mark_stopped_gradients` recognizes. Outside of exports, this is just `x.detach()`.

    Example:
        >>> stop_gradient(torch.ones(2, requires_grad=True) * 3)
        tensor([3., 3.])
    """
    stopped = x.detach()
    # Only during an export, because the `where` copies x.
    if is_tracing() or torch.compiler.is_exporting():
        return torch.where(torch.ones((), dtype=torch.bool, device=x.device), stopped, stopped)
    return stopped
