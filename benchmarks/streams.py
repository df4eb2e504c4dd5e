"""Throughput and memory of training on each kind of data, beside arrays in memory.

Each kind runs in a process of its own, on the same samples, with the same small net, so that reading is most of what is
done. "most memory" is the highest resident set above that before training, in MB; a memory map counts the pages of the
file that are in memory, which the system takes back as it needs them.

Usage: python benchmarks/streams.py [KIND ...] [--megabytes 256] [--epochs 3]
Prints a table; --json PATH writes it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from steps.machine import about_machine, busy_processes, memory_mb

KINDS = ("arrays", "memmap", "generator", "DataLoader", "DataLoader, 1 worker", "Dataset", "pandas")
WIDTH, BATCH = 1024, 64


def make_data(kind: str, path: Path, samples: int) -> tuple[Any, ...]:
    """Returns what `fit` is given: all samples are in a file, which arrays and tables hold in memory."""
    mapped = np.load(path, mmap_mode="r")
    target = np.zeros((samples, 1), np.float32)
    if kind == "memmap":
        return mapped, target
    if kind == "generator":

        def batches() -> Any:
            for start in range(0, samples, BATCH):
                with path.open("rb") as file:
                    file.seek(mapped.offset + start * WIDTH * 4)
                    rows = np.fromfile(file, np.float32, BATCH * WIDTH).reshape(-1, WIDTH)
                yield rows, target[start : start + BATCH]

        return (batches,)
    if kind == "pandas":
        import pandas

        return pandas.DataFrame(np.load(path)), target
    if kind.startswith("Data"):
        import torch

        class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
            def __len__(self) -> int:
                return samples

            def __getitem__(self, index: int) -> Any:
                return np.array(mapped[index]), target[index]

        workers = int("worker" in kind)
        if kind == "Dataset":
            return (Rows(),)
        return (torch.utils.data.DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers),)
    return np.load(path), target


def train(kind: str, path: Path, samples: int, epochs: int) -> dict[str, float]:
    """Returns samples per second of the median epoch, and the memory that it took."""
    from onnxtrain import Trainer

    model = onnx.parser.parse_model(f"""
      <ir_version: 10, opset_import: ["": 21]>
      line (float[n, {WIDTH}] x) => (float[n, 1] y) <float[1] b = {{0.0}}, int64[1] axes = {{1}}>
      {{ m = ReduceMean <keepdims = 1> (x, axes)  y = Add(m, b) }}""")
    trainer = Trainer(model, "mse", "sgd", metrics=[])
    warm = np.zeros((2 * BATCH, WIDTH), np.float32)
    trainer.fit(warm, warm[:, :1], batch_size=BATCH, verbose=False)
    before = memory_mb("VmRSS")
    data = make_data(kind, path, samples)
    streams = kind == "generator" or kind.startswith("DataLoader")
    options = {} if streams else {"batch_size": BATCH}
    history = trainer.fit(*data, epochs=epochs, verbose=False, **options)
    return {
        "samples_per_second": float(np.median(history.samples_per_second[1:])),
        "most_memory_mb": memory_mb() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the data")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    samples = options.megabytes * 2**20 // (4 * WIDTH) // BATCH * BATCH
    if options.one:
        kind, path = options.one
        print(json.dumps(train(kind, Path(path), samples, options.epochs)))
        return
    result: dict[str, Any] = {"machine": about_machine(), "busy": busy_processes(), "kinds": {}}
    for text in result["busy"]:
        print(f"not idle: {text}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.npy"
        file = np.lib.format.open_memmap(path, "w+", np.float32, (samples, WIDTH))
        for start in range(0, samples, BATCH):
            file[start : start + BATCH] = np.random.default_rng(start).standard_normal((BATCH, WIDTH))
        del file
        for kind in options.kinds or KINDS:
            command = [sys.executable, __file__, "--one", kind, str(path)]
            command += ["--megabytes", str(options.megabytes), "--epochs", str(options.epochs)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            measured = result["kinds"][kind] = json.loads(done.stdout)
            rate, first = measured["samples_per_second"], next(iter(result["kinds"].values()))
            print(
                f"{kind:22} {rate:12,.0f} samples/s ({rate / first['samples_per_second']:.0%})   "
                f"most memory {measured['most_memory_mb']:8.1f} MB of {options.megabytes} MB"
            )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
