"""Defines reversible instance normalization, which is undone at the end of a forecast."""

from __future__ import annotations

import torch
from torch import nn

from onnxtrain.nn._export import exact, is_tracing, stop_gradient

__all__ = ["RINorm"]

_NARROW = (torch.float16, torch.bfloat16)
"""Dtypes whose statistics are computed in float32, because the square of 256 overflows float16."""


class RINorm(nn.Module):
    """Reversible instance normalization: y = (x - mean) / stdev * affine_weight + affine_bias (Kim et al., ICLR 2022).

    The mean and stdev = sqrt(var + eps), with the biased variance, are computed per series: over all axes but the first
    (batch) and the last (targets). An input with two axes has a single mean. Gradients do not flow through the
    statistics. `forward` stores them in the attributes `mean` and `stdev` for `transform` and `inverse`; they are not
    part of the state dict. `inverse` undoes the normalization.

    Args:
        input_dim: size of the last axis of the input, i.e. the number of targets, e.g. 1.
        eps: added to the variance, e.g. 1e-5.
        affine: True to learn a scale and a bias per target.

    Raises:
        RuntimeError: the number of targets of an input differs from `input_dim`, even if a single weight would
            broadcast (without `affine`, any number is valid); or `transform` or `inverse` is called before `forward`.

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
        # Attributes rather than buffers, so that the state dict matches that of darts' class.
        self.mean = None
        self.stdev = None
        if affine:
            self.affine_weight = nn.Parameter(torch.ones(input_dim))
            self.affine_bias = nn.Parameter(torch.zeros(input_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes x, `[batch, ..., input_dim]`, with the statistics of x, and stores the statistics."""
        self._check("forward", x, axis=-1)
        # Empty for an input with two axes: PyTorch's mean over no axes is the mean over all elements.
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
        """Normalizes x, `[batch, ..., input_dim]`, with the statistics of the last `forward` call."""
        self._check("transform", x, axis=-1)
        mean, stdev = self._statistics("transform")
        return self._scale(x - mean, stdev)

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        """Undoes the normalization, with the statistics of the last `forward` call.

        Args:
            x: the model's prediction, `[batch, length, input_dim, params]`, where params is the number of values
                predicted per step and target: 1, or the number of parameters of a distribution.

        Returns:
            The prediction in the units of the series passed to `forward`, in the shape of x.
        """
        self._check("inverse", x, axis=-2)
        mean, stdev = self._statistics("inverse")
        if self.affine:
            # Exporters turn values computed only from parameters (weight + eps², bias.unsqueeze(-1)) into constants,
            # which get no gradient: here, every value also depends on x or its statistics. As in darts, eps² avoids a
            # division by a weight of zero. With a zero weight, x equals the bias; subtracting the bias before the
            # multiplication gives 0, so that the result is the mean.
            stdev = 1 / (self.affine_weight / stdev + exact(self.eps * self.eps, x) / stdev)
            x = (x.transpose(-1, -2) - self.affine_bias).transpose(-1, -2)
        return x * stdev.unsqueeze(-1) + mean.unsqueeze(-1)

    def extra_repr(self) -> str:
        """Returns the arguments for `repr`."""
        return f"{self.input_dim}, eps={self.eps}, affine={self.affine}"

    def _scale(self, centered: torch.Tensor, stdev: torch.Tensor) -> torch.Tensor:
        """Divides `centered` by the standard deviation, then applies the scale and bias if `affine` is True."""
        if not self.affine:
            return centered / stdev
        # The quotient has one entry per series, so each element of the series is multiplied only once.
        return centered * (self.affine_weight / stdev) + self.affine_bias

    def _statistics(self, method: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean and stdev of the last `forward` call; raises RuntimeError if there was none."""
        if self.mean is None or self.stdev is None:
            raise RuntimeError(
                f"RINorm.{method}: there are no statistics yet; call the layer on the input series first"
            )
        return self.mean, self.stdev

    def _check(self, method: str, x: torch.Tensor, axis: int) -> None:
        """Raises RuntimeError if `affine` is True and the size of an axis of x is not `input_dim`.

        The check is skipped while TorchScript traces.

        Args:
            method: the calling method, e.g. "forward", for the message.
            x: the input.
            axis: the axis to check, e.g. -1.
        """
        # Otherwise, a weight with one element would silently broadcast to any number of targets.
        if self.affine and not is_tracing() and x.shape[axis] != self.input_dim:
            raise RuntimeError(
                f"RINorm.{method}: axis {axis} of the input must have size {self.input_dim}, the argument "
                f"input_dim; received shape {tuple(x.shape)}"
            )
