"""Fine-tunes an ONNX model on numpy arrays: `Trainer` and its callbacks."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.schedules import SCHEDULES
from onnxtrain.trainer._average_models import average_models
from onnxtrain.trainer._callbacks.checkpoint import ModelCheckpoint
from onnxtrain.trainer._callbacks.csv import CSVLogger
from onnxtrain.trainer._callbacks.early_stopping import EarlyStopping
from onnxtrain.trainer._callbacks.logger import Logger
from onnxtrain.trainer._callbacks.mlflow import MLflowLogger
from onnxtrain.trainer._callbacks.optuna import OptunaPruning
from onnxtrain.trainer._callbacks.plateau import ReduceLROnPlateau
from onnxtrain.trainer._callbacks.sam import SAM
from onnxtrain.trainer._callbacks.swa import SWA
from onnxtrain.trainer._callbacks.tensorboard import TensorBoardLogger
from onnxtrain.trainer._callbacks.time_limit import TimeLimit
from onnxtrain.trainer._callbacks.unfreeze import Unfreeze
from onnxtrain.trainer._callbacks.wandb import WandbLogger
from onnxtrain.trainer._fit.calibration import Calibration
from onnxtrain.trainer._fit.events import StepGradients
from onnxtrain.trainer._fit.learning_rate_range import LearningRateRange
from onnxtrain.trainer._metrics.metrics import METRICS, Metric
from onnxtrain.trainer._metrics.torch_metric import torch_metric
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._trainer import Callback, Trainer
from onnxtrain.trainer.data import pack_tokens
from onnxtrain.trainer.data._mixing import CutMix, MixUp

__all__ = [
    "METRICS",
    "SAM",
    "SCHEDULES",
    "SWA",
    "CSVLogger",
    "Calibration",
    "Callback",
    "CutMix",
    "EarlyStopping",
    "History",
    "LearningRateRange",
    "Logger",
    "MLflowLogger",
    "Metric",
    "MixUp",
    "ModelCheckpoint",
    "OptunaPruning",
    "ReduceLROnPlateau",
    "StepGradients",
    "TensorBoardLogger",
    "TimeLimit",
    "Trainer",
    "Unfreeze",
    "WandbLogger",
    "average_models",
    "pack_tokens",
    "torch_metric",
]
