"""Time a step of `Trainer(strategy="ddp")` beside one of PyTorch's DistributedDataParallel, with gloo.

A net is exported to ONNX. Trainer trains the file, DistributedDataParallel the module that was exported: from the same
weights, on the same global batches, with the same SGD. Each worker has one thread. The two take turns of some steps, so
that what else the machine does meets both alike; the ratio of the medians is what counts. The losses of all steps are
compared, and the program ends with an error where they differ by more than `--tolerance`.

Run it on a machine that does nothing else, with no more workers than processors.

Usage: PYTHONPATH=src OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/distributed/trainer.py
    [--turns 8] [--steps 8] [--nets encoder convolutions]
"""

import argparse
import io
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
import torch.distributed as dist
from timed_nets import CLASSES, Convolutions, Encoder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onnxtrain import Callback, Trainer

LEARNING_RATE = 0.01


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    # Dropout would draw other masks in ONNX Runtime, and losses could not be compared.
    "encoder": (lambda: Encoder(dropout=0.0), (32, 256)),
    "convolutions": (Convolutions, (3, 32, 32)),
}
"""Module and shape of a sample. In both engines each worker normalises its share of a batch."""


def exported(module: nn.Module, x: torch.Tensor) -> onnx.ModelProto:
    """Exports a module in training mode, for any number of samples."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the exporter by tracing, which keeps BatchNormalization, is deprecated
        torch.onnx.export(
            module,
            (x,),
            file,
            dynamo=False,
            opset_version=17,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            input_names=["x"],
            output_names=["logits"],
            dynamic_axes={"x": {0: "n"}, "logits": {0: "n"}},
        )
    return onnx.load_from_string(file.getvalue())


class Clock(Callback):
    """Notes when each step has ended, and its loss over all workers."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, trainer: Any, loss: float) -> None:
        self.ends.append(time.perf_counter())
        self.losses.append(loss)


def trainer_turns(model: onnx.ModelProto, x: np.ndarray, y: np.ndarray, batch: int) -> Callable[[], Clock]:
    """Returns a function that trains `Trainer` for an epoch."""
    normalises = any(node.op_type == "BatchNormalization" for node in model.graph.node)
    trainer = Trainer(
        model,
        "cross_entropy",
        "sgd",
        LEARNING_RATE,
        metrics=[],
        batch_norm="training" if normalises else "as_exported",
        threads=1,
        strategy="ddp",
    )

    def turn() -> Clock:
        clock = Clock()
        trainer.fit(x, y, epochs=1, batch_size=batch, shuffle=False, verbose=False, callbacks=[clock])
        return clock

    return turn


def ddp_turns(module: nn.Module, x: np.ndarray, y: np.ndarray, batch: int) -> Callable[[], Clock]:
    """Returns a function that trains DistributedDataParallel for an epoch, each worker on its share of each batch."""
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    share = batch // dist.get_world_size()
    first = dist.get_rank() * share

    def turn() -> Clock:
        clock = Clock()
        own_losses = []
        for start in range(0, len(x), batch):
            rows = slice(start + first, start + first + share)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.from_numpy(x[rows])), torch.from_numpy(y[rows]))
            loss.backward()
            optimizer.step()
            # A loop that logs reads the loss of each step, as Trainer does.
            own_losses.append(loss.item())
            clock.ends.append(time.perf_counter())
        losses = torch.tensor(own_losses)
        dist.all_reduce(losses)
        clock.losses = (losses / dist.get_world_size()).tolist()
        return clock

    return turn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=8, help="turns of each engine; one more warms up")
    parser.add_argument(
        "--steps", type=int, default=8, help="steps of a turn, of which the first is not timed"
    )
    parser.add_argument("--batch", type=int, default=16, help="samples of a step over all workers")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference of a loss")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if options.batch % dist.get_world_size():
        parser.error("--batch must be a multiple of the number of workers")
    for name in options.nets:
        make, shape = NETS[name]
        torch.manual_seed(0)
        module = make()
        rng = np.random.default_rng(0)
        x = rng.standard_normal((options.batch * options.steps, *shape)).astype(np.float32)
        y = rng.integers(0, CLASSES, len(x))
        model = exported(module, torch.from_numpy(x[:2]))
        engines = {
            "PyTorch": ddp_turns(module.train(), x, y, options.batch),
            "Trainer": trainer_turns(model, x, y, options.batch),
        }
        seconds: dict[str, list[float]] = {engine: [] for engine in engines}
        losses: dict[str, list[float]] = {engine: [] for engine in engines}
        for index in range(1 + options.turns):
            for engine, turn in engines.items():
                dist.barrier()
                clock = turn()
                losses[engine] += clock.losses
                if index:
                    seconds[engine] += np.diff(clock.ends).tolist()
        # Callbacks of Trainer run on worker 0 alone.
        if dist.get_rank() == 0:
            medians = {engine: statistics.median(values) for engine, values in seconds.items()}
            ours, theirs = np.array(losses["Trainer"]), np.array(losses["PyTorch"])
            assert len(ours) == len(theirs) == options.steps * (1 + options.turns)
            worst = float(np.abs(ours / theirs - 1).max())
            row = {
                "net": name,
                "workers": dist.get_world_size(),
                "parameters": sum(p.numel() for p in module.parameters()),
                **{f"{engine} ms": round(1000 * value, 2) for engine, value in medians.items()},
                "ratio": round(medians["Trainer"] / medians["PyTorch"], 3),
                "steps compared": len(ours),
                "losses": [round(float(theirs[0]), 4), round(float(theirs[-1]), 4)],
                "largest relative difference of a loss": float(f"{worst:.1e}"),
            }
            print(json.dumps(row), flush=True)
            assert worst <= options.tolerance, f"{name}: the losses differ by {worst:.1e}"
        del engines, turn, module
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
