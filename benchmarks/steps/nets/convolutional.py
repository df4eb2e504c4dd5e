"""Convolutional nets."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from steps.nets._net import CLASSES, Batch, Net, labels, normal

__all__ = ["NETS"]


def cnn() -> nn.Module:
    """Three blocks of conv 3x3, batch norm, relu, max-pool."""
    layers: list[nn.Module] = []
    for source, target in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(source, target, 3, padding=1),
            nn.BatchNorm2d(target),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, CLASSES))


def _block(
    source: int, target: int, kernel: int, stride: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU
) -> list[nn.Module]:
    return [
        nn.Conv2d(source, target, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(target),
        act(),
    ]


def mobilenet() -> nn.Module:
    """Depthwise separable convolutions, as in MobileNet v1."""
    layers = _block(3, 32, 3, 2)
    for source, target, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
        layers += [*_block(source, source, 3, stride, source), *_block(source, target, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES))


class _InvertedResidual(nn.Module):
    """Expand, depthwise, project, as in MobileNet v2; a residual where shapes agree."""

    def __init__(self, source: int, target: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = source * expansion
        expand = _block(source, hidden, 1, act=nn.ReLU6) if expansion > 1 else []
        self.layers = nn.Sequential(
            *expand, *_block(hidden, hidden, 3, stride, hidden, nn.ReLU6), *_block(hidden, target, 1)[:2]
        )
        self.residual = stride == 1 and source == target

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


def mobilenet_v2() -> nn.Module:
    """Inverted residuals with ReLU6, as in MobileNet v2."""
    layers: list[nn.Module] = _block(3, 16, 3, 2, act=nn.ReLU6)
    source = 16
    for expansion, target, count, stride in ((1, 16, 1, 1), (4, 24, 2, 2), (4, 32, 3, 2), (4, 64, 2, 2)):
        for index in range(count):
            layers.append(_InvertedResidual(source, target, stride if index == 0 else 1, expansion))
            source = target
    layers += _block(source, 256, 1, act=nn.ReLU6)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES))


class _Basic(nn.Module):
    """Two 3x3 convolutions and a residual, as in ResNet-18."""

    def __init__(self, source: int, target: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_block(source, target, 3, stride), *_block(target, target, 3)[:2])
        same = stride == 1 and source == target
        self.shortcut = nn.Identity() if same else nn.Sequential(*_block(source, target, 1, stride)[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x))


def resnet18(width: int = 32) -> nn.Module:
    """ResNet-18 for images of 32x32, with half of its channels."""
    layers: list[nn.Module] = _block(3, width, 3)
    source = width
    for index in range(4):
        target = width << index
        layers += [_Basic(source, target, 1 if index == 0 else 2), _Basic(target, target, 1)]
        source = target
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(source, CLASSES))


class _Double(nn.Sequential):
    """Two convolutions with GroupNorm and SiLU."""

    def __init__(self, source: int, target: int) -> None:
        parts: list[nn.Module] = []
        for channels in (source, target):
            parts += [nn.Conv2d(channels, target, 3, padding=1), nn.GroupNorm(8, target), nn.SiLU()]
        super().__init__(*parts)


class UNet(nn.Module):
    """Two levels down by max-pool, two up by ConvTranspose, skips by Concat."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = _Double(3, width), _Double(width, 2 * width)
        self.middle = _Double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.third, self.fourth = _Double(4 * width, 2 * width), _Double(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(functional.max_pool2d(first, 2))
        middle = self.middle(functional.max_pool2d(second, 2))
        third = self.third(torch.cat([self.up2(middle), second], 1))
        return self.head(self.fourth(torch.cat([self.up1(third), first], 1)))


def _images(size: int):
    def data(rng: np.random.Generator, batch: int) -> Batch:
        return normal(rng, batch, 3, size, size), labels(rng, batch)

    return data


NETS = {
    "cnn": Net("CNN: 3 x [conv 3x3, BN, ReLU, max-pool], 3x32x32", cnn, _images(32), (32, 1), images=True),
    "mobilenet": Net("MobileNet v1-like, 3x64x64", mobilenet, _images(64), (32,), images=True),
    "mobilenetv2": Net("MobileNet v2-like, 3x64x64", mobilenet_v2, _images(64), (32, 1), images=True),
    "resnet18": Net("ResNet-18, half width, 3x32x32", resnet18, _images(32), (32, 1), images=True),
    "unet": Net(
        "U-Net with ConvTranspose and GroupNorm, 3x64x64",
        UNet,
        lambda rng, batch: (normal(rng, batch, 3, 64, 64), normal(rng, batch, 3, 64, 64)),
        (8, 1),
        loss="mse",
        images=True,
    ),
}
