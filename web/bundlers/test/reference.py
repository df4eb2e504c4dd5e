"""Writes the artifacts that the projects train, and the losses of the same 20 steps in Python.

    python web/bundlers/test/reference.py DIRECTORY

The batch is drawn as in `src/train.js` of the projects, by the formula in web/README.md (Random numbers).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# Native kernels round in another order than the standard ops, which all other hosts run.
os.environ["ONNXTRAIN_KERNELS"] = "off"

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import generate_artifacts
from onnxtrain.api import CheckpointState, Module, Optimizer

STEPS, BATCH, FEATURES = 20, 16, 64


def mix(x: np.ndarray) -> np.ndarray:
    """Hashes uint32 numbers."""
    x = x + np.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0x735A2D97)
    return x ^ (x >> 15)


def uniform(count: int, seed: int = 0) -> np.ndarray:
    """Returns what `count` calls of `session.random.uniform()` return."""
    integers = mix(np.arange(count, dtype=np.uint32) ^ mix(np.array([seed], np.uint32)))
    return ((integers >> 8) / 2**24).astype(np.float32)


def mlp() -> onnx.ModelProto:
    """Returns a classifier of 64 features with two classes and 32 hidden units."""
    random = np.random.default_rng(7)
    shapes = {"w1": (FEATURES, 32), "b1": (32,), "w2": (32, 2), "b2": (2,)}
    values = {name: random.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    return helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
                helper.make_node("Relu", ["h"], ["r"]),
                helper.make_node("Gemm", ["r", "w2", "b2"], ["logits"]),
            ],
            "mlp",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])],
            [numpy_helper.from_array(value, name) for name, value in values.items()],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )


def main(directory: Path) -> None:
    """Writes `directory/artifacts` and `directory/losses.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    artifacts = directory / "artifacts"
    generate_artifacts(
        mlp(), loss="cross_entropy", optimizer="adamw", profile="portable", artifact_directory=artifacts
    )
    state = CheckpointState.load_checkpoint(artifacts / "checkpoint")
    module = Module(artifacts / "training_model.onnx", state)
    optimizer = Optimizer(artifacts / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.01)
    losses = []
    x = uniform(BATCH * FEATURES).reshape(BATCH, FEATURES)
    labels = (x[:, 0] > 0.5).astype(np.int64)
    for _ in range(STEPS):
        losses.append(float(module(x, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    (directory / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
