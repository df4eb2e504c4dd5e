"""Ray Train's TorchTrainer with ORTModules beside eager PyTorch in one process, on the CPU.

Needs: pip install "ray[train]"
Usage: PYTHONPATH=src:tests python benchmarks/distributed/ray_torch_trainer.py [--workers 2]
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

NETS = ("encoder", "convolutions", "gpt2")


def work(settings: dict[str, Any]) -> None:
    """Train a net on one worker."""
    from distributed.engines import mean_over_workers
    from distributed.nets import NETS, optimizer_of, seed_worker, share
    from onnxtrain.ortmodule import ORTModule

    torch.set_num_threads(1)
    net, context = NETS[settings["net"]], get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    assert (rank, world) == (dist.get_rank(), dist.get_world_size())
    module = net.module()
    ort = ORTModule(module)
    model = prepare_model(ort)
    sgd = optimizer_of(model)
    seed_worker(rank)
    losses = []
    for batch in net.batches():
        sgd.zero_grad()
        loss = model(*share(batch, rank, world))
        loss.backward()
        sgd.step()
        losses.append(mean_over_workers(loss.item()))
    assert ort.report().runs_in_onnxruntime, str(ort.report())
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"losses": losses, "state": module.state_dict()}, Path(folder) / "result.pt")
        report({"loss": losses[-1]}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def main() -> None:
    from distributed.nets import NETS as NETS_BY_NAME
    from distributed.nets import difference, in_one_process

    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    options = parser.parse_args()
    workers = options.workers
    # Workers may outnumber the processors.
    path = {"PYTHONPATH": os.environ["PYTHONPATH"], "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=workers + 1, include_dashboard=False, runtime_env={"env_vars": path})
    with tempfile.TemporaryDirectory() as folder:
        for name in options.nets:
            trainer = TorchTrainer(
                work,
                train_loop_config={"net": name},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
                run_config=RunConfig(storage_path=folder, name=name),
            )
            done = trainer.fit()
            with done.checkpoint.as_directory() as saved:
                result = torch.load(Path(saved) / "result.pt")
            largest = difference(result, in_one_process(NETS_BY_NAME[name], workers))
            print(
                f"Ray {ray.__version__}, {workers} workers, {name}: largest difference {largest:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
