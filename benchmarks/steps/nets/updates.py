"""AdamW over ten million parameters, in one tensor and in 200: only the optimizer's half of a step counts."""

from __future__ import annotations

import torch
from torch import nn

from steps.nets._net import Net, normal

__all__ = ["NETS"]

COUNT, WIDTH = 200, 224


class Many(nn.Module):
    """200 dense layers of 224x224 with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return x


NETS = {
    "adamw-one": Net(
        "AdamW, 10 M parameters in one tensor", lambda: nn.Linear(3200, 3136, bias=False), lambda rng,
        batch: (normal(rng, batch, 3200), normal(rng, batch, 3136)), (1,), loss="mse", counts="update",
        rate=1e-5,
    ),
    "adamw-many": Net(
        "AdamW, 10 M parameters in 200 tensors", Many, lambda rng,
        batch: (normal(rng, batch, WIDTH), normal(rng, batch, WIDTH)), (1,), loss="mse", counts="update",
        rate=1e-5,
    ),
}  # fmt: skip
