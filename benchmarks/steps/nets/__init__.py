"""The nets that are timed, and the cases: a net at a batch size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from steps.nets import (
    convolutional,
    dense,
    layers,
    sequences,
    unseen,
    unseen_sequences,
    untuned,
    updates,
)
from steps.nets._net import Net

__all__ = ["CASES", "Case", "Net", "make_batch", "make_net"]

NETS: dict[str, Net] = (
    dense.NETS
    | convolutional.NETS
    | sequences.NETS
    | untuned.NETS
    | unseen.NETS
    | unseen_sequences.NETS
    | layers.NETS
    | updates.NETS
)


@dataclass(frozen=True)
class Case:
    """A net at a batch size."""

    name: str
    net: Net
    batch: int


def _cases() -> dict[str, Case]:
    """The first batch size of a net goes by the name of the net, others by `<net>-b<size>`."""
    named = {}
    for name, net in NETS.items():
        for index, batch in enumerate(net.batches):
            case = Case(f"{name}-b{batch}" if index else name, net, batch)
            named[case.name] = case
    return named


CASES = _cases()


class _Mean(nn.Module):
    """The mean of output minus target, for a net that computes its own loss."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).mean()


LOSSES = {"cross_entropy": nn.CrossEntropyLoss, "mse": nn.MSELoss, "mean": _Mean}


class WithLoss(nn.Module):
    """A net and its loss as one module: `forward(inputs, target)` is the loss."""

    def __init__(self, net: nn.Module, loss: str) -> None:
        super().__init__()
        self.net = net
        self.loss = LOSSES[loss]()

    def forward(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net(inputs), target)


def make_net(case: Case) -> nn.Module:
    """Returns the net in training mode, with the same weights in every process."""
    torch.manual_seed(0)
    return case.net.make().train()


def make_batch(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and target, the same in every process."""
    return case.net.data(np.random.default_rng(0), case.batch)
