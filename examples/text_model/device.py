"""On the device: numpy, onnxruntime and safetensors. Fine-tunes the model on source code.

Usage: python device.py FOLDER [--steps N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import corpus
import numpy as np

from onnxtrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer

LENGTH, BATCH, RATE = 64, 32, 1e-3


def loss_of(module: Module, text: np.ndarray) -> float:
    """Returns the mean loss per character on windows that are spread over a text, in nats."""
    module.eval()
    losses = [float(np.asarray(module(*batch))) for batch in corpus.spread(text, LENGTH)]
    module.train()
    return float(np.mean(losses))


def fine_tune(folder: Path, steps: int, seed: int = 0) -> dict[str, float]:
    """Trains on source code; writes `tuned`, a checkpoint, and `tuned.onnx`. Returns the losses on held-out text."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    scheduler = LinearLRScheduler(optimizer, steps // 10, steps, RATE)
    code, held_out_code = corpus.parts(corpus.code())
    _, held_out_prose = corpus.parts(corpus.prose())
    losses = {"prose before": loss_of(module, held_out_prose), "code before": loss_of(module, held_out_code)}
    for characters, next_ones in corpus.batches(code, LENGTH, steps, BATCH, seed):
        module(characters, next_ones)
        optimizer.step()
        scheduler.step()
        module.lazy_reset_grad()
    losses |= {"prose after": loss_of(module, held_out_prose), "code after": loss_of(module, held_out_code)}
    CheckpointState.save_checkpoint(state, folder / "tuned")
    module.export_model_for_inferencing(folder / "tuned.onnx", ["logits"])
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    for name, loss in fine_tune(options.folder, options.steps).items():
        print(f"{name:12} loss {loss:.4f}  perplexity {np.exp(loss):6.3f}")


if __name__ == "__main__":
    main()
