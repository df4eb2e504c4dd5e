"""PyTorch, eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from nets import ADAMW, make_batch, make_net
from timing import Engine, serve
from torch.nn import functional


def make(
    net: str, artifacts: Path, threads: int, wrap: Callable[..., torch.nn.Module] = lambda module: module
) -> Engine:
    torch.set_num_threads(threads)
    module = wrap(make_net(net))
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    inputs, labels = (torch.from_numpy(array) for array in make_batch(net))

    def gradients() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(module(inputs), labels)
        loss.backward()
        return loss.item()

    def update(rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()

    return Engine(gradients, update, {"torch": torch.__version__})


if __name__ == "__main__":
    serve(make)
