"""Kills workers of a training at random moments, and compares its end with that of one process without a kill.

`python benchmarks/distributed/kills.py --kills 20 --workers 2 [--hosts local]` prints one line per kill and the result.
Metrics count the samples of each epoch, each of which has a target of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil

from onnxtrain import Trainer
from onnxtrain.distributed import DataParallel, launch

Array = np.ndarray[Any, Any]
SAMPLES, EPOCHS = 1000, 25


def seen_samples(prediction: Array, target: Array) -> float:
    return float(len(target))


def different_samples(prediction: Array, target: Array) -> float:
    return float(len(np.unique(target)))


def network() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.normal(0, 0.2, (8, 64)),
        "b1": np.zeros(64),
        "w2": rng.normal(0, 0.2, (64, 1)),
        "b2": np.zeros(1),
    }
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        net (float[n, 8] x, float[8, 64] w1, float[64] b1, float[64, 1] w2, float[1] b2) => (float[n, 1] y) {
            h = Gemm(x, w1, b1)  a = Tanh(h)  y = Gemm(a, w2, b2)
        }""")
    del model.graph.input[1:]
    tensors = [
        onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()
    ]
    model.graph.initializer.extend(tensors)
    return model


def train(directory: Path, strategy: Any = None) -> dict[str, Any]:
    """Trains, from the last save if there is one."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((SAMPLES, 8)).astype(np.float32)
    y = (np.sin(x).sum(axis=1, keepdims=True) + np.arange(SAMPLES)[:, None] * 1e-4).astype(np.float32)
    metrics: list[Any] = ["mae", seen_samples, different_samples]
    if (directory / "checkpoint").exists():
        trainer = Trainer.resume(directory, metrics=metrics, strategy=strategy)
    else:
        trainer = Trainer(
            network(), "mse", learning_rate=3e-3, metrics=metrics, directory=directory, strategy=strategy
        )
    _started(directory, os.getpid()).touch()
    # Killed after the last save: nothing is left to train.
    if trainer.resumes_fit or not len(trainer.history):
        trainer.fit(x, y, epochs=EPOCHS, batch_size=16, verbose=False)
    return {
        "epochs": trainer.history.epochs,
        "steps": trainer.global_step,
        "parameters": {name: parameter.data.copy() for name, parameter in trainer.parameters},
    }


def _started(directory: Path, process: int) -> Path:
    """Names the file that says that a process begins to train."""
    return directory.with_name(f"{directory.name}-{process}")


def running_workers() -> list[psutil.Process]:
    """Lists the processes of the workers: children by multiprocessing, or actors of Ray."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "spawn_main" in words or words.startswith("ray::_Worker"):
            found.append(process)
    return found


def started_workers(workers: int, seen: set[int]) -> list[psutil.Process]:
    """Waits until all workers are started again, and returns them; adds them to `seen`, those of before."""
    while True:
        alive = [process for process in running_workers() if process.pid not in seen]
        if len(alive) == workers:
            seen |= {process.pid for process in alive}
            return alive
        time.sleep(0.05)


def kill(count: int, workers: int, directory: Path, seed: int, longest: float) -> None:
    """Kills a worker, so many times, each at a random moment after all of them have been started again."""
    rng = random.Random(seed)
    seen: set[int] = set()
    for number in range(count):
        alive = started_workers(workers, seen)
        # Most kills fall into the training; starting may take longer than all of it.
        training = rng.random() < 0.8
        while training and not any(_started(directory, process.pid).exists() for process in alive):
            # The group has failed by itself, as Ray's does if another program takes its port, and is started again.
            if not all(process.is_running() for process in alive):
                alive = started_workers(workers, seen)
            time.sleep(0.01)
        wait = rng.uniform(0, longest)
        time.sleep(wait)
        rank = rng.randrange(workers)
        saved = (directory / "checkpoint").stat().st_mtime if (directory / "checkpoint").exists() else None
        try:
            sorted(alive, key=lambda process: process.pid)[rank].kill()
        except psutil.NoSuchProcess:
            print("all workers have ended before the kill", flush=True)
            return
        age = "no save yet" if saved is None else f"last save {time.time() - saved:.2f} s ago"
        phase = "training" if training else "the processes"
        print(
            f"kill {number + 1}: one of {workers}, {wait:.2f} s after the start of {phase}; {age}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hosts", default=None, help="'local' for Ray")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=4.0, help="seconds from a start to a kill, at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone = train(Path(folder) / "alone")
        directory = Path(folder) / "killed"
        arguments = (options.kills, options.workers, directory, options.seed, options.longest)
        threading.Thread(target=kill, args=arguments, daemon=True).start()
        strategy = DataParallel(save_steps=20)
        results = launch(
            train, directory, strategy, workers=options.workers, restarts=options.kills, hosts=options.hosts
        )
    worst = 0.0
    for result in results:
        assert result["steps"] == alone["steps"]
        for ours, theirs in zip(result["epochs"], alone["epochs"], strict=True):
            assert ours["seen_samples"] == ours["different_samples"] == SAMPLES
            worst = max(worst, abs(ours["loss"] - theirs["loss"]))
        for name, value in alone["parameters"].items():
            worst = max(worst, float(np.abs(result["parameters"][name] - value).max()))
    print(
        f"{alone['steps']} steps, {SAMPLES} samples in each of {EPOCHS} epochs; largest difference {worst:.1e}"
    )
    assert worst < 1e-4


if __name__ == "__main__":
    main()
