"""On the device: numpy, onnxruntime and safetensors. Trains adapters of the int4 model, or the float model, on code.

Usage: python device.py FOLDER lora|full [--steps N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from onnxtrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer

BATCH = 16
# Adapters take larger steps than weights.
RATES = {"lora": 4e-3, "full": 1e-3}
LENGTH = 128


def adapt(folder: Path, kind: str, steps: int, seed: int = 0) -> list[float]:
    """Trains from the files in `folder/kind`; writes the checkpoint there. Returns the loss of each step."""
    files = folder / kind
    state = CheckpointState.load_checkpoint(files / "checkpoint")
    module = Module(files / "training_model.onnx", state, files / "eval_model.onnx")
    optimizer = Optimizer(files / "optimizer_model.onnx", module)
    scheduler = LinearLRScheduler(optimizer, steps // 10, steps, RATES[kind])
    with np.load(folder / "tokens.npz") as rows:
        row = rows["code"]
    rng = np.random.default_rng(seed)
    losses = []
    for _ in range(steps):
        starts = rng.integers(0, len(row) - LENGTH, BATCH)
        batch = row[starts[:, None] + np.arange(LENGTH)]
        # The loss shifts the labels itself.
        losses.append(float(np.asarray(module(batch, batch))))
        optimizer.step()
        scheduler.step()
        module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, files / "trained")
    (files / "losses.json").write_text(json.dumps(losses))
    if kind == "full":
        module.export_model_for_inferencing(folder / "full.onnx", ["logits"])
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=list(RATES))
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    losses = adapt(options.folder, options.kind, options.steps)
    few = max(len(losses) // 20, 1)
    print(f"{options.kind}: loss {np.mean(losses[:few]):.3f} -> {np.mean(losses[-few:]):.3f}")


if __name__ == "__main__":
    main()
