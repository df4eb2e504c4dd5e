"""Several workers, or one with NCCL, that train on a GPU."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onnxtrain import Trainer
from onnxtrain.distributed import DataParallel, launch
from ortmodule.eager import strict
from trainer import problems


def _evaluated(folder: str, device: str, backend: str | None) -> dict[str, float]:
    problem = problems.classes()
    trainer = Trainer(
        problem.model,
        loss=problem.loss,
        metrics=["accuracy"],
        device=device,
        directory=folder,
        seed=3,
        strategy=None if backend is None else DataParallel(backend=backend),
    )
    trainer.fit(problem.x, problem.y, epochs=3, batch_size=10)
    return trainer.evaluate(problem.x, problem.y)


@pytest.mark.parametrize(("backend", "workers"), [("nccl", 1), ("gloo", 2)])
def test_workers_learn_as_one_process_on_the_cpu(backend: str, workers: int, tmp_path: Path) -> None:
    want = _evaluated(str(tmp_path / "alone"), "cpu", None)
    for found in launch(_evaluated, str(tmp_path / "together"), "cuda", backend, workers=workers):
        for name, value in want.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-3, err_msg=name)


def test_ddp_over_nccl(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        losses = []
        for net in (plain, DistributedDataParallel(strict(copy.deepcopy(plain)), device_ids=[0])):
            torch.manual_seed(1)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            losses.append([])
            for _ in range(10):
                optimizer.zero_grad()
                loss = net(torch.randn(8, 16)).square().mean()
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.item())
    finally:
        dist.destroy_process_group()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
