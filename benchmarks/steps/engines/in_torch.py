"""PyTorch: eager or `torch.compile`, contiguous or channels_last, with its fused AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch

from steps.engines._engine import ADAMW, Engine, Job
from steps.nets import CASES, WithLoss, make_batch, make_net

__all__ = ["make", "start_training"]


def make(job: Job) -> Callable[[], Engine]:
    """Returns what starts the engine."""
    wrap = torch.compile if "compile" in job.options else lambda module: module
    return start_training(job, wrap)


def start_training(job: Job, wrap: Callable[..., torch.nn.Module]) -> Callable[[], Engine]:
    """Returns what starts PyTorch's training loop of a module that is first put through `wrap`."""
    torch.set_num_threads(job.threads)
    case = CASES[job.case]
    device = torch.device(job.device)
    layout = torch.channels_last if job.options.get("layout") == "channels_last" else torch.contiguous_format
    module = WithLoss(make_net(case), case.net.loss).to(device)
    inputs, target = (torch.from_numpy(array).to(device) for array in make_batch(case))
    if case.net.images:
        module, inputs = module.to(memory_format=layout), inputs.contiguous(memory_format=layout)

    def start() -> Engine:
        step = wrap(module)
        optimizer = torch.optim.AdamW(step.parameters(), **ADAMW, fused=True)

        def gradients() -> float:
            optimizer.zero_grad(set_to_none=True)
            loss = step(inputs, target)
            loss.backward()
            return loss.item()

        def update(rate: float) -> None:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return Engine(gradients, update, {"torch": torch.__version__})

    return start
