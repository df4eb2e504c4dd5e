"""The callbacks that come with the trainer, one file each."""

from __future__ import annotations

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
from onnxtrain.trainer._callbacks.wandb import WandbLogger

__all__ = [
    "SAM",
    "SWA",
    "CSVLogger",
    "EarlyStopping",
    "Logger",
    "MLflowLogger",
    "ModelCheckpoint",
    "OptunaPruning",
    "ReduceLROnPlateau",
    "TensorBoardLogger",
    "WandbLogger",
]
