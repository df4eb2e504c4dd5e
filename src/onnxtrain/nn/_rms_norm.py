"""Defines root mean square normalization with a lower bound instead of an epsilon."""

from __future__ import annotations

import torch
from torch import nn

from onnxtrain.nn._export import exact, is_tracing

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Root mean square normalization: y = x / max(rms(x), eps) * g, with rms(x) = ||x|| / sqrt(dim) over the last axis.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. `eps` is a lower bound of the root mean square, so
    rows with rms(x) > eps are scaled to a root mean square of exactly 1. `torch.nn.RMSNorm` is a different layer: it
    adds eps to the mean square.

    Args:
        dim: size of the last axis of the input, e.g. 512.
        eps: lower bound of the root mean square, e.g. 1e-8. In rows with rms(x) < eps, no gradient flows through
            rms(x).

    Raises:
        RuntimeError: in `forward`, the size of the last axis of the input is not `dim`, even if `dim` is 1.

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
        """Normalizes x, `[..., dim]`; the dtype of the result is the promoted dtype of x and g."""
        # For dim = 1, g would silently broadcast to any size.
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
        """Returns the arguments for `repr`."""
        return f"{self.g.shape[0]}, eps={self.eps}"
