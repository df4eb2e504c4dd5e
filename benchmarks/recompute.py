"""Measure the memory that `recompute=True` saves and the time that it costs.

Training steps without the optimizer on the on-device API, with kernels, of the benchmark's encoder and decoder at four
times their batch. Memory is what the process takes (VmHWM) beyond what it took after a step of one sample, which
counts parameters and gradients. Losses must be equal. Every measurement has a process of its own; they take turns.

Usage: python benchmarks/recompute.py [NET ...] [--rounds 3]
Writes benchmarks/results/recompute.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from steps.machine import memory_mb
from steps.nets import CASES
from steps.prepare import write_artifacts

HERE = Path(__file__).parent
TIMES, STEPS = 4, 6


def prepare(name: str, folder: Path) -> None:
    """Writes the artifacts with and without, into folders of these names."""
    from onnxtrain.artifacts import generate_artifacts

    warnings.simplefilter("ignore")
    write_artifacts(CASES[name], folder)
    about = json.loads((folder / "about.json").read_text())
    for recompute in (False, True):
        generate_artifacts(
            folder / "exported.onnx",
            requires_grad=about["parameters"],
            loss=about["loss"],
            artifact_directory=folder / str(recompute),
            recompute=recompute,
        )


def work(folder: Path) -> None:
    """Takes the steps; prints the loss, MB and the least ms."""
    from onnxtrain.api import CheckpointState, Module

    module = Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(folder / "checkpoint"))
    batch = np.load(folder.parent / "batch.npz")
    x, target = batch["inputs"], batch["target"]
    module(x[:1], target[: len(target) // len(x)])
    before, times = memory_mb(), []
    x, target = np.concatenate([x] * TIMES), np.concatenate([target] * TIMES)
    for _ in range(STEPS):
        module.lazy_reset_grad()
        start = time.perf_counter()
        loss = module(x, target)
        times.append(1000 * (time.perf_counter() - start))
    print(json.dumps({"loss": float(loss), "mb": round(memory_mb() - before, 1), "ms": round(min(times), 2)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nets", nargs="*", default=["encoder", "gpt2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments.work)
    results = {}
    for name in arguments.nets:
        with tempfile.TemporaryDirectory() as temporary:
            prepare(name, Path(temporary))
            found: dict[str, list[dict[str, float]]] = {"False": [], "True": []}
            for _ in range(arguments.rounds):
                for recompute, line in found.items():
                    command = [sys.executable, __file__, "--work", str(Path(temporary, recompute))]
                    done = subprocess.run(command, capture_output=True, text=True)
                    if done.returncode:
                        sys.exit(done.stderr)
                    line.append(json.loads(done.stdout.splitlines()[-1]))
        plain, again = ({key: min(one[key] for one in line) for key in line[0]} for line in found.values())
        if plain["loss"] != again["loss"]:
            sys.exit(f"{name}: the losses differ, {plain['loss']} and {again['loss']}")
        results[name] = {"plain": plain, "recompute": again}
        print(
            name,
            plain,
            again,
            f"memory {again['mb'] / plain['mb']:.2f}, time {again['ms'] / plain['ms']:.2f}",
        )
    (HERE / "results" / "recompute.json").write_text(json.dumps(results, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
