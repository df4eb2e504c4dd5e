"""Gradients of deep nets with BatchNorm over two samples are as near to float64 as eager float32's are."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


class Layer(nn.Module):
    """Of a DenseNet. SiLU has no kink: behind a ReLU the side that rounding chooses decides about the error."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        bottleneck = nn.Conv2d(channels, 8, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels), nn.SiLU(), *bottleneck, nn.Conv2d(8, 2, 3, padding=1, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.layers(x)], 1)


def dense_net(depth: int = 6) -> nn.Sequential:
    layers = [Layer(4 + 2 * place) for place in range(depth)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 + 2 * depth, 3)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers, *head)


def gradients(net: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    net.zero_grad()
    nn.functional.cross_entropy(net(x), labels).backward()
    return torch.cat([p.grad.double().flatten() for p in net.parameters()])


def test_errors_are_those_of_eager_float32() -> None:
    torch.manual_seed(0)
    plain = dense_net()
    module = copy.deepcopy(plain)
    ours = ORTModule(module)
    logarithms = []
    for seed in range(6):
        torch.manual_seed(seed)
        start = dense_net().state_dict()
        x, labels = torch.randn(2, 3, 8, 8), torch.randint(0, 3, (2,))
        for net in (plain, module):
            net.load_state_dict(start)
        wide = copy.deepcopy(plain).double()
        true = gradients(wide, x.double(), labels)
        eager, got = ((gradients(net, x, labels) - true).norm() for net in (plain, ours))
        logarithms.append(float((got / eager).log()))
    assert np.exp(np.mean(logarithms)) < 1.5, np.exp(logarithms)
