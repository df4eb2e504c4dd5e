"""DistributedDataParallel around an ORTModule: two processes on half batches equal PyTorch alone on whole batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import os, sys, warnings
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from onnxtrain.ortmodule import ORTModule

rank, world, folder = int(sys.argv[1]), 2, sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
ort = ORTModule(net)
model = DistributedDataParallel(ort)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(1)
for _ in range(6):
    x, y = torch.randn(8, 6, generator=data), torch.randn(8, 3, generator=data)
    part = slice(rank * 8 // world, (rank + 1) * 8 // world)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x[part]), y[part]).backward()
    optimizer.step()
assert ort.report().runs_in_onnxruntime, str(ort.report())
if rank == 0:
    torch.save(net.state_dict(), f"{folder}/trained.pt")
del model  # a reducer that outlives its process group can wait for the group's thread with the GIL in its hand
dist.destroy_process_group()
"""


@pytest.mark.torch
def test_two_processes_equal_one(tmp_path: Path) -> None:
    import torch

    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path)],
            env={
                "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
                "PATH": "/usr/bin:/bin",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for worker in workers:
        _, errors = worker.communicate()
        assert worker.returncode == 0, errors

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    for _ in range(6):
        x, y = torch.randn(8, 6, generator=data), torch.randn(8, 3, generator=data)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    trained = torch.load(tmp_path / "trained.pt")
    assert trained.keys() == net.state_dict().keys()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6)
