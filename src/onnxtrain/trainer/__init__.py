"""Fine-tuning an ONNX model on numpy arrays: `Trainer` and its callbacks."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.schedules import SCHEDULES
from onnxtrain.trainer._callbacks import Callback, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from onnxtrain.trainer._history import History
from onnxtrain.trainer._metrics import METRICS, Metric
from onnxtrain.trainer._trainer import Trainer

__all__ = [
    "METRICS",
    "SCHEDULES",
    "Callback",
    "EarlyStopping",
    "History",
    "Metric",
    "ModelCheckpoint",
    "ReduceLROnPlateau",
    "Trainer",
]
