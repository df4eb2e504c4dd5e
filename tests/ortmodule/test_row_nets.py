"""Nets whose time is that of gathers and scatters: graphs, point clouds, experts, embeddings, masked tokens.

Losses and gradients are compared with eager PyTorch in float64, in ORTModule and as an exported model that is trained
by the on-device API.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as fn

from onnxtrain import artifacts, optimizers
from onnxtrain.api import CheckpointState, Module, Optimizer
from ortmodule.eager import strict

RATE = 0.05
NODES, EDGES = 40, 150
_RNG = np.random.default_rng(1)
SOURCE, TARGET = (torch.from_numpy(row) for row in _RNG.integers(0, NODES, (2, EDGES)))
SEGMENTS = torch.from_numpy(_RNG.integers(0, 7, 90))


class Net(nn.Module):
    """Layers, and a function of them and the input."""

    def __init__(
        self, forward: Callable[[Net, torch.Tensor], torch.Tensor], *widths: tuple[int, int]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*width) for width in widths)
        self.function = forward
        for name, index in (("source", SOURCE), ("target", TARGET), ("segments", SEGMENTS)):
            self.register_buffer(name, index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def _attention(net: Net, x: torch.Tensor) -> torch.Tensor:
    """A layer of a graph attention net with four heads of three features."""
    h = net.layers[0](x).view(NODES, 4, 3)
    scores = fn.leaky_relu(net.layers[1](h)[net.source, :, 0] + net.layers[2](h)[net.target, :, 0], 0.2)
    rows = net.target[:, None].expand(-1, 4)
    top = torch.full((NODES, 4), -1e9, dtype=x.dtype).scatter_reduce(0, rows, scores, "amax")
    weights = torch.exp(scores - top.detach()[net.target])
    total = torch.zeros(NODES, 4, dtype=x.dtype).index_add(0, net.target, weights)
    weights = weights / (total[net.target] + 1e-16)
    sent = h[net.source] * weights[..., None]
    return net.layers[3](torch.zeros_like(h).index_add(0, net.target, sent).flatten(1))


def _messages(net: Net, x: torch.Tensor) -> torch.Tensor:
    sent = net.layers[0](x).index_select(1, net.source)
    received = torch.zeros_like(x).index_add(1, net.target, sent)
    return net.layers[1](torch.tanh(x + received))


def _pooled(how: str, include_self: bool) -> Callable[[Net, torch.Tensor], torch.Tensor]:
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = net.layers[0](x)
        rows = net.segments[:, None].expand_as(h)
        pooled = torch.zeros(8, 5, dtype=x.dtype).scatter_reduce(0, rows, h, how, include_self=include_self)
        return net.layers[1](torch.tanh(pooled / 4))

    return forward


def _neighbours(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Differences to the nearest points, as in edge convolutions."""
    h, points = net.layers[0](x), x.detach()
    places = (points[:, :, None] - points[:, None]).square().sum(-1).topk(4, largest=False).indices.flatten(1)
    rows = places.unsqueeze(-1).expand(-1, -1, 5)
    near = torch.take_along_dim(h, rows, 1).view(*x.shape[:2], 4, 5) - h[:, :, None]
    return net.layers[1](torch.tanh(near).sum(2))


def _masked(net: Net, x: torch.Tensor) -> torch.Tensor:
    """A masked autoencoder: some of the tokens, and back to their places."""
    order = x[..., 0].detach().argsort(1)
    h = net.layers[0](x)
    kept = h.gather(1, order[:, :4, None].repeat(1, 1, 5))
    filled = torch.cat([torch.tanh(kept), kept.mean(1, keepdim=True).expand(-1, x.shape[1] - 4, -1)], 1)
    return net.layers[1](filled.gather(1, order.argsort(1).unsqueeze(-1).expand(-1, -1, 5)))


def _experts(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The best two of three experts, each for as many rows as it has room for."""
    weights, chosen = fn.softmax(net.layers[0](x), -1).topk(2, -1)
    result = torch.zeros_like(x)
    for number, expert in enumerate(net.layers[1:4]):
        gate = torch.where(chosen == number, weights, 0.0).sum(-1)
        rows = gate.topk(x.shape[0] // 2).indices
        terms = torch.tanh(expert(x.index_select(0, rows))) * gate.index_select(0, rows)[:, None]
        result = result.index_add(0, rows, terms)
        result = result.scatter_add(0, rows[:, None].expand(-1, x.shape[1]), terms)
    return net.layers[4](result)


NETS: dict[str, tuple[Callable[[], Net], tuple[int, ...]]] = {
    "attention": (lambda: Net(_attention, (6, 12), (3, 1), (3, 1), (12, 5)), (NODES, 6)),
    "messages": (lambda: Net(_messages, (6, 6), (6, 5)), (3, NODES, 6)),
    **{
        f"{how} {'with' if own else 'without'} zeros": (
            lambda how=how, own=own: Net(_pooled(how, own), (6, 5), (5, 3)),
            (90, 6),
        )
        for how in ("sum", "mean", "amax", "amin")
        for own in (True, False)
    },
    "neighbours": (lambda: Net(_neighbours, (3, 5), (5, 3)), (2, 20, 3)),
    "masked": (lambda: Net(_masked, (6, 5), (5, 3)), (2, 10, 6)),
    "experts": (lambda: Net(_experts, (6, 3), (6, 6), (6, 6), (6, 6), (6, 5)), (20, 6)),
}


def _made(name: str) -> tuple[Net, torch.Tensor, torch.Tensor]:
    torch.manual_seed(len(name))
    make, shape = NETS[name]
    net = make()
    x = torch.randn(shape)
    return net, x, torch.randn_like(net(x))


def _losses(net: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = fn.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.torch
@pytest.mark.parametrize("name", NETS)
def test_in_ortmodule(name: str) -> None:
    net, x, y = _made(name)
    exact = _losses(copy.deepcopy(net).double(), x.double(), y.double())
    assert exact[-1] < exact[0]
    np.testing.assert_allclose(_losses(strict(net), x, y), exact, rtol=2e-6)


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["attention", "messages", "sum with zeros", "neighbours", "masked", "experts"]
)
def test_on_a_device(name: str, tmp_path: Path) -> None:
    net, x, y = _made(name)
    path = tmp_path / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, (x,), path, dynamo=True, optimize=False, verbose=False, external_data=False, input_names=["x"],
            output_names=["y"],
        )  # fmt: skip
    names = [key for key, _ in net.named_parameters()]
    artifacts.generate_artifacts(
        path, requires_grad=names, loss="mse", optimizer=optimizers.SGD(), artifact_directory=tmp_path
    )
    ops = {
        node.op_type.split("_")[0].rstrip("0123456789")
        for node in onnx.load(tmp_path / "training_model.onnx").graph.node
    }
    assert ops & {"ScatterRows", "EmbeddingGradient", "GatherRows"}
    if name not in ("attention", "experts"):
        assert not ops & {"ScatterElements", "GatherElements", "GatherND"}
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    losses = []
    for _ in range(4):
        losses.append(float(module(x.numpy(), y.numpy())))
        optimizer.step()
        module.lazy_reset_grad()
    exact = _losses(copy.deepcopy(net).double(), x.double(), y.double())
    np.testing.assert_allclose(losses, exact, rtol=2e-6)
