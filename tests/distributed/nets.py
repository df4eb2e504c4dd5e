"""Three nets to train on several workers, and their training in one process of eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

STEPS = 20
BATCH = 8
CLASSES = 3
TOKENS = 24

Result = dict[str, Any]
"""The result of a training: "losses", one per step as a mean over the workers, and "state", a full state dict."""


class Encoder(nn.Module):
    """A Transformer's encoder with dropout in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x.mean(1)), classes)


class Convolutions(nn.Module):
    """A convolutional net with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            for channels in (2, 8)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            images = layer(images)
        return nn.functional.cross_entropy(self.head(images.mean((2, 3))), classes)


class LanguageModel(nn.Module):
    """GPT-2 with random weights, whose head is its embedding; without dropout."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"vocab_size": TOKENS, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
        self.net = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))

    # No attribute, under which `state_dict` would have the layers twice.
    @property
    def layers(self) -> nn.ModuleList:
        return self.net.transformer.h

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(input_ids=tokens, labels=tokens, use_cache=False).loss


def _tokens(random: torch.Generator) -> torch.Tensor:
    return torch.randint(0, TOKENS, (BATCH, 8), generator=random)


def _classes(random: torch.Generator) -> torch.Tensor:
    return torch.randint(0, CLASSES, (BATCH,), generator=random)


@dataclass(frozen=True)
class Net:
    """A net and its batches.

    Attributes:
        make: makes the module, whose forward takes a batch and returns the loss, and whose `layers` are sharded.
        draw: draws a batch.
    """

    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[torch.Tensor, ...]]

    def module(self) -> nn.Module:
        """Return the module with its first parameters, which are the same in every process."""
        torch.manual_seed(0)
        return self.make()

    def batches(self, steps: int = STEPS) -> list[tuple[torch.Tensor, ...]]:
        random = torch.Generator().manual_seed(1)
        return [self.draw(random) for _ in range(steps)]


NETS = {
    "encoder": Net(Encoder, lambda random: (_tokens(random), _classes(random))),
    "convolutions": Net(
        Convolutions, lambda random: (torch.randn(BATCH, 2, 6, 6, generator=random), _classes(random))
    ),
    "gpt2": Net(LanguageModel, lambda random: (_tokens(random),)),
}


def share(batch: tuple[torch.Tensor, ...], rank: int, world: int) -> tuple[torch.Tensor, ...]:
    """Return a worker's samples of a batch, every `world`-th as torch's DistributedSampler hands them out."""
    return tuple(part[rank::world] for part in batch)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def seed_worker(rank: int) -> None:
    """Give each worker dropout masks of its own."""
    torch.manual_seed(100 + rank)


def in_one_process(net: Net, world: int, steps: int = STEPS) -> Result:
    """Train in eager PyTorch, in one process, on the shares of all workers in turn.

    A share is computed with the dropout masks of its worker and with its own BatchNorm statistics, as each worker
    does; running statistics are those of worker 0. Without dropout and BatchNorm this is a step on the whole batch.
    """
    module = net.module()
    optimizer = optimizer_of(module)
    states = []
    for rank in range(world):
        seed_worker(rank)
        states.append(torch.get_rng_state())
    losses = []
    for batch in net.batches(steps):
        optimizer.zero_grad()
        total = 0.0
        statistics = [buffer.clone() for buffer in module.buffers()]
        of_worker_0 = statistics
        for rank in range(world):
            for buffer, value in zip(module.buffers(), statistics, strict=True):
                buffer.copy_(value)
            torch.set_rng_state(states[rank])
            loss = module(*share(batch, rank, world)) / world
            loss.backward()
            states[rank] = torch.get_rng_state()
            total += loss.item()
            if rank == 0:
                of_worker_0 = [buffer.clone() for buffer in module.buffers()]
        for buffer, value in zip(module.buffers(), of_worker_0, strict=True):
            buffer.copy_(value)
        optimizer.step()
        losses.append(total)
    return {"losses": losses, "state": copy.deepcopy(module.state_dict())}


def on_whole_batches(net: Net, steps: int = STEPS) -> Result:
    """Train in eager PyTorch, in one process, on whole batches."""
    module = net.module()
    losses = train_on(module, optimizer_of(module), net.batches(steps))
    return {"losses": losses, "state": module.state_dict()}


def train_on(module: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> list[float]:
    """Take one step per batch with a module that returns its loss; return the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def difference(ours: Result, theirs: Result) -> float:
    """Return the largest difference of losses, parameters and buffers.

    Raises:
        AssertionError: names, shapes or the number of losses differ.
    """
    assert len(ours["losses"]) == len(theirs["losses"])
    assert list(ours["state"]) == list(theirs["state"])
    largest = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    for name, value in theirs["state"].items():
        assert ours["state"][name].shape == value.shape, name
        largest = max(largest, (ours["state"][name].double() - value.double()).abs().max().item())
    return largest
