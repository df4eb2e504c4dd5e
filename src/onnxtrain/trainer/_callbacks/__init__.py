"""Callbacks: code of the user that a fit calls between its steps and epochs, one callback per file."""

from __future__ import annotations

from onnxtrain.trainer._callbacks._base import Callback, StepGradients
from onnxtrain.trainer._callbacks._checkpoint import ModelCheckpoint
from onnxtrain.trainer._callbacks._csv import CSVLogger
from onnxtrain.trainer._callbacks._early_stopping import EarlyStopping
from onnxtrain.trainer._callbacks._events import Events, callback_list
from onnxtrain.trainer._callbacks._logger import Logger
from onnxtrain.trainer._callbacks._mlflow import MLflowLogger
from onnxtrain.trainer._callbacks._optuna import OptunaPruning
from onnxtrain.trainer._callbacks._plateau import ReduceLROnPlateau
from onnxtrain.trainer._callbacks._sam import SAM
from onnxtrain.trainer._callbacks._swa import SWA
from onnxtrain.trainer._callbacks._tensorboard import TensorBoardLogger
from onnxtrain.trainer._callbacks._wandb import WandbLogger

__all__ = [
    "SAM",
    "SWA",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "Events",
    "Logger",
    "MLflowLogger",
    "ModelCheckpoint",
    "OptunaPruning",
    "ReduceLROnPlateau",
    "StepGradients",
    "TensorBoardLogger",
    "WandbLogger",
    "callback_list",
]
