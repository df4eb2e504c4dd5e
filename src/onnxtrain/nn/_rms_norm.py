"""Defines root mean square normalisation."""

from __future__ import annotations

import torch
from torch import nn

from onnxtrain.nn._export import exact, is_tracing

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Y = x / max(rms(x), eps) * g with rms(x) = ||x|| / sqrt(dim) over the last axis (Zhang and Sennrich, 2019).

    `eps` bounds the root mean square from below. That is not `torch.nn.RMSNorm`, which adds it to the mean square:
    where rms(x) > eps the result here has a root mean square of exactly 1.

    Args:
        dim: size of the last axis of the input.
        eps: lower bound of the root mean square. Below it the gradient of a row does not pass through its norm.

    Raises:
        RuntimeError: from `forward`, when the last axis of the input has another size, also where dim is 1.

    Example:
        >>> RMSNorm(4)(torch.tensor([[3.0, -3.0, 3.0, 3.0]])).tolist()
        [[1.0, -1.0, 1.0, 1.0]]
    """

    def __init__(self, dim: int, eps: float = 1e-8) -> None:
        super().__init__()
        self.scale = dim**-0.5
        self.eps = eps
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x, `[..., dim]`, normalised; the dtype is that of x and g."""
        if not is_tracing() and x.shape[-1] != self.g.shape[0]:
            raise RuntimeError(
                f"RMSNorm: the last axis of the input must have size {self.g.shape[0]}, the argument dim; "
                f"received shape {list(x.shape)}"
            )
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # `exact` returns a float or a tensor, a union that TorchScript cannot compile.
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            rms = (norm * self.scale).clamp(min=self.eps)
        else:
            rms = (norm * exact(self.scale, x)).clamp(min=exact(self.eps, x))
        y: torch.Tensor = x / rms * self.g
        return y

    def extra_repr(self) -> str:
        """Returns the arguments."""
        return f"{self.g.shape[0]}, eps={self.eps}"
