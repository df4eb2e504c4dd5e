"""Reads data for training, evaluation and prediction: arrays, tables, datasets and streams, each as a `Source`."""

from onnxtrain.trainer.data._batch_size import dynamic_remedy, static_batch, warn_of_fixed_batch
from onnxtrain.trainer.data._class_weights import (
    ClassWeightedSource,
    ClassWeights,
    balanced_weights,
    chosen_weights,
)
from onnxtrain.trainer.data._convert import ArrayLike, fill, relaxed
from onnxtrain.trainer.data._images import BoundImages, ImageSource
from onnxtrain.trainer.data._layout import Layout
from onnxtrain.trainer.data._limited import check_limit, limited
from onnxtrain.trainer.data._open import TransformFunction, open_source, split
from onnxtrain.trainer.data._packing import pack_tokens
from onnxtrain.trainer.data._source import Options, Pass, Source, Worker, own_batches

__all__ = [
    "ArrayLike",
    "BoundImages",
    "ClassWeightedSource",
    "ClassWeights",
    "ImageSource",
    "Layout",
    "Options",
    "Pass",
    "Source",
    "TransformFunction",
    "Worker",
    "balanced_weights",
    "check_limit",
    "chosen_weights",
    "dynamic_remedy",
    "fill",
    "limited",
    "open_source",
    "own_batches",
    "pack_tokens",
    "relaxed",
    "split",
    "static_batch",
    "warn_of_fixed_batch",
]
