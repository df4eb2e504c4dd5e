"""The on-device API, onnxtrain's or that of onnxruntime-training, which is the same, on artifacts of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from steps.engines._engine import Engine, Job

__all__ = ["on_device"]


def on_device(api: Any, job: Job, artifacts: Path, versions: dict[str, str]) -> Callable[[], Engine]:
    """Returns what starts the engine.

    Args:
        api: module with CheckpointState, Module and Optimizer.
        job: what is to be done.
        artifacts: folder of the artifacts.
        versions: of the packages it runs on.
    """
    with np.load(job.files / "batch.npz") as batch:
        arrays = batch["inputs"], batch["target"]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = job.threads

    def start() -> Engine:
        state = api.CheckpointState.load_checkpoint(str(artifacts / "checkpoint"))
        module = api.Module(
            str(artifacts / "training_model.onnx"), state, device=job.device, session_options=options
        )
        # On a GPU, as PyTorch's tensors are.
        batch = (
            arrays
            if job.device == "cpu"
            else [ort.OrtValue.ortvalue_from_numpy(array, job.device) for array in arrays]
        )
        optimizer = api.Optimizer(str(artifacts / "optimizer_model.onnx"), module)
        module.train()

        def gradients() -> float:
            module.lazy_reset_grad()
            loss = module(*batch)
            return float(loss.numpy() if isinstance(loss, ort.OrtValue) else loss)

        def update(rate: float) -> None:
            optimizer.set_learning_rate(rate)
            optimizer.step()

        return Engine(gradients, update, versions)

    return start
