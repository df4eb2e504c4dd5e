"""The network: residual blocks in the manner of TiDE (Das et al., 2023) between the two halves of RINorm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from onnxtrain.nn import LayerNorm, LayerNormNoBias, RINorm, RMSNorm

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer_norm": LayerNorm,
    "layer_norm_no_bias": LayerNormNoBias,
    "rms_norm": RMSNorm,
}


class ResidualBlock(nn.Module):
    """norm(W2 relu(W1 x) + W3 x)"""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, outputs)
        self.out = nn.Linear(outputs, outputs)
        self.skip = nn.Linear(inputs, outputs)
        self.norm = norm(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.out(torch.relu(self.hidden(x))) + self.skip(x))


class Forecaster(nn.Module):
    """Forecasts `[batch, horizon, 1]` from `[batch, context, 1]`.

    RINorm takes level and spread of each window away and gives them back to the forecast, so that a network
    that has seen CO2 at 320 ppm works at 370 ppm, and on another series. `lookback` is a linear forecast from
    the normalised window; the blocks and `head` add to it.
    """

    def __init__(self, context: int, horizon: int, width: int, norm: str = "layer_norm") -> None:
        super().__init__()
        self.norm = RINorm(1)
        self.blocks = nn.Sequential(
            ResidualBlock(context, width, NORMS[norm]), ResidualBlock(width, width, NORMS[norm])
        )
        self.head = nn.Linear(width, horizon)
        self.lookback = nn.Linear(context, horizon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = self.norm(x).squeeze(-1)
        y = self.head(self.blocks(window)) + self.lookback(window)
        return self.norm.inverse(y[:, :, None, None]).squeeze(-1)
