"""ZeRO of DeepSpeed around an ORTModule on the CPU, beside ZeRO around the plain module and one process without it.

DeepSpeed compiles its collectives for the CPU when they are first used, and needs a C++ compiler and ninja. That takes
45 seconds of one processor; the workers wait for it.

Needs: pip install deepspeed
Usage: PYTHONPATH=src:tests torchrun --nproc-per-node 2 benchmarks/distributed/deepspeed_zero.py [--stages 3]
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist

from distributed.engines import mean_over_workers
from distributed.nets import BATCH, NETS, Result, difference, in_one_process, optimizer_of, seed_worker, share
from onnxtrain.ortmodule import ORTModule


def train(name: str, stage: int, inside: bool, eager: bool) -> tuple[Result, str]:
    """Train a net by DeepSpeed: its engine around an ORTModule, or an ORTModule around its engine's module."""
    net, rank, world = NETS[name], dist.get_rank(), dist.get_world_size()
    module = net.module()
    settings = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // world,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = module if inside or eager else ORTModule(module)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(module), config=settings)
    if inside:
        engine.module = model = ORTModule(module)
    seed_worker(rank)
    losses = []
    for batch in net.batches():
        loss = engine(*share(batch, rank, world))
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_workers(loss.item()))
    if stage == 3:
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            state = {key: value.detach().clone() for key, value in module.state_dict().items()}
    else:
        state = {key: value.detach().clone() for key, value in module.state_dict().items()}
    return {"losses": losses, "state": state}, "" if eager else str(model.report())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--nets", nargs="+", default=list(NETS))
    parser.add_argument("--inside", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    for stage in options.stages:
        for name in options.nets:
            eager, _ = train(name, stage, options.inside, eager=True)
            ours, report = train(name, stage, options.inside, eager=False)
            if dist.get_rank() == 0:
                world = dist.get_world_size()
                alone = difference(eager, in_one_process(NETS[name], world))
                print(
                    f"DeepSpeed {deepspeed.__version__}, ZeRO {stage}, {world} processes, {name}: largest difference "
                    f"{difference(ours, eager):.1e} from the plain module; that one from one process {alone:.1e}\n"
                    f"{report}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
