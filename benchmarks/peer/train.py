"""Trains an MLP classifier for 100 AdamW steps and writes the loss of each step as JSON.

Runs on onnxtrain, and with `onnxtrain` replaced by `onnxruntime.training` in the import lines, on the old package.

Usage: python train.py OUTPUT.json
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import artifacts
from onnxtrain.api import CheckpointState, Module, Optimizer

STEPS, BATCH, FEATURES, HIDDEN, CLASSES = 100, 32, 20, 64, 10


def make_model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {
        "fc1.weight": rng.normal(0, 0.2, (FEATURES, HIDDEN)),
        "fc1.bias": np.zeros(HIDDEN),
        "fc2.weight": rng.normal(0, 0.2, (HIDDEN, CLASSES)),
        "fc2.bias": np.zeros(CLASSES),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "fc1.weight", "fc1.bias"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("Gemm", ["a", "fc2.weight", "fc2.bias"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)


def main(output: str) -> None:
    model = make_model()
    with tempfile.TemporaryDirectory() as directory:
        artifacts.generate_artifacts(
            model,
            requires_grad=[tensor.name for tensor in model.graph.initializer],
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=directory,
        )
        files = Path(directory)
        state = CheckpointState.load_checkpoint(str(files / "checkpoint"))
        module = Module(str(files / "training_model.onnx"), state, str(files / "eval_model.onnx"))
        optimizer = Optimizer(str(files / "optimizer_model.onnx"), module)
        optimizer.set_learning_rate(5e-3)
        rng = np.random.default_rng(1)
        centers = rng.normal(0, 1, (CLASSES, FEATURES))
        losses = []
        for step in range(STEPS):
            labels = rng.integers(0, CLASSES, BATCH)
            inputs = (centers[labels] + rng.normal(0, 1, (BATCH, FEATURES))).astype(np.float32)
            module.train()
            losses.append(float(module(inputs, labels.astype(np.int64))))
            if step == STEPS // 2:
                optimizer.set_learning_rate(1e-3)
            if step < STEPS // 2 or step % 2:  # the second half accumulates the gradients of two batches
                optimizer.step()
                module.lazy_reset_grad()
        module.eval()
        final = float(module(inputs, labels.astype(np.int64)))
    Path(output).write_text(json.dumps({"losses": losses, "eval": final}))


if __name__ == "__main__":
    main(sys.argv[1])
