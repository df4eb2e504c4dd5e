"""onnxruntime-training 1.19.2 through its on-device API, on artifacts that it makes of the same exported model.

Needs an environment of its own: `onnxruntime-training-cpu==1.19.2 onnx==1.16.2 'numpy<2' torch==2.13.0`, Python 3.11.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import onnx
import onnxruntime as ort
from onnxruntime.training import api, artifacts

from steps.engines._device import on_device
from steps.engines._engine import Engine, Job

__all__ = ["make"]


def make(job: Job) -> Callable[[], Engine]:
    """Returns what starts the engine; its artifacts are made here, before anything counts."""
    about = json.loads((job.files / "about.json").read_text())
    folder = job.files / "ort-training"
    folder.mkdir(exist_ok=True)
    losses = {"cross_entropy": artifacts.LossType.CrossEntropyLoss, "mse": artifacts.LossType.MSELoss}
    artifacts.generate_artifacts(
        onnx.load(job.files / "forward.onnx"),
        requires_grad=about["parameters"],
        loss=losses[about["loss"]],
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=str(folder),
    )
    return on_device(api, job, folder, {"onnxruntime-training": ort.__version__})
