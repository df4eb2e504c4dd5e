"""Measure what a training step of each engine sends and keeps, with a few processes of this machine and gloo.

    bytes    Count the bytes on the loopback interface of a network namespace in which nothing else runs, per step.
    memory   Peak of the resident memory of worker 0 during steps, at two sizes of the net: bytes per parameter.
    times    Seconds of a step beside those that scaling_model.py says for the rate that an all-reduce has here.

Bytes and memory do not depend on what else the machine does. Times do: measure them on a machine that does nothing
else, with no more workers than processors.

Usage: PYTHONPATH=src python benchmarks/distributed/scaling_measured.py bytes memory [--workers 2 4] [--engines ...]

Writes benchmarks/results/distributed.json, from which scaling_model.py makes its tables. Needs Linux with `unshare` and
`ip`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

from peak_memory import peak_bytes, reset_peak
from scaling_model import ENGINES, RESULTS, Net

# Steps before the first count, counted steps, samples of a worker.
WARM_UP, STEPS, SAMPLES = 3, 10, 4
LAYERS, WIDTH, CLASSES = 8, 384, 10
"""Net of `bytes` and `times`: square layers of this width, and a last one."""
WIDTHS = (768, 1536)
"""Widths of the two nets of `memory`."""
RANK = 4
"""Rank of the adapters."""
LONG_BYTES = 2**24
"""Bytes of the all-reduce whose rate `times` takes for that of the network."""
PORT = 29500
Mark = Callable[[int], None]


def net_of(engine: str, width: int) -> Net:
    """Describes the net to the model."""
    layers = (*[width * width] * LAYERS, CLASSES * width)
    if engine != "Trainer, LoRA":
        return Net(layers)
    # Two thin matrices for each linear layer.
    return Net(layers, trained=(*[RANK * width] * (2 * LAYERS), RANK * width, RANK * CLASSES))


def train(engine: str, width: int, mark: Mark) -> None:
    """Trains for some steps; worker 0 calls `mark` at the end of each, with the number of steps taken."""
    import numpy as np
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    # Every worker has the same arrays, and trains on its share of each batch.
    batch = SAMPLES * dist.get_world_size()
    x = rng.standard_normal((batch * (WARM_UP + STEPS), width)).astype(np.float32)
    y = rng.integers(0, CLASSES, len(x))
    if engine.startswith("Trainer"):
        _train_file(engine, width, x, y, mark)
    else:
        share = np.arange(len(x)).reshape(-1, dist.get_world_size(), SAMPLES)[:, dist.get_rank()]
        _train_module(engine, width, torch.from_numpy(x[share]), torch.from_numpy(y[share]), mark)


def _train_module(engine: str, width: int, x: Any, y: Any, mark: Mark) -> None:
    """Trains a module of PyTorch in an ORTModule."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from onnxtrain.ortmodule import ORTModule

    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width, bias=False), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(width, CLASSES, bias=False))
    if engine.startswith("fully_shard"):
        for layer in net if "each" in engine else ():
            if isinstance(layer, nn.Linear) and layer.out_features == width:
                fully_shard(layer)
        model: nn.Module = ORTModule(fully_shard(net))
    else:
        model = DistributedDataParallel(ORTModule(net), gradient_as_bucket_view=True)
    if engine == "ZeroRedundancyOptimizer":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step, (inputs, labels) in enumerate(zip(x, y, strict=True)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        mark(step + 1)


def _train_file(engine: str, width: int, x: Any, y: Any, mark: Mark) -> None:
    """Trains an ONNX file by `Trainer`."""
    from onnxtrain import Callback, Trainer
    from onnxtrain.distributed import DataParallel
    from onnxtrain.lora import LoraConfig

    class AtEachStep(Callback):
        def on_step_end(self, trainer: Any, loss: float) -> None:
            self.steps = getattr(self, "steps", 0) + 1
            mark(self.steps)

    strategies = {"bfloat16": DataParallel(compression="bf16"), "ZeRO-1": DataParallel(shard_optimizer=True)}
    # A model that is passed as an object stays in memory.
    place = Path(tempfile.mkdtemp()) / "net.onnx"
    _write_file(place, width)
    trainer = Trainer(
        place,
        "cross_entropy",
        "adamw",
        1e-4,
        metrics=[],
        lora=LoraConfig(r=RANK) if "LoRA" in engine else None,
        threads=1,
        strategy=strategies.get(engine.removeprefix("Trainer, "), DataParallel()),
    )
    batch = len(x) // (WARM_UP + STEPS)
    trainer.fit(x, y, batch_size=batch, verbose=False, callbacks=[AtEachStep()])


def _write_file(place: Path, width: int) -> None:
    """Writes the net as an ONNX file."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    nodes, tensors, last = [], [], "x"
    for index in range(LAYERS + 1):
        shape = (width, width if index < LAYERS else CLASSES)
        weight = rng.standard_normal(shape, np.float32) / np.float32(width**0.5)
        tensors.append(numpy_helper.from_array(weight, f"w{index}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{index}"], [f"h{index}"], name=f"linear{index}"))
        last = f"h{index}"
        if index < LAYERS:
            nodes.append(helper.make_node("Relu", [last], [f"a{index}"]))
            last = f"a{index}"
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "net",
        [info("x", TensorProto.FLOAT, ["n", width])],
        [info(last, TensorProto.FLOAT, ["n", CLASSES])],
        tensors,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), place)


def loopback_bytes() -> int:
    """Reads how many bytes the loopback interface has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    raise RuntimeError("/proc/net/dev has no interface 'lo'")


def work(what: str, engine: str, width: int) -> None:
    """Runs in each worker; worker 0 prints the result as the last line."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    leads = dist.get_rank() == 0
    if engine == "all-reduce":
        rates = _all_reduce_seconds()
        print(json.dumps(rates) if leads else "", flush=True)
        dist.destroy_process_group()
        return
    numbers: list[float] = []

    def mark(step: int) -> None:
        if not leads:
            return
        if what == "times":
            numbers.append(time.perf_counter())
        elif step in (WARM_UP, WARM_UP + STEPS):
            if what == "memory" and step == WARM_UP:
                reset_peak()
            numbers.append(loopback_bytes() if what == "bytes" else peak_bytes())

    train(engine, width, mark)
    if leads:
        if what == "bytes":
            result: float = (numbers[1] - numbers[0]) / STEPS
        elif what == "memory":
            result = numbers[1]
        else:
            ends = numbers[WARM_UP - 1 :]
            result = statistics.median(b - a for a, b in itertools.pairwise(ends))
        print(json.dumps(result), flush=True)
    # A process group that ends while DistributedDataParallel is there can keep the process from ending.
    sys.stdout.flush()
    os._exit(0)


def _all_reduce_seconds() -> list[float]:
    """Measures seconds of all-reduces of 4 and of `LONG_BYTES` bytes."""
    import torch
    import torch.distributed as dist

    found = []
    for elements in (1, LONG_BYTES // 4):
        tensor, seconds = torch.ones(elements), []
        for _ in range(12):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - start)
        found.append(statistics.median(seconds[2:]))
    return found


def launch(what: str, engine: str, workers: int, width: int = WIDTH) -> Any:
    """Runs workers in a network namespace of their own; returns what worker 0 has printed."""
    run = ["-m", "torch.distributed.run", "--nproc-per-node", str(workers), "--nnodes", "1"]
    run += ["--master-addr", "127.0.0.1", "--master-port", str(PORT), __file__]
    command = [sys.executable, *run, "--work", what, engine, str(width)]
    # Without rights of its own a user gets a network namespace inside of a user namespace.
    namespace = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]
    inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    if what == "memory":
        # By default glibc keeps freed blocks of up to 32 MB, which would count as memory of the engine.
        settings["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    ran = subprocess.run(
        [*namespace, *inside, *command], env=os.environ | settings, capture_output=True, text=True
    )
    if ran.returncode:
        raise RuntimeError(f"{engine}, {workers} workers ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
    return json.loads(ran.stdout.strip().splitlines()[-1])


def measure(what: str, engine: str, workers: int) -> dict[str, Any]:
    """Measures one number of an engine; returns it with the sizes that the model needs."""
    row: dict[str, Any] = {"engine": engine, "workers": workers}
    if what == "bytes":
        return row | {"bytes": launch(what, engine, workers)}
    if what == "memory":
        peaks = [launch(what, engine, workers, width) for width in WIDTHS]
        small, large = (net_of(engine, width).size for width in WIDTHS)
        return row | {"bytes per parameter": round((peaks[1] - peaks[0]) / (large - small), 3)}
    return row | {"seconds": launch(what, engine, workers)}


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="+", choices=["bytes", "memory", "times"])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    order = [*ENGINES, "all-reduce"]
    for what in options.what:
        for workers in [1, *options.workers] if what == "times" else options.workers:
            engines = [*options.engines, "all-reduce"] if what == "times" and workers > 1 else options.engines
            for engine in engines:
                row = measure(what, engine, workers)
                print(what, json.dumps(row), flush=True)
                # Rows of other engines and counts stay.
                rows = {(old["workers"], order.index(old["engine"])): old for old in results.get(what, [])}
                rows[workers, order.index(engine)] = row
                results[what] = [rows[key] for key in sorted(rows)]
                options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
