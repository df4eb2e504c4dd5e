"""Training steps of whole models in ONNX Runtime against eager PyTorch, with float64 as the judge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortmodule.eager import error, strict

pytestmark = pytest.mark.torch

STEPS = 20


class ResidualBlock(nn.Module):
    """Two convolutions, the first with a stride or dilation and groups, and a projection past them."""

    def __init__(self, inputs: int, outputs: int, stride: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, groups, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.past = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.past(x))


class InvertedResidual(nn.Module):
    """The block of MobileNetV2: expand, filter each channel, project."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class UNet(nn.Module):
    """One level down and up twice: once by a transposed convolution, once by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.down = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()
        )
        self.bottom = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU())
        self.up1 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.up2 = nn.Upsample(scale_factor=2, mode="bilinear")
        self.last = nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        down = self.down(first)
        up = torch.cat([self.up1(self.bottom(down)), down], dim=1)
        return self.last(torch.cat([self.up2(up), first], dim=1))


class Recurrent(nn.Module):
    """A recurrent layer and a classifier on its last output."""

    def __init__(self, layer: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer = layer(5, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


class MaskedAttention(nn.Module):
    """Attention with a causal and a padding mask; the average weights are a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        padding = torch.zeros(x.shape[0], length, dtype=torch.bool)
        padding[:, -1] = True
        y, weights = self.attention(x, x, x, key_padding_mask=padding, attn_mask=causal)
        return self.head(y.mean(1)) + weights.sum((1, 2), keepdim=True)[..., 0]


class Encoder(nn.Module):
    """A TransformerEncoder with dropout, mean pooling and a classifier."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            12, 3, 24, dropout=0.2, activation="gelu", batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.LeakyReLU(0.1), nn.Linear(16, 3))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        ResidualBlock(8, 8, 2),
        ResidualBlock(8, 16, 1, dilation=2, groups=4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def mobilenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, stride=2, padding=1),
        InvertedResidual(8),
        nn.Hardswish(),
        InvertedResidual(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "mlp": (mlp, (8, 6), (8,)),
    "resnet": (resnet, (4, 2, 16, 16), (4,)),
    "mobilenet": (mobilenet, (4, 2, 12, 12), (4,)),
    "unet": (UNet, (2, 2, 8, 12), (2, 8, 12)),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2), (4, 7, 5), (4,)),
    "bilstm": (lambda: Recurrent(nn.LSTM, bidirectional=True), (4, 7, 5), (4,)),
    "gru": (lambda: Recurrent(nn.GRU, num_layers=2), (4, 7, 5), (4,)),
    "encoder": (lambda: Encoder(norm_first=False), (4, 6, 12), (4,)),
    "encoder_norm_first": (lambda: Encoder(norm_first=True), (4, 6, 12), (4,)),
    "masked_attention": (MaskedAttention, (4, 6, 12), (4,)),
}
"""Model, shape of its input, shape of the labels (three classes)."""


def _train(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Returns the losses, then the parameters and buffers after all steps, in float64."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(7)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [value.detach().double() for value in (torch.stack(losses), *model.state_dict().values())]


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_eager_pytorch(name: str) -> None:
    """No graph may fall back. Dropout draws the same in both precisions, so float64 judges it too."""
    make, shape, label_shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    inputs, labels = torch.randn(shape), torch.randint(3, label_shape)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()

    torch._dynamo.reset()
    wrapped = strict(model)
    got = _train(wrapped, inputs, labels)
    eager = _train(plain, inputs, labels)
    want = _train(exact, inputs.double(), labels)
    assert error(got, want) <= 3 * error(eager, want) + 1e-6
    assert wrapped.report().runs_in_onnxruntime
    assert len(wrapped.report().graphs) == 1
