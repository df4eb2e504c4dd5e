"""The artifacts of onnxtrain, through its on-device API on stock ONNX Runtime; the process has no PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime as ort

from onnxtrain import api
from steps.engines._device import on_device
from steps.engines._engine import Engine, Job

__all__ = ["make"]


def make(job: Job) -> Callable[[], Engine]:
    """Returns what starts the engine."""
    return on_device(api, job, job.files, {"onnxruntime": ort.__version__, "numpy": np.__version__})
