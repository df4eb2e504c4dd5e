"""Callbacks: what to do between the steps and epochs of a training run, one file each."""

from __future__ import annotations

from onnxtrain.trainer._callbacks._base import Callback
from onnxtrain.trainer._callbacks._checkpoint import ModelCheckpoint
from onnxtrain.trainer._callbacks._csv import CSVLogger
from onnxtrain.trainer._callbacks._early_stopping import EarlyStopping
from onnxtrain.trainer._callbacks._events import Events, callback_list
from onnxtrain.trainer._callbacks._logger import Logger
from onnxtrain.trainer._callbacks._plateau import ReduceLROnPlateau
from onnxtrain.trainer._callbacks._tensorboard import TensorBoardLogger
from onnxtrain.trainer._callbacks._wandb import WandbLogger

__all__ = [
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "Events",
    "Logger",
    "ModelCheckpoint",
    "ReduceLROnPlateau",
    "TensorBoardLogger",
    "WandbLogger",
    "callback_list",
]
