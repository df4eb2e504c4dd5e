"""The nets that overhead.py and trainer.py time."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["CLASSES", "Convolutions", "Encoder"]

CLASSES = 10


class Encoder(nn.Module):
    """Four layers of 256 over [batch, tokens, 256]; gives [batch, 10]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


class Convolutions(nn.Module):
    """Five convolutions with BatchNorm over [batch, 3, height, width]; gives [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, width, stride in ((3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 2)):
            layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))
