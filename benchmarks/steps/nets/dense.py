"""Dense nets: a classifier, a forecaster, and text as a bag of embeddings."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from onnxtrain.nn import RINorm
from steps.nets._net import CLASSES, Net, labels, normal

__all__ = ["NETS"]


def tiny() -> nn.Module:
    """Dense net 8-16-10, for tests of the benchmark itself."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def mlp() -> nn.Module:
    """Dense net 784-256-128-10."""
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )


class _Mixer(nn.Module):
    """A TSMixer block: a dense layer over time, then two over features, each with a LayerNorm and a residual."""

    def __init__(self, length: int, width: int, hidden: int) -> None:
        super().__init__()
        self.time_norm, self.feature_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.time = nn.Linear(length, length)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = functional.relu(self.time(self.time_norm(x).transpose(1, 2))).transpose(1, 2)
        x = x + mixed
        return x + self.down(functional.relu(self.up(self.feature_norm(x))))


class TSMixer(nn.Module):
    """TSMixer over series that a reversible instance norm takes in and gives back."""

    def __init__(
        self, length: int = 96, horizon: int = 24, channels: int = 8, width: int = 64, blocks: int = 4
    ) -> None:
        super().__init__()
        self.norm = RINorm(channels)
        self.into, self.out = nn.Linear(channels, width), nn.Linear(width, channels)
        self.blocks = nn.Sequential(*(_Mixer(length, width, 2 * width) for _ in range(blocks)))
        self.head = nn.Linear(length, horizon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.into(self.norm(x)))
        future = self.out(self.head(hidden.transpose(1, 2)).transpose(1, 2))
        return self.norm.inverse(future.unsqueeze(-1)).squeeze(-1)


class Text(nn.Module):
    """Mean of word embeddings, then a dense net: nearly all parameters are rows that a batch has not."""

    def __init__(self, words: int = 30_000, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.dense = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, CLASSES))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.dense(self.embedding(tokens).mean(1))


NETS = {
    "tiny": Net(
        "dense 8-16-10, for tests", tiny, lambda rng, batch: (normal(rng, batch, 8), labels(rng, batch)), (4,)
    ),
    "mlp": Net(
        "MLP 784-256-128-10", mlp, lambda rng, batch: (normal(rng, batch, 784), labels(rng, batch)), (64, 1)
    ),
    "tsmixer": Net(
        "TSMixer with RINorm, 4 blocks, width 64, 96 steps to 24",
        TSMixer,
        lambda rng, batch: (normal(rng, batch, 96, 8), normal(rng, batch, 24, 8)),
        (32, 1),
        loss="mse",
    ),
    "text": Net(
        "bag of 64 words, 30,000 embeddings of 128",
        Text,
        lambda rng, batch: (rng.integers(0, 30_000, (batch, 64)), labels(rng, batch)),
        (32, 1),
    ),
}
