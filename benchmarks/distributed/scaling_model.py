"""Say what a training step of each engine sends and keeps, from the sizes of a net: the model behind notes/scaling.md.

All counts are per worker. "Sends" counts the bytes that a worker gives to the network; each worker receives as many,
but for a broadcast, of which the numbers are the mean over the workers.

- Ring all-reduce of S bytes: each worker sends 2 (n - 1) / n S (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
  algorithms for clusters of workstations"). Reduce-scatter and all-gather are its halves.
- Broadcast of S bytes: n - 1 workers receive S, so that the mean is (n - 1) / n S.
- ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"): stage 1 keeps
  the moments of 1/n of the parameters on each worker.
- FSDP (Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"): all-gather of a layer's
  parameters before its forward and before its backward, reduce-scatter of its gradients.
- Federated averaging (McMahan et al. 2017): the trained parameters go to each client of a round, and back.

scaling_page.py beside it prints the tables of the page, scaling_measured.py what the model is checked against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "distributed.json"
FLOAT32, BFLOAT16 = 4, 2
"""Bytes of an element."""
BUCKET = 25 * 2**20
"""Bytes of a bucket of gradients, of DistributedDataParallel and of `DataParallel`."""
IN_FLIGHT = 3
"""Buckets that `DataParallel` has on their way at a time."""
NUMPY_HEADER = 128
"""Bytes in front of the elements in a file of numpy, for shapes of few axes."""
ADAMW = 2
"""Moments per trained element."""
FROZEN = 3 * FLOAT32
"""Bytes of a frozen element, measured: ONNX Runtime keeps constant matrices in the order of its kernels, too."""


@dataclass(frozen=True)
class Net:
    """A net to be trained.

    Attributes:
        layers: elements of the parameters of each layer, e.g. (147456, 3840). `fully_shard` shards each of them but the
            last one, which belongs to the outermost module.
        trained: elements of each tensor that is trained beside the layers, those of adapters; by default the layers.
    """

    layers: tuple[int, ...]
    trained: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Elements of all layers."""
        return sum(self.layers)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Elements of each tensor that has a gradient."""
        return self.layers if self.trained is None else self.trained

    @property
    def frozen(self) -> int:
        """Elements without a gradient."""
        return 0 if self.trained is None else self.size


@dataclass(frozen=True)
class Engine:
    """Describes a step of an engine, in bytes per trained element where nothing else is said.

    Attributes:
        reduced: bytes that go through an all-reduce.
        scattered: bytes that go through a reduce-scatter.
        broadcast: bytes that the worker that has updated them broadcasts.
        gathered: all-gathers of each layer but the last, and of the last.
        kept: bytes that each worker keeps.
        shared: bytes of which each worker keeps 1/n.
        layers_at_once: layers whose parameters are there whole at a time; None for all, 0 if nothing is sharded.
        handed: True if a graph hands its gradients over to PyTorch at its end, which has them twice for a moment.
        buckets: bytes of the copy of a gradient that is sent: those of small ones that share a bucket, and of all.
        built: bytes per element of the model that stays on worker 0 if it has made the artifacts in the same process.
        overlap: True if messages go while the next layer computes.
    """

    reduced: float = 0
    scattered: float = 0
    broadcast: float = 0
    gathered: tuple[int, int] = (0, 0)
    kept: float = 0
    shared: float = 0
    layers_at_once: int | None = 0
    handed: bool = False
    buckets: tuple[int, int] = (0, 0)
    built: float = 0
    overlap: bool = False


# AdamW in float32. Trainer keeps a copy of parameters and moments, to which a fit that diverges goes back.
_STATE = (1 + ADAMW) * FLOAT32
_SHARDED = FLOAT32 + _STATE
_ORTMODULE: dict[str, Any] = {"handed": True}
_TRAINER: dict[str, Any] = {"buckets": (FLOAT32, 0), "built": FLOAT32}
ENGINES = {
    "DistributedDataParallel": Engine(reduced=FLOAT32, kept=FLOAT32 + _STATE, **_ORTMODULE),
    "ZeroRedundancyOptimizer": Engine(
        reduced=FLOAT32, broadcast=FLOAT32, kept=2 * FLOAT32, shared=ADAMW * FLOAT32, **_ORTMODULE
    ),
    "fully_shard, whole": Engine(
        scattered=FLOAT32, gathered=(1, 1), shared=_SHARDED, layers_at_once=None, **_ORTMODULE
    ),
    "fully_shard, each layer": Engine(
        scattered=FLOAT32, gathered=(2, 1), shared=_SHARDED, layers_at_once=2, overlap=True, **_ORTMODULE
    ),
    "Trainer": Engine(reduced=FLOAT32, kept=FLOAT32 + 2 * _STATE, **_TRAINER),
    "Trainer, bfloat16": Engine(
        reduced=BFLOAT16, kept=FLOAT32 + 2 * _STATE, **_TRAINER | {"buckets": (FLOAT32, BFLOAT16)}
    ),
    "Trainer, ZeRO-1": Engine(
        reduced=FLOAT32, broadcast=FLOAT32, kept=3 * FLOAT32, shared=2 * ADAMW * FLOAT32, **_TRAINER
    ),
    "Trainer, LoRA": Engine(reduced=FLOAT32, kept=FLOAT32 + 2 * _STATE, **_TRAINER),
}
"""Engines by name. "Trainer, LoRA" is "Trainer" with adapters, of which alone there are gradients."""


def all_reduce(size: float, workers: int) -> float:
    """Returns the bytes that a worker sends for a ring all-reduce of `size` bytes."""
    return 2 * (workers - 1) / workers * size


def half_ring(size: float, workers: int) -> float:
    """Returns the bytes that a worker sends for a reduce-scatter, an all-gather, or in the mean for a broadcast."""
    return (workers - 1) / workers * size


def step_bytes(engine: Engine, net: Net, workers: int, *, gloo: bool = False) -> float:
    """Returns the bytes that a worker sends in a step.

    Args:
        engine: the engine.
        net: sizes of the net.
        workers: number of workers.
        gloo: True for the backend gloo of PyTorch 2.13, whose reduce-scatter sends as much as an all-reduce.
    """
    trained = sum(net.tensors)
    inner, outer = engine.gathered
    gathered = inner * sum(net.layers[:-1]) + outer * net.layers[-1]
    scatter = all_reduce if gloo else half_ring
    return (
        all_reduce(engine.reduced * trained, workers)
        + scatter(engine.scattered * trained, workers)
        + half_ring(engine.broadcast * trained + FLOAT32 * gathered, workers)
    )


def copied_bytes(net: Net, joined: int, every: int) -> int:
    """Returns the largest bytes of the copies of gradients that are on their way at a time in `DataParallel`.

    Neighbours share a bucket up to its size. A tensor that has a bucket for itself is sent from its own memory.

    Args:
        net: sizes of the net.
        joined: bytes per element of the copy that joins small gradients.
        every: bytes per element of the copy that every gradient gets, e.g. in bfloat16.
    """
    buckets: list[list[int]] = []
    for elements in net.tensors:
        if buckets and FLOAT32 * (sum(buckets[-1]) + elements) <= BUCKET:
            buckets[-1].append(elements)
        else:
            buckets.append([elements])
    copies = [sum(bucket) * (every + (joined if len(bucket) > 1 else 0)) for bucket in buckets]
    return max(sum(copies[i : i + IN_FLIGHT]) for i in range(len(copies)))


def state_bytes(engine: Engine, net: Net, workers: int, *, built: bool = False) -> float:
    """Returns the bytes that a worker keeps: parameters, gradients, moments, copies; without activations.

    Args:
        engine: the engine.
        net: sizes of the net.
        workers: number of workers.
        built: True for worker 0 if it has made the artifacts in the same process.
    """
    trained, largest = sum(net.tensors), max(net.layers)
    found = engine.kept * trained + engine.shared * trained / workers + FROZEN * net.frozen
    found += copied_bytes(net, *engine.buckets)
    if built:
        found += engine.built * net.size
    if engine.layers_at_once == 0:
        return found + FLOAT32 * trained * engine.handed
    # Parameters of the layers that are whole, and gradients of one before they are scattered.
    whole = sorted(net.layers)[-engine.layers_at_once :] if engine.layers_at_once else net.layers
    graph = largest if engine.layers_at_once else net.size
    return found + FLOAT32 * (sum(whole) + graph * (1 + engine.handed))


def round_bytes(tensors: Sequence[int]) -> int:
    """Returns the bytes of the arrays that Flower sends to a client, and gets back: each as a file of numpy."""
    return sum(FLOAT32 * elements + NUMPY_HEADER for elements in tensors)


@dataclass(frozen=True)
class Network:
    """A network between workers, each of which has a port of its own.

    Attributes:
        rate: bytes per second and direction.
        latency: seconds of a message between two workers. An assumption.
        most: largest number of workers that it connects.
    """

    rate: float
    latency: float
    most: int | None = None


NETWORKS = {
    "25 GbE": Network(25e9 / 8, 30e-6),
    "100 GbE": Network(100e9 / 8, 30e-6),
    "400 Gb/s InfiniBand": Network(400e9 / 8, 5e-6),
    # Fourth generation, 900 GB/s in both directions together, eight GPUs of a machine.
    "NVLink 4": Network(450e9, 3e-6, most=8),
}


def exchange_seconds(engine: Engine, net: Net, workers: int, network: Network) -> float:
    """Returns the seconds that the messages of a step take at the full rate of the network."""
    trained = sum(net.tensors)
    inner, outer = engine.gathered
    # A ring hands a bucket on n - 1 times for each of its halves. Some buckets are on their way at a time.
    in_turn = math.ceil(math.ceil(engine.reduced * trained / BUCKET) / IN_FLIGHT)
    hops = 2 * in_turn * (workers - 1)
    if engine.scattered:
        # One message for each layer's gradients, and those of the gathers.
        hops += (len(net.layers) + inner * (len(net.layers) - 1) + outer) * (workers - 1)
    seconds = step_bytes(engine, net, workers) / network.rate
    if engine.broadcast:
        # Worker after worker sends its part through a tree, in each level of which the part is sent whole.
        levels = math.ceil(math.log2(workers))
        hops += workers * levels
        sent = engine.broadcast * trained
        seconds += (levels * sent - half_ring(sent, workers)) / network.rate
    return seconds + hops * network.latency


def step_seconds(engine: Engine, net: Net, workers: int, network: Network, compute: float) -> float:
    """Returns the seconds of a step of which each worker computes for `compute` seconds."""
    exchange = exchange_seconds(engine, net, workers, network)
    return max(compute, exchange) if engine.overlap else compute + exchange


def transformer(
    size: float, blocks: int, width: int, hidden: int, *, gated: bool, rank: int | None = None
) -> Net:
    """Describes a decoder with `size` parameters; with adapters of a rank on all linear layers of its blocks."""
    linear = [(width, width)] * 4 + [(width, hidden)] * (3 if gated else 2)
    block = sum(a * b for a, b in linear)
    layers = (*[block] * blocks, round(size) - blocks * block)
    if rank is None:
        return Net(layers)
    return Net(layers, trained=tuple(rank * side for _ in range(blocks) for pair in linear for side in pair))


SIZES: dict[str, dict[str, Any]] = {
    "100 M": {"size": 100e6, "blocks": 12, "width": 768, "hidden": 3072, "gated": False},
    "1 B": {"size": 1.1e9, "blocks": 16, "width": 2048, "hidden": 8192, "gated": True},
    "7 B": {"size": 6.7e9, "blocks": 32, "width": 4096, "hidden": 11008, "gated": True},
}
"""Shapes as those of GPT-2, of a Llama of 1 B and of Llama 2 7B."""
RANK, TOKENS, DEVICE = 8, 8192, 100e12
"""Rank of the adapters; tokens of a worker in a step; operations per second of its device. Assumptions."""
WORKERS = (8, 64, 1024)


def compute_seconds(net: Net, tokens: int = TOKENS, device: float = DEVICE) -> float:
    """Returns the seconds of forward and backward (Kaplan et al. 2020, "Scaling Laws for Neural Language Models").

    A parameter and a token cost 2 operations forward, 2 for the gradient of the input, and 2 for that of the parameter,
    which frozen parameters have not.
    """
    return (4 * net.size + 2 * sum(net.tensors)) * tokens / device
