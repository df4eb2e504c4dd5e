"""Calls of several threads on shared objects: whether they are right, and how many a second, beside one thread.

The net is the demo's for digits, with batches of 16 images. Expected losses and scores are those of the exported model
in a plain session of ONNX Runtime, in one thread, with the loss computed by numpy; trained parameters are those that
one thread gets from the same batches in the same order. Threads share

- evaluations: a Module in evaluation mode, without a lock of their own;
- training: a Module and its Optimizer, the lock held for a whole step;
- predictions: a Trainer;
- own modules: nothing, for comparison: a Module for each thread.

Usage: python benchmarks/threads.py [--calls 10000] [--threads 8] [--rounds 10]
The calls are made in rounds, with one thread and with all of them in turns. Prints the best of the rounds; --json PATH
writes it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from steps.machine import about_machine, busy_processes

from onnxtrain import Trainer
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.demo import digits_network, load_digits_data

BATCH = 16
Work = Callable[[int, int], bool]
"""Makes one call, given the numbers of the thread and of the call; returns whether the result is right."""


class Measured(NamedTuple):
    """Calls per second, milliseconds of processor time of a call, and the number of wrong results."""

    speed: float
    processor_ms: float
    wrong: int


def at_once(threads: int, calls: int, work: Work) -> Measured:
    """Makes so many calls, by threads that begin together."""
    barrier, wrong = threading.Barrier(threads + 1), [0] * threads

    def run(number: int) -> None:
        barrier.wait()
        for call in range(number, calls, threads):
            wrong[number] += not work(number, call)

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    barrier.wait()
    start, used = time.perf_counter(), time.process_time()
    for thread in running:
        thread.join()
    seconds, processor = time.perf_counter() - start, time.process_time() - used
    return Measured(calls / seconds, 1000 * processor / calls, sum(wrong))


class Shared:
    """The objects, the data, and what their results must be."""

    def __init__(self, threads: int) -> None:
        self.trainer = Trainer(digits_network(), "cross_entropy", metrics=[])
        self.folder = self.trainer.directory
        images, _, labels, _ = load_digits_data()
        self.batches = [(images[i : i + BATCH], labels[i : i + BATCH]) for i in range(0, 50 * BATCH, BATCH)]
        with tempfile.TemporaryDirectory() as folder:
            self.trainer.export(Path(folder) / "net.onnx")
            session = ort.InferenceSession(Path(folder) / "net.onnx")
        name = session.get_inputs()[0].name
        self.scores = [session.run(None, {name: x})[0] for x, _ in self.batches]
        self.losses = [_loss(s, y) for s, (_, y) in zip(self.scores, self.batches, strict=True)]
        self.modules = [self.module() for _ in range(threads)]
        self.module_of_all = self.module()
        for module in (*self.modules, self.module_of_all):
            module.eval()

    def module(self) -> Module:
        state = CheckpointState.load_checkpoint(self.folder / "checkpoint")
        return Module(self.folder / "training_model.onnx", state, self.folder / "eval_model.onnx")

    def evaluate(self, module: Module, call: int) -> bool:
        index = call % len(self.batches)
        return bool(np.isclose(module(*self.batches[index])[0], self.losses[index], atol=1e-4))

    def predict(self, call: int) -> bool:
        index = call % len(self.batches)
        return np.allclose(self.trainer.predict(self.batches[index][0]), self.scores[index], atol=1e-4)

    def train(self, threads: int, calls: int) -> Measured:
        """Takes training steps; the parameters must be those of the same batches in one thread."""
        module, order = self.module(), []
        optimizer = Optimizer(self.folder / "optimizer_model.onnx", module)

        def step(_: int, call: int) -> bool:
            with module.lock:
                order.append(call % len(self.batches))
                module(*self.batches[order[-1]])
                optimizer.step()
                module.lazy_reset_grad()
            return True

        measured = at_once(threads, calls, step)
        alone = self.module()
        optimizer = Optimizer(self.folder / "optimizer_model.onnx", alone)
        for index in order:
            alone(*self.batches[index])
            optimizer.step()
            alone.lazy_reset_grad()
        trained, expected = (m.get_contiguous_parameters().numpy() for m in (module, alone))
        right = len(order) == calls and np.array_equal(trained, expected)
        return measured._replace(wrong=0 if right else calls)


def _loss(scores: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> float:
    shifted = scores - scores.max(axis=1, keepdims=True)
    logarithms = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return float(-logarithms[np.arange(len(labels)), labels].mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shared = Shared(options.threads)
    ways: dict[str, Callable[[int, int], Measured]] = {
        "evaluations": lambda n, c: at_once(n, c, lambda _, k: shared.evaluate(shared.module_of_all, k)),
        "training": shared.train,
        "predictions": lambda n, c: at_once(n, c, lambda _, k: shared.predict(k)),
        "own modules": lambda n, c: at_once(n, c, lambda t, k: shared.evaluate(shared.modules[t], k)),
    }
    result: dict[str, Any] = {
        "machine": about_machine(),
        "busy": busy_processes(),
        "calls": options.calls,
        "ways": {},
    }
    for name, way in ways.items():
        way(1, min(200, options.calls))
        rounds: dict[int, list[Measured]] = {1: [], options.threads: []}
        for _ in range(options.rounds):  # in turns: a machine that is busy for a while is so for both
            for threads, measured in rounds.items():
                measured.append(way(threads, options.calls // options.rounds))
        found = {
            threads: {
                "calls_per_second": round(max(one.speed for one in measured)),
                "processor_ms": round(min(one.processor_ms for one in measured), 3),
                "wrong": sum(one.wrong for one in measured),
            }
            for threads, measured in rounds.items()
        }
        for threads, summary in found.items():
            print(f"{name:12} {threads} threads: {summary}", flush=True)
        result["ways"][name] = found
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
