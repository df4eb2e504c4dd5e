"""Times how long ORTModule takes to capture each architecture of the zoo: seconds of the processor, one thread.

Each architecture has a process of its own, in which the libraries are imported already. It takes its training steps
twice. What the first turn takes longer than the second is capture, differentiation and the making of sessions; of the
second step it is what other shapes of the inputs cost, where the two batches of an architecture differ in shape.

Usage: python capture_times.py [NAME or part of it ...]
Writes results/capture_times.json, and prints the architectures from the slowest on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.utils._pytree as pytree
from measure import score
from sweep import in_turn, loaded, send
from zoo import load

from onnxtrain.ortmodule import ORTModule

RESULTS = Path(__file__).parent / "results" / "capture_times.json"


def step(model: ORTModule, batch: dict[str, Any], seed: int) -> float:
    """Returns the seconds of the processor that forward and backward take."""
    for generator in (torch.manual_seed, numpy.random.seed, random.seed):
        generator(seed)
    start = time.process_time()
    score(model(**batch)).backward()
    return time.process_time() - start


def shapes(batch: dict[str, Any]) -> list[Any]:
    """Returns the shapes of the tensors of a batch, and its other values."""
    return [tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in pytree.tree_leaves(batch)]


def times(name: str) -> dict[str, Any]:
    """Returns the seconds of the first step, of the second one, and whether its batch has other shapes."""
    found = load(name)[name]
    torch.manual_seed(0)
    model, batches = ORTModule(found.make().train()), found.batches()[:2]
    try:
        first, again = ([step(model, batch, i) for i, batch in enumerate(batches)] for _ in range(2))
        seconds = [round(max(0.0, a - b), 2) for a, b in zip(first, again, strict=True)]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    other = len(batches) > 1 and shapes(batches[0]) != shapes(batches[1])
    return {"seconds": seconds, "second_has_other_shapes": other}


def main() -> None:
    """Times the architectures whose names contain one of the arguments, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="all whose names contain one of these")
    parser.add_argument("--limit", type=float, default=300, help="seconds of the clock for each")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    for name in in_turn(n for n in loaded() if not arguments.names or any(p in n for p in arguments.names)):
        answer, theirs = context.Pipe(duplex=False)
        process = context.Process(target=send, args=(theirs, times, name))
        process.start()
        theirs.close()
        try:
            found = answer.recv() if answer.poll(arguments.limit) else {"error": "ran past the limit"}
        except EOFError:
            found = {"error": "the process ended"}
        process.kill()
        process.join()
        results[name] = found
        print(name, found, flush=True)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    timed = sorted(((r["seconds"], n) for n, r in results.items() if "seconds" in r), reverse=True)
    print("\nslowest first:", *(f"{seconds} {name}" for seconds, name in timed[:10]), sep="\n")


if __name__ == "__main__":
    main()
