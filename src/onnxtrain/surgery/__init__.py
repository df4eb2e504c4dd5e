"""Modifies models before training.

Replaces the head or adds classes to it, restores Dropout, makes the batch size dynamic, and lowers training ops to
standard ops.
"""

from __future__ import annotations

# The first import: if onnx is missing, its error message says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.surgery._add_classes import add_classes
from onnxtrain.surgery._dropout import restore_dropout
from onnxtrain.surgery._dynamic_batch import make_batch_dynamic
from onnxtrain.surgery._replace import replace_head
from onnxtrain.surgery._training_ops import lower_training_ops

__all__ = ["add_classes", "lower_training_ops", "make_batch_dynamic", "replace_head", "restore_dropout"]
