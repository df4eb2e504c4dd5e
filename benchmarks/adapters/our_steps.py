"""Takes steps of LoRA with the on-device API, and prints peak memory, seconds per step and losses as JSON.

Usage: python our_steps.py ARTIFACTS TOKENS STEPS
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from shapes import LEARNING_RATE, VOCABULARY, peak_mb

from onnxtrain.api import CheckpointState, Module, Optimizer


def main(files: Path, tokens: int, steps: int) -> None:
    state = CheckpointState.load_checkpoint(files / "checkpoint")
    module = Module(files / "training_model.onnx", state)
    optimizer = Optimizer(files / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, tokens))
    values = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    batch = [values[name] for name in module.input_names()]
    seconds, processor, losses = [], [], []
    for _ in range(steps):
        start, start_processor = time.perf_counter(), time.process_time()
        module.lazy_reset_grad()
        losses.append(float(module(*batch)))
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - start_processor)
    print(
        json.dumps(
            {
                "mb": peak_mb(),
                "seconds": statistics.median(seconds[1:]),
                "losses": losses,
                "trained": module.get_parameters_size(),
                "processor_seconds": statistics.median(processor[1:]),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
