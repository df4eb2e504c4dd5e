"""Fine-tuning an ONNX model on numpy arrays: `Trainer` and its callbacks."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.schedules import SCHEDULES
from onnxtrain.trainer._callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    Logger,
    ModelCheckpoint,
    ReduceLROnPlateau,
    TensorBoardLogger,
    WandbLogger,
)
from onnxtrain.trainer._finder import LearningRateRange
from onnxtrain.trainer._history import History
from onnxtrain.trainer._metrics import METRICS, Metric
from onnxtrain.trainer._trainer import Trainer

__all__ = [
    "METRICS",
    "SCHEDULES",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "History",
    "LearningRateRange",
    "Logger",
    "Metric",
    "ModelCheckpoint",
    "ReduceLROnPlateau",
    "TensorBoardLogger",
    "Trainer",
    "WandbLogger",
]
