"""Options of PyTorch's engines, each trained on two workers under ORTModule and beside it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distributed.engines import (
    Engine,
    Wrap,
    ddp,
    ddp_inside,
    eager,
    fsdp1,
    full_state,
    mean_over_workers,
    report_of,
    shard,
    train,
)
from distributed.nets import NETS, Net, Result, optimizer_of, share
from onnxtrain.ortmodule import ORTModule

STEPS = 6
WIDTH = 8


class Perceptron(nn.Module):
    """Two linear layers, the first of which is as wide as all workers together like."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.layers = [self.up, self.down]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).pow(2).mean()


class Unused(Perceptron):
    """A net with a layer that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


class OneMatrix(nn.Module):
    """A net with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).pow(2).mean()


def _numbers(random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(8, WIDTH, generator=random),)


PERCEPTRON, UNUSED, ONE_MATRIX = Net(Perceptron, _numbers), Net(Unused, _numbers), Net(OneMatrix, _numbers)
ENCODER = NETS["encoder"]


def _pair(net: Net, engine: Engine, **options: Any) -> dict[str, Result]:
    """Train under ORTModule and in eager PyTorch by the same engine."""
    run = functools.partial(train, net, engine, steps=STEPS, **options)
    return {"ours": run(), "theirs": run(eager)}


def _with_hook(hook: Callable[..., Any], make_state: Callable[[], Any] = lambda: None) -> Engine:
    def engine(module: nn.Module, wrap: Wrap) -> nn.Module:
        model = ddp(module, wrap)
        model.register_comm_hook(make_state(), hook)
        return model

    return engine


def _low_rank() -> Any:
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
    return powerSGD_hook.PowerSGDState(None, **options)


def _zero(module: nn.Module) -> torch.optim.Optimizer:
    # Importing it (PyTorch 2.13) warns that `torch.jit.script` is deprecated, which the settings of the tests forbid.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)


def accumulated(engine: Engine, wrap: Wrap = ORTModule) -> Result:
    """Train with an optimizer step every second batch, and without exchange of gradients in between."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = engine(PERCEPTRON.module(), wrap)
    sgd = optimizer_of(model)
    losses = []
    for index, batch in enumerate(PERCEPTRON.batches(STEPS)):
        last = index % 2 == 1
        waiting = contextlib.nullcontext()
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        elif not last:
            waiting = model.no_sync()
        with waiting:
            loss = model(*share(batch, rank, world))
            (loss / 2).backward()
        if last:
            sgd.step()
            sgd.zero_grad()
        losses.append(mean_over_workers(loss.item()))
    return {"losses": losses, "state": full_state(model), "report": report_of(model)}


class Copy(torch.autograd.Function):
    """The same input for all workers: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        ct = ct.clone()
        dist.all_reduce(ct)
        return ct


class Sum(torch.autograd.Function):
    """The sum of all workers' inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return ct


class ParallelPerceptron(nn.Module):
    """A Perceptron of which each worker holds some columns of the first layer, and their rows of the second."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        rank, width = dist.get_rank(), 2 * WIDTH // dist.get_world_size()
        part = slice(rank * width, (rank + 1) * width)
        self.up = nn.Linear(WIDTH, width)
        self.down = nn.Linear(width, WIDTH, bias=False)
        self.bias = nn.Parameter(whole.down.bias.detach().clone())
        with torch.no_grad():
            self.up.weight.copy_(whole.up.weight[part])
            self.up.bias.copy_(whole.up.bias[part])
            self.down.weight.copy_(whole.down.weight[:, part])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (Sum.apply(self.down(torch.tanh(self.up(Copy.apply(x))))) + self.bias).pow(2).mean()

    def whole_state(self) -> dict[str, torch.Tensor]:
        def gather(value: torch.Tensor, dim: int) -> torch.Tensor:
            parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, value.detach().contiguous())
            return torch.cat(parts, dim)

        return {
            "up.weight": gather(self.up.weight, 0),
            "up.bias": gather(self.up.bias, 0),
            "down.weight": gather(self.down.weight, 1),
            "down.bias": self.bias.detach(),
        }


def _same_batches(model: nn.Module) -> list[float]:
    """Train on whole batches, which all workers of a tensor-parallel model get."""
    sgd = optimizer_of(model)
    losses = []
    for batch in PERCEPTRON.batches(STEPS):
        sgd.zero_grad()
        loss = model(*batch)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    return losses


def by_parallel_layers() -> Result:
    model = ORTModule(ParallelPerceptron(PERCEPTRON.module()))
    losses = _same_batches(model)
    return {"losses": losses, "state": model.module.whole_state(), "report": model.report()}


def by_dtensor() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = ORTModule(parallelize_module(PERCEPTRON.module(), mesh, plan))
    losses = _same_batches(model)
    return {"losses": losses, "state": full_state(model), "report": model.report()}


def resumed(engine: Engine) -> Result:
    """Train, save by torch.distributed.checkpoint after half of the steps, and resume with another model."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = Path(f"saved-{engine.__name__}").resolve()
    batches = PERCEPTRON.batches(STEPS)
    losses: list[float] = []
    for part in (batches[: STEPS // 2], batches[STEPS // 2 :]):
        model = engine(PERCEPTRON.module(), ORTModule)
        sgd = optimizer_of(model)
        if losses:
            state, of_optimizer = get_state_dict(model, sgd)
            dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
            set_state_dict(model, sgd, model_state_dict=state, optim_state_dict=of_optimizer)
        for batch in part:
            sgd.zero_grad()
            loss = model(*share(batch, rank, world))
            loss.backward()
            sgd.step()
            losses.append(mean_over_workers(loss.item()))
        state, of_optimizer = get_state_dict(model, sgd)
        if len(losses) < STEPS:
            dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
    return {"losses": losses, "state": full_state(model), "folder": folder}


def sync_batch_norm() -> dict[str, str]:
    """Call SyncBatchNorm in training and in eval mode; return what is raised in training."""
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    x = torch.ones(3, 4)
    model = ORTModule(module)
    raised = {}
    for name, called in (("theirs", module), ("ours", model)):
        try:
            called(x)
        except ValueError as error:
            raised[name] = str(error)
    module.eval()
    torch.testing.assert_close(model(x), module(x))
    return raised


def states(engine: Engine) -> Result:
    """Exchange state dicts between a model under ORTModule and one in eager PyTorch."""
    ours, theirs = engine(ENCODER.module(), ORTModule), engine(ENCODER.module(), eager)
    optimizers = [optimizer_of(ours), optimizer_of(theirs)]
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(batch: tuple[torch.Tensor, ...]) -> None:
        for model, sgd in zip((ours, theirs), optimizers, strict=True):
            torch.manual_seed(rank)  # the same dropout
            sgd.zero_grad()
            model(*share(batch, rank, world)).backward()
            sgd.step()

    first, second = ENCODER.batches(2)
    step(first)
    result: Result = {"same": full_state(ours).keys() == full_state(theirs).keys()}
    # Each resumes from the other's checkpoint.
    of_ours, of_theirs = get_state_dict(ours, optimizers[0]), get_state_dict(theirs, optimizers[1])
    for (weights, moments), model, sgd in (
        (of_theirs, ours, optimizers[0]),
        (of_ours, theirs, optimizers[1]),
    ):
        set_state_dict(model, sgd, model_state_dict=weights, optim_state_dict=moments)
    step(second)
    result["stepped"] = [full_state(ours), full_state(theirs)]
    # From worker 0 to all others, which pass nothing.
    full = (
        {name: torch.full_like(value, 0.5) for name, value in full_state(theirs).items()} if rank == 0 else {}
    )
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    told = set_model_state_dict(ours, full, options=from_rank_0)
    result["told"] = [*told.missing_keys, *told.unexpected_keys]
    result["sent"] = mean_over_workers(float(all((p == 0.5).all() for p in full_state(ours).values())))
    return result


def _bfloat16() -> dict[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _pair(ENCODER, functools.partial(shard, mp_policy=policy))


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    # Beside the same engine in eager PyTorch.
    "static graph": lambda: _pair(PERCEPTRON, functools.partial(ddp, static_graph=True)),
    "unused parameters": lambda: _pair(UNUSED, functools.partial(ddp, find_unused_parameters=True)),
    "unused, static": lambda: _pair(UNUSED, functools.partial(ddp, static_graph=True)),
    "bucket views": lambda: _pair(PERCEPTRON, functools.partial(ddp, gradient_as_bucket_view=True)),
    "all-reduce hook": lambda: _pair(PERCEPTRON, _with_hook(default_hooks.allreduce_hook)),
    "float16 hook": lambda: _pair(PERCEPTRON, _with_hook(default_hooks.fp16_compress_hook)),
    # With one parameter: the hook draws for the parameters in the order in which their gradients come.
    "PowerSGD hook": lambda: _pair(ONE_MATRIX, _with_hook(powerSGD_hook.powerSGD_hook, _low_rank)),
    "sharded optimizer": lambda: _pair(PERCEPTRON, ddp, optimizer=_zero),
    "offloaded": lambda: _pair(ENCODER, functools.partial(shard, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "kept after forward": lambda: _pair(ENCODER, functools.partial(shard, reshard_after_forward=False)),
    "bfloat16": _bfloat16,
    # Beside one process.
    "no_sync of ddp": lambda: accumulated(ddp),
    "no_sync inside": lambda: accumulated(ddp_inside),
    "no_sync of fsdp1": lambda: accumulated(fsdp1),
    "no_sync of fully_shard": lambda: accumulated(shard),
    "synchronised BatchNorm": sync_batch_norm,
    "parallel layers": by_parallel_layers,
    "dtensor": by_dtensor,
    "states of ddp": lambda: states(ddp),
    "states of ddp inside": lambda: states(ddp_inside),
    "resumed ddp": lambda: resumed(ddp),
    "resumed fully_shard": lambda: resumed(shard),
    "resumed fsdp1": lambda: resumed(fsdp1),
}  # fmt: skip
