"""Training steps of a classifier over a large embedding, of which a batch reads a few rows: dense and sparse gradients.

The mean of 32 of 1,000,000 embeddings of 64, and a linear layer; batches of 8. Dense: Adam of the whole table. Sparse:
SparseAdam of the rows that were read, Adam of the rest. Every engine has a process of its own; they take turns. Losses
must be those of PyTorch. Memory is VmHWM of the process after the steps, beyond that before the model was loaded.

Usage: python benchmarks/embeddings.py [--rows 1000000] [--rounds 3]
Writes benchmarks/results/embeddings.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from steps.machine import about_machine, memory_mb

HERE = Path(__file__).parent
WIDTH, CLASSES, BATCH, LENGTH, STEPS, RATE = 64, 10, 8, 32, 20, 1e-3
ENGINES = [f"{engine}, {kind}" for engine in ("PyTorch", "stock", "kernels") for kind in ("dense", "sparse")]


def weights(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"table": (rows, WIDTH), "weight": (CLASSES, WIDTH), "bias": (CLASSES,)}
    return {name: 0.1 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def batches(rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.integers(0, rows, (BATCH, LENGTH)), rng.integers(0, CLASSES, BATCH)) for _ in range(STEPS)]


def prepare(rows: int, folder: Path) -> None:
    """Writes the weights, and artifacts in folders `dense` and `sparse`."""
    import onnx

    from onnxtrain.artifacts import generate_artifacts
    from onnxtrain.optimizers import Adam, ParameterGroup, SparseAdam

    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        net (int64[batch, {LENGTH}] x) => (float[batch, {CLASSES}] y) {{
          axis = Constant<value = int64[1] {{1}}>()
          read = Gather(table, x)
          mean = ReduceMean<keepdims = 0>(read, axis)
          y = Gemm<transB = 1>(mean, weight, bias)
        }}"""
    )
    given = weights(rows)
    np.savez(folder / "weights.npz", **given)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in given.items())
    groups = (ParameterGroup("table", optimizer=SparseAdam()),)
    for kind, optimizer, sparse in (("dense", Adam(), None), ("sparse", Adam(groups=groups), ["table"])):
        generate_artifacts(
            model,
            loss="cross_entropy",
            optimizer=optimizer,
            sparse_gradients=sparse,
            artifact_directory=folder / kind,
        )


def on_device(folder: Path) -> Callable[[np.ndarray, np.ndarray], float]:
    from onnxtrain.api import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)

    def step(x: np.ndarray, target: np.ndarray) -> float:
        module.lazy_reset_grad()
        loss = float(module(x, target))
        optimizer.step()
        return loss

    return step


def in_pytorch(folder: Path, sparse: bool) -> Callable[[np.ndarray, np.ndarray], float]:
    import torch
    from torch.nn import functional

    given = np.load(folder / "weights.npz")
    table, weight, bias = (torch.nn.Parameter(torch.from_numpy(given[name])) for name in given.files)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam([weight, bias] if sparse else [table, weight, bias], RATE, fused=True)
    ]
    if sparse:
        optimizers.append(torch.optim.SparseAdam([table], RATE))

    def step(x: np.ndarray, target: np.ndarray) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean = functional.embedding(torch.from_numpy(x), table, sparse=sparse).mean(1)
        loss = functional.cross_entropy(functional.linear(mean, weight, bias), torch.from_numpy(target))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    return step


def work(engine: str, rows: int, folder: Path) -> None:
    """Takes the steps; prints the losses, the median of ms and MB."""
    name, kind = engine.split(", ")
    if name == "PyTorch":
        import torch  # noqa: F401

        before = memory_mb()
        step = in_pytorch(folder, kind == "sparse")
    else:
        import onnxtrain.api  # noqa: F401

        before = memory_mb()
        step = on_device(folder / kind)
    losses, times = [], []
    for x, target in batches(rows):
        start = time.perf_counter()
        losses.append(step(x, target))
        times.append(1000 * (time.perf_counter() - start))
    taken = {"ms": round(statistics.median(times[1:]), 3), "mb": round(memory_mb() - before)}
    print(json.dumps({"losses": losses, **taken}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments.work[0], arguments.rows, Path(arguments.work[1]))
    found: dict[str, list[dict]] = {engine: [] for engine in ENGINES}
    with tempfile.TemporaryDirectory() as temporary:
        prepare(arguments.rows, Path(temporary))
        for _ in range(arguments.rounds):
            for engine, line in found.items():
                command = [
                    sys.executable,
                    __file__,
                    "--rows",
                    str(arguments.rows),
                    "--work",
                    engine,
                    temporary,
                ]
                kernels = "off" if engine.startswith("stock") else "auto"
                environment = os.environ | {"ONNXTRAIN_KERNELS": kernels}
                done = subprocess.run(command, capture_output=True, text=True, env=environment)
                if done.returncode:
                    sys.exit(f"{engine}: {done.stderr}")
                line.append(json.loads(done.stdout.splitlines()[-1]))
    results = {}
    for engine, line in found.items():
        theirs = found[f"PyTorch, {engine.split(', ')[1]}"][0]["losses"]
        np.testing.assert_allclose(line[0]["losses"], theirs, rtol=1e-4, err_msg=engine)
        results[engine] = {key: min(one[key] for one in line) for key in ("ms", "mb")}
        print(engine, results[engine])
    written = {"machine": about_machine(), "rows": arguments.rows, "steps": results}
    (HERE / "results" / "embeddings.json").write_text(json.dumps(written, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
