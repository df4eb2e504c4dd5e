"""The artifacts of onnxtrain, through its on-device API on stock ONNX Runtime; the process has no PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime as ort

from onnxtrain.api import CheckpointState, Module, Optimizer
from steps.engines._engine import Engine, Job

__all__ = ["make"]


def make(job: Job) -> Callable[[], Engine]:
    """Returns what starts the engine."""
    with np.load(job.files / "batch.npz") as batch:
        inputs, target = batch["inputs"], batch["target"]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = job.threads

    def start() -> Engine:
        state = CheckpointState.load_checkpoint(job.files / "checkpoint")
        module = Module(str(job.files / "training_model.onnx"), state, session_options=options)
        optimizer = Optimizer(str(job.files / "optimizer_model.onnx"), module)

        def gradients() -> float:
            module.lazy_reset_grad()
            return float(module(inputs, target))

        def update(rate: float) -> None:
            optimizer.set_learning_rate(rate)
            optimizer.step()

        return Engine(gradients, update, {"onnxruntime": ort.__version__, "numpy": np.__version__})

    return start
