"""Measure building, session creation and a step as an encoder's layers, width, batch and sequence grow 1x to 16x.

The encoder of the other benchmarks, from one layer of width 64 and one sample of 32 words, one of these at a time.
Forward, backward and AdamW through the on-device API, with the kernels that are installed, and in PyTorch eager. Each
measurement has a process of its own.

Usage: python benchmarks/growth.py
Writes benchmarks/results/growth.json and notes/images/growth.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
START = {"layers": 1, "width": 64, "batch": 1, "length": 32}
FACTORS = (1, 2, 4, 8, 16)
WHAT = {
    "artifacts_s": "generate_artifacts",
    "sessions_s": "sessions",
    "step_s": "step",
    "torch_step_s": "step in PyTorch eager",
}
STEPS = 10


def least(step: Callable[[], object]) -> float:
    """Returns the least seconds of some steps, after two to warm up."""
    times = []
    for _ in range(STEPS + 2):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def batch_of(sizes: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns words and classes."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 1000, (sizes["batch"], sizes["length"])), rng.integers(0, 10, sizes["batch"])


def in_torch(sizes: dict[str, int], folder: Path) -> dict[str, float]:
    """Writes the artifacts and times PyTorch's steps."""
    import torch
    from steps.nets.sequences import Encoder

    from onnxtrain import artifacts, optimizers

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(2)
    net = Encoder(words=1000, width=sizes["width"], layers=sizes["layers"])
    words, target = map(torch.from_numpy, batch_of(sizes))
    example = words if len(words) > 1 else torch.cat([words, words])
    torch.onnx.export(
        net,
        (example,),
        folder / "exported.onnx",
        dynamo=True,
        optimize=False,
        verbose=False,
        dynamic_shapes=({0: torch.export.Dim("batch", min=2)},),
    )
    start = time.perf_counter()
    artifacts.generate_artifacts(
        folder / "exported.onnx",
        loss="cross_entropy",
        requires_grad=[name for name, _ in net.named_parameters()],
        optimizer=optimizers.AdamW(),
        artifact_directory=folder,
    )
    seconds = time.perf_counter() - start
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(words), target).backward()
        optimizer.step()

    return {"artifacts_s": seconds, "torch_step_s": least(step)}


def on_device(sizes: dict[str, int], folder: Path) -> dict[str, float]:
    """Times sessions and steps of the artifacts."""
    from onnxtrain.api import CheckpointState, Module, Optimizer

    start = time.perf_counter()
    module = Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(folder / "checkpoint"))
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    seconds = time.perf_counter() - start
    words, target = batch_of(sizes)

    def step() -> None:
        module.lazy_reset_grad()
        module(words, target)
        optimizer.step()

    return {"sessions_s": seconds, "step_s": least(step)}


def measure(sizes: dict[str, int]) -> dict[str, float]:
    """Runs both parts, one after the other, in processes of their own."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in ("torch", "device"):
            command = [sys.executable, __file__, "--part", part, json.dumps(sizes), folder]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            found |= json.loads(done.stdout.splitlines()[-1])
    return {key: round(value, 5) for key, value in found.items()}


def plot(results: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Draws a panel for each size that grows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(3 * len(results), 3.4), sharey=True)
    for axes, (name, line) in zip(panels, results.items(), strict=True):
        for key, title in WHAT.items():
            axes.loglog(
                [START[name] * int(f) for f in line], [v[key] for v in line.values()], "o-", label=title
            )
        axes.set_xlabel(name)
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("seconds")
    panels[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--part", nargs=3, metavar=("PART", "SIZES", "FOLDER"), help="what a process of its own does"
    )
    part = parser.parse_args().part
    if part is not None:
        work = in_torch if part[0] == "torch" else on_device
        print(json.dumps(work(json.loads(part[1]), Path(part[2]))))
        return
    first = measure(START)
    results = {name: {"1": first} for name in START}
    for name in START:
        for factor in FACTORS[1:]:
            results[name][str(factor)] = measure(START | {name: factor * START[name]})
            print(name, factor, results[name][str(factor)], flush=True)
    (HERE / "results" / "growth.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, HERE.parent / "docs" / "images" / "growth.png")


if __name__ == "__main__":
    main()
