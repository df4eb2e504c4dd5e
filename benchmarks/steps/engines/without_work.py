"""PyTorch's loop around a captured graph of which nothing is computed: what Dynamo and autograd themselves ask for.

The graph has the inputs, the result and the gradients of the net; a function of autograd gives back tensors that were
made before. No way of running a captured module from Python takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from steps.engines._engine import Engine, Job
from steps.engines.in_torch import start_training

__all__ = ["make"]


def make(job: Job) -> Callable[[], Engine]:
    """Returns what starts the engine."""
    return start_training(job, lambda module: torch.compile(module, backend=_computing_nothing))


def _computing_nothing(
    graph_module: torch.fx.GraphModule, examples: Sequence[Any]
) -> Callable[..., tuple[torch.Tensor]]:
    """A backend of torch.compile for graphs with one result, a loss."""
    loss = torch.ones(())

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor]:
        return (_Nothing.apply(loss, *inputs),)

    return run


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *[torch.empty_like(x) if x.requires_grad else None for x in ctx.saved_tensors])
