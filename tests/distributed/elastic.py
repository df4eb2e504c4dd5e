"""A training that saves after each step and resumes from the last save, one of whose workers kills itself once.

`torchrun --max-restarts 1 -m distributed.elastic FOLDER`; the worker of rank 0 writes results.pt to the folder.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from distributed.ended import leave_at_once
from distributed.engines import full_state, mean_over_workers
from distributed.nets import optimizer_of, share
from distributed.options import PERCEPTRON, STEPS
from onnxtrain.ortmodule import ORTModule


def join() -> None:
    """Joins the workers of this start.

    torchrun's store outlives a start. The number of the start is a prefix of all keys, so that a restarted worker does
    not read the addresses of dead ones (notes/faults-of-others.md).
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(
        f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", dist.TCPStore(address, port, is_master=False)
    )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def main(folder: Path) -> None:
    join()
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(ORTModule(PERCEPTRON.module()))
    sgd = optimizer_of(model)
    losses = torch.zeros(STEPS, dtype=torch.float64)
    # The metadata of a checkpoint are written last.
    saved = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    if saved:
        state, of_optimizer = get_state_dict(model, sgd)
        dcp.load({"model": state, "optimizer": of_optimizer, "losses": losses}, checkpoint_id=saved[-1])
        set_state_dict(model, sgd, model_state_dict=state, optim_state_dict=of_optimizer)
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step, batch in list(enumerate(PERCEPTRON.batches(STEPS)))[len(saved) :]:
        if (restarts, rank, step) == (0, 1, STEPS // 2):
            os.kill(os.getpid(), signal.SIGKILL)
        sgd.zero_grad()
        loss = model(*share(batch, rank, world))
        loss.backward()
        sgd.step()
        losses[step] = mean_over_workers(loss.item())
        state, of_optimizer = get_state_dict(model, sgd)
        saving = {"model": state, "optimizer": of_optimizer, "losses": losses}
        dcp.save(saving, checkpoint_id=folder / f"step-{step}")
    result = {"losses": losses.tolist(), "state": full_state(model)}
    if rank == 0:
        torch.save(
            {"result": result, "restarts": restarts, "steps before": len(saved)}, folder / "results.pt"
        )
    # A reducer that outlives its process group can wait for the group's thread with the GIL in its hand.
    del model
    dist.destroy_process_group()
    leave_at_once()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
