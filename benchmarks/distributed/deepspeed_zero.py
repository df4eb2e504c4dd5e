"""ZeRO of DeepSpeed around an ORTModule on the CPU, beside ZeRO around the plain module and one process without it.

DeepSpeed compiles its collectives for the CPU when they are first used, and needs a C++ compiler and ninja. That takes
45 seconds of one processor; the workers wait for it.

Needs: pip install deepspeed
Usage: PYTHONPATH=src:tests torchrun --nproc-per-node 2 benchmarks/distributed/deepspeed_zero.py [--stages 3]
"""

import argparse
import shutil
import tempfile
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from distributed.engines import mean_over_workers
from distributed.nets import (
    BATCH,
    NETS,
    STEPS,
    Result,
    difference,
    in_one_process,
    optimizer_of,
    seed_worker,
    share,
)
from onnxtrain.ortmodule import ORTModule


def begin(name: str, stage: int, inside: bool, eager: bool) -> tuple[Any, Any, Any]:
    """Return a plain module, the model that reports, and DeepSpeed's engine: around an ORTModule, or inside of one."""
    module = NETS[name].module()
    settings = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": stage},
        # Without it DeepSpeed clips gradients to a norm of 1.
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = module if inside or eager else ORTModule(module)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(module), config=settings)
    if inside:
        engine.module = model = ORTModule(module)
    return module, model, engine


def train(name: str, stage: int, inside: bool, eager: bool, folder: str) -> tuple[Result, str]:
    """Train a net by DeepSpeed, save half-way, and go on from there with a new engine."""
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_worker(rank)
    random, losses = torch.get_rng_state(), []
    batches = NETS[name].batches()
    tag = f"{name}-{stage}-{inside}-{eager}"
    for half, part in enumerate((batches[: STEPS // 2], batches[STEPS // 2 :])):
        module, model, engine = begin(name, stage, inside, eager)
        if half:
            engine.load_checkpoint(folder, tag)
        # DeepSpeed saves no state of random numbers.
        torch.set_rng_state(random)
        for batch in part:
            loss = engine(*share(batch, rank, world))
            engine.backward(loss)
            engine.step()
            losses.append(mean_over_workers(loss.item()))
        random = torch.get_rng_state()
        if not half:
            engine.save_checkpoint(folder, tag)
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
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    for stage in options.stages:
        for name in options.nets:
            eager, _ = train(name, stage, options.inside, eager=True, folder=folders[0])
            ours, report = train(name, stage, options.inside, eager=False, folder=folders[0])
            if dist.get_rank() == 0:
                world = dist.get_world_size()
                alone = in_one_process(NETS[name], world)
                print(
                    f"DeepSpeed {deepspeed.__version__}, ZeRO {stage}, {world} processes, {name}: largest difference "
                    f"{difference(ours, eager):.1e} from the plain module, {difference(ours, alone):.1e} from one "
                    f"process; of the plain module from one process {difference(eager, alone):.1e}\n"
                    f"{report}",
                    flush=True,
                )
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
