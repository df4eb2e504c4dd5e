"""The artifacts of onnxtrain, through its on-device API on stock ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
from timing import Engine, serve

from onnxtrain.api import CheckpointState, Module, Optimizer


def make(net: str, artifacts: Path, threads: int) -> Engine:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    state = CheckpointState.load_checkpoint(artifacts / "checkpoint")
    module = Module(str(artifacts / "training_model.onnx"), state, session_options=options)
    optimizer = Optimizer(str(artifacts / "optimizer_model.onnx"), module)
    with np.load(artifacts / "batch.npz") as batch:
        inputs, labels = batch["inputs"], batch["labels"]

    def gradients() -> float:
        module.lazy_reset_grad()
        return float(module(inputs, labels))

    def update(rate: float) -> None:
        optimizer.set_learning_rate(rate)
        optimizer.step()

    return Engine(gradients, update, {"onnxruntime": ort.__version__, "numpy": np.__version__})


if __name__ == "__main__":
    serve(make)
