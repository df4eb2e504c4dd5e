"""PyTorch's engines for several workers around and inside an ORTModule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distributed.nets import STEPS, Net, Result, optimizer_of, seed_worker, share
from onnxtrain.ortmodule import ORTModule, Report

Wrap = Callable[[nn.Module], nn.Module]
"""ORTModule, or :func:`eager`."""
Engine = Callable[[nn.Module, Wrap], nn.Module]
"""Returns the model to call, of a module that it distributes."""


def eager(module: nn.Module) -> nn.Module:
    return module


def ddp(module: nn.Module, wrap: Wrap, **options: Any) -> nn.Module:
    return DistributedDataParallel(wrap(module), **options)


def ddp_inside(module: nn.Module, wrap: Wrap) -> nn.Module:
    return wrap(DistributedDataParallel(module))


def shard(module: nn.Module, wrap: Wrap, **options: Any) -> nn.Module:
    """Shard each layer by itself, and the rest."""
    for layer in module.layers:
        fully_shard(layer, **options)
    return wrap(fully_shard(module, **options))


def shard_root(module: nn.Module, wrap: Wrap) -> nn.Module:
    return wrap(fully_shard(module))


def shard_outside(module: nn.Module, wrap: Wrap) -> nn.Module:
    """Shard a module whose layers are ORTModules."""
    for index in range(len(module.layers)):
        module.layers[index] = wrap(module.layers[index])
    return fully_shard(module)


_fsdp1 = functools.partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp1(module: nn.Module, wrap: Wrap) -> nn.Module:
    return _fsdp1(wrap(module))


def fsdp1_inside(module: nn.Module, wrap: Wrap) -> nn.Module:
    return wrap(_fsdp1(module))


def is_ort(model: nn.Module) -> bool:
    # `isinstance` asks `__class__`, which is the wrapped module's.
    return ORTModule in type(model).__mro__


def report_of(model: nn.Module) -> Report | None:
    """Return the report of the first ORTModule that a model is or holds; None in eager PyTorch."""
    if is_ort(model):
        return model.report()
    # Not `model.modules()`, in which the wrapped module stands for an ORTModule.
    reports = [report_of(child) for child in model._modules.values() if child is not None]
    return next((report for report in reports if report is not None), None)


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a model on several workers with all its numbers, under the names of the plain module."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone() for name, value in state.items()}


def mean_over_workers(value: float) -> float:
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number)
    return number.item() / dist.get_world_size()


def train(
    net: Net,
    engine: Engine,
    wrap: Wrap = ORTModule,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of,
    steps: int = STEPS,
) -> Result:
    """Train a net on this worker's shares of the batches; "report" says where its graphs ran."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = engine(net.module(), wrap)
    sgd = optimizer(model)
    seed_worker(rank)
    losses = []
    for batch in net.batches(steps):
        sgd.zero_grad()
        loss = model(*share(batch, rank, world))
        loss.backward()
        sgd.step()
        losses.append(mean_over_workers(loss.item()))
    return {"losses": losses, "state": full_state(model), "report": report_of(model)}


ENGINES: dict[str, Engine] = {
    "ddp": ddp,
    "ddp inside": ddp_inside,
    "fully_shard": shard,
    "fully_shard root": shard_root,
    "fully_shard outside": shard_outside,
    "fsdp1": fsdp1,
    "fsdp1 inside": fsdp1_inside,
}
