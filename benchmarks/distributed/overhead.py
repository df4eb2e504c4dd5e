"""Time a step of DistributedDataParallel around an ORTModule beside one around the plain module, with gloo.

Each worker has one thread. The two take turns, so that what else the machine does meets both alike; the ratio of the
medians is what counts. Run it on a machine that does nothing else, with no more workers than processors.

Usage: PYTHONPATH=src torchrun --standalone --nproc-per-node 2 benchmarks/distributed/overhead.py [--rounds 40]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from timed_nets import Convolutions, Encoder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onnxtrain.ortmodule import ORTModule

BATCH = 8
WARM_UP = 5


class Scored(nn.Module):
    """A net and a number to differentiate."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).logsumexp(1).mean()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 2000, "n_positions": 64, "n_embd": 256, "n_layer": 4, "n_head": 4}
    net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.net(input_ids=tokens, labels=tokens, use_cache=False).loss

    return Loss()


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "encoder": (lambda: Scored(Encoder(dropout=0.1)), lambda: torch.randn(BATCH, 32, 256)),
    "convolutions": (lambda: Scored(Convolutions()), lambda: torch.randn(BATCH, 3, 32, 32)),
    "gpt2": (gpt2, lambda: torch.randint(0, 2000, (BATCH, 64))),
}


def stepping(module: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    """Return a function that takes a training step, and returns the seconds that it took on the slowest worker."""
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in options.nets:
        make, draw = NETS[name]
        torch.manual_seed(0)
        plain, ort = make(), ORTModule(make())
        x = draw()
        steps = {"eager": stepping(plain, x), "ORTModule": stepping(ort, x)}
        times: dict[str, list[float]] = {engine: [] for engine in steps}
        for index in range(WARM_UP + options.rounds):
            for engine, step in steps.items():
                seconds = step()
                if index >= WARM_UP:
                    times[engine].append(seconds)
        assert ort.report().runs_in_onnxruntime, str(ort.report())
        medians = {engine: statistics.median(values) for engine, values in times.items()}
        if dist.get_rank() == 0:
            row = {
                "net": name,
                "workers": dist.get_world_size(),
                "parameters": sum(p.numel() for p in plain.parameters()),
                **{f"{engine} ms": round(1000 * value, 2) for engine, value in medians.items()},
                "ratio": round(medians["ORTModule"] / medians["eager"], 3),
            }
            print(json.dumps(row), flush=True)
        del steps, step, plain, ort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
