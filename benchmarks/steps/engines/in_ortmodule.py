"""ORTModule: PyTorch's loop and optimizer, forward and backward in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable

import onnxruntime as ort

from onnxtrain.ortmodule import DebugOptions, FallbackPolicy, ORTModule
from steps.engines._engine import Engine, Job
from steps.engines.in_torch import start_training

__all__ = ["make"]


def make(job: Job) -> Callable[[], Engine]:
    """Returns what starts the engine."""
    options = DebugOptions(fallback_policy=FallbackPolicy.DISABLE)
    start = start_training(job, lambda module: ORTModule(module, options))

    def start_ortmodule() -> Engine:
        engine = start()
        return Engine(engine.gradients, engine.update, engine.versions | {"onnxruntime": ort.__version__})

    return start_ortmodule
