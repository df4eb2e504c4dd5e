"""At the desk: trains the model on prose, exports it, lets onnxruntime fuse it, and makes of that file a training.

Usage: python desk.py FOLDER [--steps N]
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import corpus
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from model import HEADS, LENGTH, WIDTH, CharacterModel
from onnxruntime.transformers.optimizer import optimize_model
from torch.nn.functional import cross_entropy

from onnxtrain import generate_artifacts
from onnxtrain.emitter import Emitter
from onnxtrain.losses import CrossEntropyLoss, TargetSpec
from onnxtrain.ortmodule import ORTModule

BATCH, RATE = 32, 3e-3
Logits = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False)
class NextTokenLoss(CrossEntropyLoss):
    """Cross-entropy of logits as language models have them, [batch, sequence, tokens]: the classes are last."""

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        batch, sequence, tokens = scores.shape
        return super().targets(ir.Value(shape=ir.Shape([batch, tokens, sequence]), type=scores.type))

    def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        batch, sequence, tokens = scores.shape
        classes_second = op.Transpose(scores, perm=[0, 2, 1])
        classes_second.shape, classes_second.type = ir.Shape([batch, tokens, sequence]), scores.type
        return CrossEntropyLoss().build(op, classes_second, target)


def loss_of(logits: Logits, text: np.ndarray) -> float:
    """Returns the mean loss per character on windows that are spread over a text, in nats."""
    losses = [
        float(cross_entropy(torch.from_numpy(logits(x)).flatten(0, 1), torch.from_numpy(y).flatten()))
        for x, y in corpus.spread(text, LENGTH)
    ]
    return float(np.mean(losses))


def in_torch(model: torch.nn.Module) -> Logits:
    def logits(characters: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(torch.from_numpy(characters)).numpy()

    return logits


def in_file(path: Path) -> Logits:
    session = onnxruntime.InferenceSession(path)
    return lambda characters: session.run(["logits"], {"text": characters})[0]


def train(model: torch.nn.Module, text: np.ndarray, steps: int, seed: int = 0) -> None:
    """Trains in ONNX Runtime; the loop is PyTorch's."""
    engine = ORTModule(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for characters, next_ones in corpus.batches(text, LENGTH, steps, BATCH, seed):
        logits = engine(torch.from_numpy(characters))
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), torch.from_numpy(next_ones).flatten()).backward()
        optimizer.step()
        scheduler.step()
    assert engine.report().runs_in_onnxruntime, engine.report()


def export(model: torch.nn.Module, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, that it is the older one
        torch.onnx.export(
            model.eval(),
            (torch.zeros(2, 8, dtype=torch.int64),),
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=["text"],
            output_names=["logits"],
            dynamic_axes={"text": {0: "batch", 1: "sequence"}, "logits": {0: "batch", 1: "sequence"}},
        )


def fuse(source: Path, target: Path) -> Counter[str]:
    """Writes what onnxruntime's transformer optimizer makes of a file; returns its fused ops."""
    logging.getLogger("onnxruntime.transformers").setLevel(logging.ERROR)
    fused = optimize_model(
        str(source), "gpt2", num_heads=HEADS, hidden_size=WIDTH, opt_level=2, use_gpu=False
    )
    fused.save_model_to_file(str(target))
    nodes = onnx.load(target).graph.node
    return Counter(node.op_type for node in nodes if node.domain == "com.microsoft")


def prepare(folder: Path, steps: int) -> dict[str, float]:
    """Writes the files that the device needs; returns the losses on held-out prose on the way there."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = CharacterModel(len(corpus.CHARACTERS))
    text, held_out = corpus.parts(corpus.prose())
    losses = {"at the start": loss_of(in_torch(model), held_out)}
    train(model, text, steps)
    losses["trained in ORTModule"] = loss_of(in_torch(model), held_out)
    export(model, folder / "exported.onnx")
    losses["exported"] = loss_of(in_file(folder / "exported.onnx"), held_out)
    print("fused ops:", dict(fuse(folder / "exported.onnx", folder / "fused.onnx")))
    losses["fused by onnxruntime"] = loss_of(in_file(folder / "fused.onnx"), held_out)
    generate_artifacts(
        folder / "fused.onnx", loss=NextTokenLoss(), optimizer="adamw", artifact_directory=folder
    )
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    for name, loss in prepare(options.folder, options.steps).items():
        print(f"{name:22} loss {loss:.4f}  perplexity {np.exp(loss):6.3f}")


if __name__ == "__main__":
    main()
