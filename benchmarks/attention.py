"""Measure the memory and time of causal attention, forward and backward, as the sequence grows.

Four heads of 64, batch 1, 512 to 4,096 places. Every engine and length has a process of its own; memory is what the
process takes (VmHWM) beyond what it had before the first step, so that everything else counts once. "math" is
PyTorch's attention as products and a softmax.

Usage: python benchmarks/attention.py [--lengths N ...] [--threads 2]
Writes benchmarks/results/attention.json and notes/images/attention.png.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from steps.machine import memory_mb

HERE = Path(__file__).parent
LENGTHS = (512, 1024, 2048, 4096)
WIDTH, HEADS = 256, 4
ENGINES = {
    "torch": "PyTorch eager",
    "torch-math": "PyTorch eager, math",
    "device": "on-device API",
    "device-kernels": "on-device API, kernels",
    "ortmodule-kernels": "ORTModule, kernels",
}
STEPS = 5


def layer() -> Any:
    """The layer, with the same weights in every process."""
    import torch
    from torch.nn import functional

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            split = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
            q, k, v = split.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return mixed.transpose(1, 2).reshape(x.shape)

    torch.manual_seed(0)
    return Attention()


def batch(length: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(1, length, WIDTH)).astype(np.float32)


def prepare(length: int, folder: Path) -> None:
    """Writes the artifacts of the layer."""
    import torch

    from onnxtrain.artifacts import generate_artifacts

    warnings.simplefilter("ignore")
    path = folder / "layer.onnx"
    torch.onnx.export(
        layer(), (torch.from_numpy(batch(length)),), path, dynamo=True, optimize=False, verbose=False
    )
    generate_artifacts(path, loss="mse", artifact_directory=folder)


def on_device(length: int, folder: Path) -> Callable[[], float]:
    from onnxtrain.api import CheckpointState, Module

    module = Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(folder / "checkpoint"))
    x = batch(length)
    target = np.zeros_like(x)

    def step() -> float:
        module.lazy_reset_grad()
        return float(module(x, target))

    return step


def in_torch(length: int, engine: str) -> Callable[[], float]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    net = layer()
    if engine.startswith("ortmodule"):
        from onnxtrain.ortmodule import ORTModule

        net = ORTModule(net)
    x = torch.from_numpy(batch(length))

    def step() -> float:
        net.zero_grad()
        with sdpa_kernel(SDPBackend.MATH) if engine == "torch-math" else nullcontext():
            loss = net(x).square().mean()
            loss.backward()
        return loss.item()

    return step


def work(engine: str, length: int, folder: Path) -> None:
    """Runs one engine; prints the loss, MB and ms of a step."""
    if engine == "prepare":
        return prepare(length, folder)
    step = on_device(length, folder) if engine.startswith("device") else in_torch(length, engine)
    before = memory_mb("VmRSS")
    loss, times = step(), []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))
    print(json.dumps({"loss": loss, "mb": round(memory_mb() - before, 1), "ms": round(min(times), 2)}))
    return None


def run(engine: str, length: int, folder: Path, threads: int) -> dict[str, float]:
    kernels = "on" if engine.endswith("kernels") else "off"
    environment = os.environ | {"ONNXTRAIN_KERNELS": kernels, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, "--work", engine, str(length), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    lines = done.stdout.splitlines()
    return {} if engine == "prepare" else json.loads(lines[-1])


def plot(results: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.8))
    for axis, key, title in zip(
        axes, ("mb", "ms"), ("memory of a step, MB", "time of a step, ms"), strict=True
    ):
        for engine, title_of_engine in ENGINES.items():
            line = results[engine]
            axis.loglog(
                [int(n) for n in line],
                [found[key] for found in line.values()],
                marker="o",
                label=title_of_engine,
            )
        axis.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
        axis.set_xlabel("places in the sequence")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", nargs=3, metavar=("ENGINE", "LENGTH", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        engine, length, folder = arguments.work
        return work(engine, int(length), Path(folder))
    results: dict[str, dict[str, dict[str, float]]] = {engine: {} for engine in ENGINES}
    for length in arguments.lengths:
        with tempfile.TemporaryDirectory() as folder:
            run("prepare", length, Path(folder), arguments.threads)
            for engine in ENGINES:
                results[engine][str(length)] = found = run(engine, length, Path(folder), arguments.threads)
                print(length, engine, found, flush=True)
        losses = [results[engine][str(length)]["loss"] for engine in ENGINES]
        if max(losses) - min(losses) > 1e-4 * max(losses):
            sys.exit(f"the losses differ: {losses}")
    path = HERE / "results" / "attention.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    plot(results, HERE.parent / "docs" / "images" / "attention.png")
    return None


if __name__ == "__main__":
    main()
