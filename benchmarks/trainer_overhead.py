"""Measure the cost of a step of `Trainer` beside the bare loop over `Module` and `Optimizer`, on the same artifacts.

Each engine runs in a process of its own; they take short turns, so that a machine that is slower for a while is slower
for all. Compared are the least time of a step in any turn, and the median over the turns. The bare loop takes batches
out of the arrays in a random order, runs the step, reads the loss, and updates the parameters. The trainer also
counts what the loss is the mean over, looks whether loss and gradients are finite, keeps a copy to go back to, seeds
the random numbers of the step, and sums up loss and accuracy.

Usage: python benchmarks/trainer_overhead.py [NET ...] [--rounds 40] [--seconds 0.3]
Prints a table; --json PATH writes it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from steps.machine import about_machine, busy_processes

ENGINES = ("bare loop", "Trainer", "Trainer without metrics")
NETS = ("tiny MLP", "digits CNN")
BATCH, BATCHES = 32, 200


def make_net(name: str) -> tuple[onnx.ModelProto, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns a model with inputs and labels for it."""
    rng = np.random.default_rng(0)
    samples = BATCH * BATCHES
    if name == "digits CNN":
        from onnxtrain.demo._model import digits_network

        images = rng.standard_normal((samples, 1, 8, 8)).astype(np.float32)
        return digits_network(), images, rng.integers(0, 10, samples)
    model = onnx.parser.parse_model("""
      <ir_version: 10, opset_import: ["": 21]>
      mlp (float[n, 4] x) => (float[n, 3] y) <float[4, 8] w1, float[8] b1, float[8, 3] w2, float[3] b2>
      { h = Gemm(x, w1, b1)  a = Tanh(h)  y = Gemm(a, w2, b2) }""")
    for key, shape in {"w1": (4, 8), "b1": (8,), "w2": (8, 3), "b2": (3,)}.items():
        value = rng.normal(0, 0.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, key))
    x = rng.standard_normal((samples, 4)).astype(np.float32)
    return model, x, x[:, :3].argmax(axis=1)


def make_epoch(engine: str, net: str) -> Callable[[], None]:
    """Returns what trains for one epoch."""
    from onnxtrain import Trainer

    model, x, y = make_net(net)
    metrics = [] if engine == "Trainer without metrics" else None
    trainer = Trainer(model, "cross_entropy", learning_rate=1e-4, metrics=metrics)
    if engine != "bare loop":
        return lambda: trainer.fit(x, y, batch_size=BATCH, verbose=False) and None
    from onnxtrain.api import CheckpointState, Module, Optimizer

    trainer.save(trainer.directory)
    state = CheckpointState.load_checkpoint(trainer.directory / "checkpoint")
    module = Module(trainer.directory / "training_model.onnx", state, trainer.directory / "eval_model.onnx")
    optimizer = Optimizer(trainer.directory / "optimizer_model.onnx", module)
    rng = np.random.default_rng(0)

    def epoch() -> None:
        assert trainer  # its directory lives as long
        order = rng.permutation(len(x))
        for start in range(0, len(x), BATCH):
            part = order[start : start + BATCH]
            loss, *_ = module(x[part], y[part])
            float(loss)
            optimizer.step()
            module.lazy_reset_grad()

    return epoch


def serve(engine: str, net: str) -> None:
    """Measures for as many seconds as each line of standard input says; answers with milliseconds per step."""
    epoch = make_epoch(engine, net)
    epoch()
    print("ready", flush=True)
    for line in sys.stdin:
        end = time.perf_counter() + float(line)
        times = []
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            epoch()
            times.append(1000 * (time.perf_counter() - start) / BATCHES)
        print(min(times), flush=True)


def measure(net: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Returns the least milliseconds of a step of each engine in each round."""
    running = {}
    for engine in ENGINES:
        command = [sys.executable, __file__, "--serve", engine, net]
        running[engine] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    try:
        for process in running.values():
            assert process.stdout
            process.stdout.readline()
        for _ in range(rounds):
            for engine, process in running.items():
                assert process.stdin
                assert process.stdout
                process.stdin.write(f"{seconds}\n")
                process.stdin.flush()
                times[engine].append(float(process.stdout.readline()))
    finally:
        for process in running.values():
            assert process.stdin
            process.stdin.close()
            process.wait()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nets", nargs="*", help=f"of {', '.join(NETS)}")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, metavar=("ENGINE", "NET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    busy = busy_processes()
    for text in busy:
        print(f"not idle: {text}", file=sys.stderr)
    result: dict[str, Any] = {"machine": about_machine(), "busy": busy, "step_ms": {}}
    for net in options.nets or NETS:
        times = result["step_ms"][net] = measure(net, options.rounds, options.seconds)
        bare = times["bare loop"]
        for engine, measured in times.items():
            more = ""
            if engine != "bare loop":
                least = min(measured) - min(bare)
                ratios = [ours / theirs for ours, theirs in zip(measured, bare, strict=True)]
                more = (
                    f"{least:+.3f} ms, {least / min(bare):+.0%} (median {statistics.median(ratios) - 1:+.0%})"
                )
            print(f"{net:12} {engine:26} {min(measured):8.3f} ms a step  {more}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
