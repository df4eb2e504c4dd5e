"""Small torch networks with their loss inside, as users export them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Net:
    """A network that maps (input, target) to a scalar loss, and how to make a batch for it."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    batch_norm: bool = False


class WithLoss(nn.Module):
    """The loss of `net` on (input, target)."""

    def __init__(self, net: nn.Module, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net(x), target)


def _classifier(net: nn.Module) -> nn.Module:
    return WithLoss(net, functional.cross_entropy)


def mlp() -> nn.Module:
    return _classifier(
        nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 5))
    )


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for source, target in ((3, 8), (8, 12)):
        layers += [
            nn.Conv2d(source, target, 3, padding=1),
            nn.BatchNorm2d(target),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return _classifier(nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 16, 5)))


def _separable(source: int, target: int, stride: int) -> list[nn.Module]:
    return [
        nn.Conv2d(source, source, 3, stride=stride, padding=1, groups=source, bias=False),
        nn.BatchNorm2d(source),
        nn.Hardswish(),
        nn.Conv2d(source, target, 1, bias=False),
        nn.BatchNorm2d(target),
        nn.SiLU(),
    ]


def mobilenet() -> nn.Module:
    return _classifier(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            *_separable(8, 16, 1),
            *_separable(16, 24, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(24, 5),
        )
    )


class Encoder(nn.Module):
    """Token embedding, two post-norm transformer encoder layers, mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def encoder() -> nn.Module:
    return _classifier(Encoder())


def norms() -> nn.Module:
    return WithLoss(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(4, 8),
            nn.GELU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1),
            nn.LayerNorm([8, 8, 8]),
            nn.ELU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.LayerNorm(8 * 16),
            nn.Linear(8 * 16, 4),
        ),
        functional.mse_loss,
    )


def _images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 16, 16)


def _labels(batch: int) -> torch.Tensor:
    return torch.randint(0, 5, (batch,))


NETS = [
    Net("mlp", mlp, lambda b: (torch.randn(b, 20), _labels(b))),
    Net("cnn", cnn, lambda b: (_images(b), _labels(b)), batch_norm=True),
    Net("mobilenet", mobilenet, lambda b: (_images(b), _labels(b)), batch_norm=True),
    Net("encoder", encoder, lambda b: (torch.randint(0, 50, (b, 7)), _labels(b))),
    Net("norms", norms, lambda b: (_images(b), torch.randn(b, 4))),
]
