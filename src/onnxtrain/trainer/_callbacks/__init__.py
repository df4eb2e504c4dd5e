"""Callbacks: what to do between the steps and epochs of a training run, one file each."""

from __future__ import annotations

from onnxtrain.trainer._callbacks._base import Callback
from onnxtrain.trainer._callbacks._checkpoint import ModelCheckpoint
from onnxtrain.trainer._callbacks._early_stopping import EarlyStopping
from onnxtrain.trainer._callbacks._events import Events, callback_list
from onnxtrain.trainer._callbacks._plateau import ReduceLROnPlateau

__all__ = ["Callback", "EarlyStopping", "Events", "ModelCheckpoint", "ReduceLROnPlateau", "callback_list"]
