"""Rewrites models for `profile="portable"`: each file avoids a construct that some stock build lacks or gets wrong."""

from __future__ import annotations

from onnxtrain.passes.parameters.training_mode import trains
from onnxtrain.passes.portable._nodes import every_node
from onnxtrain.passes.portable._squares import HOLDS
from onnxtrain.passes.portable.batch_norm import TrainingBatchNormPass
from onnxtrain.passes.portable.infinities import InfinitiesPass
from onnxtrain.passes.portable.obstacles import Obstacle, find_obstacles
from onnxtrain.passes.portable.pipeline import make_portable
from onnxtrain.passes.portable.random_numbers import draw_from_input

__all__ = [
    "HOLDS",
    "InfinitiesPass",
    "Obstacle",
    "TrainingBatchNormPass",
    "draw_from_input",
    "every_node",
    "find_obstacles",
    "make_portable",
    "trains",
]
