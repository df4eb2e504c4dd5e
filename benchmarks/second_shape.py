"""Times what the first three sizes of the batch cost ORTModule: capture, differentiation and the making of sessions.

Seconds of the processor on one thread, without the training step itself, which is timed with the same size afterwards.

Usage: python second_shape.py [NET ...]
Writes results/second_shape.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from steps.machine import about_machine
from steps.nets import CASES, make_net

from onnxtrain.ortmodule import DebugOptions, ORTModule

RESULTS = Path(__file__).parent / "results" / "second_shape.json"
NETS = (
    "cnn", "mobilenetv2", "resnet18", "unet", "encoder", "gpt2", "resnet50", "efficientnet", "convnext", "bert", "vit",
    "tcn", "cnn3d", "vae", "mlp-tiny",
)  # fmt: skip


def times(name: str) -> list[float]:
    """Returns the seconds that a first, a second and a third size of the batch cost."""
    torch.set_num_threads(1)
    case = CASES[name]
    model = ORTModule(make_net(case), DebugOptions(capture_all=True))
    loss = {"cross_entropy": torch.nn.CrossEntropyLoss, "mse": torch.nn.MSELoss}[case.net.loss]()

    def step(batch: list[torch.Tensor]) -> float:
        start = time.process_time()
        loss(model(batch[0]), batch[1]).backward()
        return time.process_time() - start

    largest, seconds = max(case.batch, 4), []
    for size in (largest, largest - 1, largest - 2):
        batch: Any = [torch.from_numpy(np.asarray(a)) for a in case.net.data(np.random.default_rng(0), size)]
        first = step(batch)
        seconds.append(round(max(0.0, first - min(step(batch) for _ in range(2))), 2))
    return seconds


def main() -> None:
    """Times the nets that the arguments name, or all, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"default: {', '.join(NETS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["machine"] = about_machine()
    for name in parser.parse_args().nets or NETS:
        # A new interpreter: what one net imports and captures must not serve the next one.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results[name] = pool.apply(times, (name,))
        print(name, *results[name], flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
