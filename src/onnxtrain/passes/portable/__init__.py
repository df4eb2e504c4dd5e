"""Write models for `profile="portable"`: one construct that some stock build lacks or gets wrong per file."""

from __future__ import annotations

from onnxtrain.passes.portable.batch_norm import TrainingBatchNormPass
from onnxtrain.passes.portable.dropout import HOLDS, draw_masks
from onnxtrain.passes.portable.infinities import InfinitiesPass
from onnxtrain.passes.portable.obstacles import Obstacle, find_obstacles
from onnxtrain.passes.portable.pipeline import suit_every_host

__all__ = [
    "HOLDS",
    "InfinitiesPass",
    "Obstacle",
    "TrainingBatchNormPass",
    "draw_masks",
    "find_obstacles",
    "suit_every_host",
]
