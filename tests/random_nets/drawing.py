"""Draws networks of ordinary layers: images, sequences and tables."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["Net", "draw"]


@dataclass(frozen=True)
class Net:
    """A network with data for it.

    Attributes:
        module: gives class scores, float32 [batch, classes].
        inputs: per step, a batch for the module, e.g. float32 [batch, channels, height, width].
        labels: per step, int64 [batch].
    """

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Branches(nn.Module):
    """Concatenates the results of two layers along the channels."""

    def __init__(self, first: nn.Module, second: nn.Module, axis: int) -> None:
        super().__init__()
        self.first, self.second, self.axis = first, second, axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(x), self.second(x)], self.axis)


class InstanceNorm(nn.InstanceNorm2d):
    """Only scales images of one pixel, which PyTorch refuses to normalize."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)
            if x[0, 0].numel() == 1
            else super().forward(x)
        )


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class Attention(nn.Module):
    """Scaled dot product attention of two heads, in the three ways that networks write it."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        if self.kind == "written":
            h = (q @ k.transpose(-1, -2) / (width // 2) ** 0.5).softmax(-1) @ v
        else:
            h = F.scaled_dot_product_attention(q, k, v, is_causal=self.kind == "causal")
        return self.out(h.transpose(1, 2).reshape(batch, length, width))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class RMSNorm(nn.Module):
    """Written out: the TorchScript exporter (PyTorch 2.13) has no `aten::rms_norm` at opset 17."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class AlongTime(nn.Module):
    """Applies a layer for [batch, channels, time] to [batch, time, channels]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Mean(nn.Module):
    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.axes)


def draw(seed: int) -> Net:
    """Draws a network; a seed gives the same one on every machine."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    make = choose.choice([_image_net, _image_net, _sequence_net, _table_net])
    return make(choose)


def _activation(choose: random.Random) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        nn.ReLU, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.ReLU6, nn.Hardswish, nn.ELU, nn.LeakyReLU, nn.Sigmoid,
        lambda: nn.GELU("tanh"), nn.PReLU, nn.Softplus, nn.Mish,
    ]  # fmt: skip
    return choose.choice(kinds)()


def _labelled(choose: random.Random, module: nn.Module, classes: int, *shape: int) -> Net:
    batches = [choose.choice([2, 3, 5, 8]) for _ in range(2)]
    return Net(
        module,
        tuple(torch.randn(batch, *shape) for batch in batches),
        tuple(torch.randint(classes, (batch,)) for batch in batches),
    )


# Images


def _norm2d(choose: random.Random, channels: int) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.BatchNorm2d(channels),
        lambda: nn.BatchNorm2d(channels, momentum=0.3, eps=1e-3),
        lambda: nn.GroupNorm(choose.choice([1, 2]), channels),
        lambda: InstanceNorm(channels, affine=True),
        nn.Identity,
    ]
    return choose.choice([kinds[0], *kinds])()


def _conv2d(choose: random.Random, channels: int, out: int) -> nn.Module:
    kernel, dilation = choose.choice([1, 1, 3, 3, 3, 5]), choose.choice([1, 1, 1, 2])
    groups = choose.choice([1, 1, 1, 2, channels])
    out = channels if groups == channels else out
    padding = dilation * (kernel // 2)
    mode = choose.choice(["zeros", "zeros", "zeros", "reflect"]) if padding < 4 else "zeros"
    return nn.Conv2d(
        channels,
        out,
        kernel,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=choose.random() < 0.5,
        padding_mode=mode,
    )


def _image_block(choose: random.Random, channels: int) -> tuple[nn.Module, int]:
    kind = choose.choice(["plain", "plain", "residual", "down", "pool", "up", "branches", "excite"])
    if kind == "residual":
        conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        inner = nn.Sequential(conv, _norm2d(choose, channels), _activation(choose))
        return Residual(inner), channels
    if kind == "down":
        out = choose.choice([4, 6, 8])
        kernel = choose.choice([2, 3])
        return nn.Sequential(nn.Conv2d(channels, out, kernel, 2, 1), _norm2d(choose, out)), out
    if kind == "pool":
        pools: list[Callable[[], nn.Module]] = [
            lambda: nn.MaxPool2d(2),
            lambda: nn.MaxPool2d(3, 2, 1),
            lambda: nn.AvgPool2d(2),
            lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False),
            lambda: nn.MaxPool2d(3, 1, 1),
        ]
        return nn.Sequential(_norm2d(choose, channels), nn.ReLU(), choose.choice(pools)()), channels
    if kind == "up":
        out = choose.choice([4, 6])
        ups: list[Callable[[], nn.Module]] = [
            lambda: nn.ConvTranspose2d(channels, out, 2, 2),
            lambda: nn.ConvTranspose2d(channels, out, 3, 2, 1, output_padding=1),
            lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(channels, out, 3, padding=1)),
        ]
        return nn.Sequential(nn.AvgPool2d(2), choose.choice(ups)()), out
    if kind == "branches":
        return Branches(nn.Conv2d(channels, 4, 1), nn.Conv2d(channels, 4, 3, padding=1), 1), 8
    if kind == "excite":
        return SqueezeExcite(channels), channels
    conv = _conv2d(choose, channels, choose.choice([4, 6, 8]))
    assert isinstance(conv, nn.Conv2d)
    out = conv.out_channels
    return nn.Sequential(conv, _norm2d(choose, out), _activation(choose)), out


def _image_net(choose: random.Random) -> Net:
    channels = choose.choice([1, 3, 4])
    size = choose.choice([12, 16, 20])
    blocks: list[nn.Module] = [nn.Conv2d(channels, 4, 3, padding=1)]
    width = 4
    for _ in range(choose.randint(2, 5)):
        block, width = _image_block(choose, width)
        blocks.append(block)
    classes = choose.choice([2, 5])
    blocks += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    return _labelled(choose, nn.Sequential(*blocks), classes, channels, size, size)


# Sequences


def _sequence_block(choose: random.Random, width: int) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Sequential(nn.Linear(width, 2 * width), _activation(choose), nn.Linear(2 * width, width)),
        lambda: Residual(nn.Sequential(nn.LayerNorm(width), Attention(width, "written"))),
        lambda: Residual(nn.Sequential(RMSNorm(width), Attention(width, "causal"))),
        lambda: Residual(nn.Sequential(nn.LayerNorm(width), Attention(width, "full"))),
        lambda: nn.TransformerEncoderLayer(width, 2, 12, dropout=0.0, batch_first=True, norm_first=True),
        lambda: Recurrent(nn.LSTM(width, width, batch_first=True)),
        lambda: Recurrent(nn.GRU(width, width // 2, batch_first=True, bidirectional=True)),
        lambda: Recurrent(nn.RNN(width, width, batch_first=True)),
        lambda: AlongTime(nn.Conv1d(width, width, 3, padding=1, groups=choose.choice([1, width]))),
        lambda: AlongTime(nn.BatchNorm1d(width)),
        lambda: nn.LayerNorm(width),
        lambda: RMSNorm(width),
        lambda: _activation(choose),
    ]
    return choose.choice(kinds)()


def _sequence_net(choose: random.Random) -> Net:
    width, length, features = choose.choice([4, 8]), choose.choice([3, 7, 12]), choose.choice([1, 5])
    blocks: list[nn.Module] = [nn.Linear(features, width)]
    blocks += [_sequence_block(choose, width) for _ in range(choose.randint(2, 5))]
    classes = choose.choice([2, 4])
    blocks += [Mean(1), nn.Linear(width, classes)]
    return _labelled(choose, nn.Sequential(*blocks), classes, length, features)


# Tables


def _table_block(choose: random.Random, width: int) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Sequential(nn.Linear(width, width), _activation(choose)),
        lambda: nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()),
        lambda: Residual(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), _activation(choose))),
        lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.GLU()),
        lambda: nn.Softmax(-1),
        lambda: Branches(nn.Linear(width, width // 2), nn.Linear(width, width - width // 2), 1),
    ]
    return choose.choice(kinds)()


def _table_net(choose: random.Random) -> Net:
    features, width = choose.choice([1, 3, 10]), choose.choice([4, 9, 16])
    blocks: list[nn.Module] = [nn.Linear(features, width)]
    blocks += [_table_block(choose, width) for _ in range(choose.randint(1, 5))]
    classes = choose.choice([2, 7])
    return _labelled(choose, nn.Sequential(*blocks, nn.Linear(width, classes)), classes, features)
