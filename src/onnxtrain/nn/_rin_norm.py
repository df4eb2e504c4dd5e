"""Defines reversible instance normalisation, which a forecast undoes in the end."""

from __future__ import annotations

import torch
from torch import nn

from onnxtrain.nn._export import exact, is_tracing, stop_gradient

__all__ = ["RINorm"]

_NARROW = (torch.float16, torch.bfloat16)
"""Dtypes whose statistics are computed in float32, as the square of 256 is beyond the range of float16."""


class RINorm(nn.Module):
    """y = (x - mean(x)) / stdev(x) * affine_weight + affine_bias, undone by `inverse` (Kim et al., ICLR 2022).

    Mean and stdev = sqrt(var + eps), with the biased variance, are those of each series: over all axes but the first
    (batch) and the last (targets); an input of two axes has one mean for all. They are constants to the gradient.
    `forward` keeps them for `transform` and `inverse` as the attributes `mean` and `stdev`; they are no part of the
    state dict.

    Args:
        input_dim: size of the last axis of the input, the number of targets, e.g. 1.
        eps: added to the variance, e.g. 1e-5.
        affine: True learns a scale and a bias per target.

    Raises:
        RuntimeError: an input has another number of targets than `input_dim`, even if one weight would broadcast;
            without `affine` any number fits. Or `transform` or `inverse` come before `forward`.

    Example:
        >>> norm, x = RINorm(1), torch.tensor([[[2.0], [4.0]]])
        >>> y = norm(x)
        >>> norm.inverse(y.unsqueeze(-1)).squeeze(-1).allclose(x)
        True
    """

    mean: torch.Tensor | None
    stdev: torch.Tensor | None

    def __init__(self, input_dim: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.input_dim = input_dim
        self.eps = eps
        self.affine = affine
        # Attributes and no buffers: the state dict is that of darts' class.
        self.mean = None
        self.stdev = None
        if affine:
            self.affine_weight = nn.Parameter(torch.ones(input_dim))
            self.affine_bias = nn.Parameter(torch.zeros(input_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises x, `[batch, ..., input_dim]`, by its own statistics, and keeps the statistics."""
        self._check("forward", x, axis=-1)
        # Empty for an input of two axes: PyTorch's mean over no axes is the mean over all.
        axes = tuple(range(1, x.ndim - 1))
        wide = x.float() if x.dtype in _NARROW else x
        mean = stop_gradient(wide.detach().mean(dim=axes, keepdim=True))
        centered = wide - mean
        fixed = centered.detach()
        stdev = stop_gradient(((fixed * fixed).mean(dim=axes, keepdim=True) + exact(self.eps, x)).sqrt())
        if wide is not x:
            mean, stdev = mean.to(x.dtype), stdev.to(x.dtype)
            centered = x - mean
        self.mean, self.stdev = mean, stdev
        return self._scale(centered, stdev)

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises x, `[batch, ..., input_dim]`, by the statistics of the last `forward`."""
        self._check("transform", x, axis=-1)
        mean, stdev = self._statistics("transform")
        return self._scale(x - mean, stdev)

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        """Transforms x, `[batch, length, input_dim, params]`, back into the units of the last input of `forward`."""
        self._check("inverse", x, axis=-2)
        mean, stdev = self._statistics("inverse")
        if self.affine:
            # Exporters replace values that are computed from parameters alone (weight + eps², bias.unsqueeze(-1)) by
            # constants, which get no gradient: here every value depends on x or its statistics, too. As in darts, eps²
            # avoids a division by a weight of zero. For such a weight x is the bias, so that the bias is subtracted
            # before the product, which is then 0, and the result is the mean.
            stdev = 1 / (self.affine_weight / stdev + exact(self.eps * self.eps, x) / stdev)
            x = (x.transpose(-1, -2) - self.affine_bias).transpose(-1, -2)
        return x * stdev.unsqueeze(-1) + mean.unsqueeze(-1)

    def extra_repr(self) -> str:
        """Returns the arguments for `repr`."""
        return f"{self.input_dim}, eps={self.eps}, affine={self.affine}"

    def _scale(self, centered: torch.Tensor, stdev: torch.Tensor) -> torch.Tensor:
        """Divides by the standard deviation, then applies scale and bias if there are any."""
        if not self.affine:
            return centered / stdev
        # The quotient has one number per series, so that each number of the series is multiplied once.
        return centered * (self.affine_weight / stdev) + self.affine_bias

    def _statistics(self, method: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns mean and stdev of the last `forward`; raises RuntimeError before the first."""
        if self.mean is None or self.stdev is None:
            raise RuntimeError(
                f"RINorm.{method}: there are no statistics yet; call the layer on the input series first"
            )
        return self.mean, self.stdev

    def _check(self, method: str, x: torch.Tensor, axis: int) -> None:
        """Raises RuntimeError unless an axis has the size `input_dim`."""
        # A weight of one number would broadcast over any number of targets without an error.
        if self.affine and not is_tracing() and x.shape[axis] != self.input_dim:
            raise RuntimeError(
                f"RINorm.{method}: axis {axis} of the input must have size {self.input_dim}, the argument "
                f"input_dim; received shape {tuple(x.shape)}"
            )
