"""Composes training graphs from blocks; source compatible with `onnxruntime.training.onnxblock`.

::

    from onnxtrain import onnxblock

    class TwoHeads(onnxblock.TrainingBlock):
        def __init__(self):
            super().__init__()
            self.first, self.second = onnxblock.loss.MSELoss(), onnxblock.loss.MSELoss()
            self.weight, self.mul = onnxblock.blocks.Constant(0.4), onnxblock.blocks.Mul()
            self.add = onnxblock.blocks.Add()

        def build(self, y1, y2):
            second = self.mul(self.weight(), self.second(y2, target_name="target2"))
            return self.add(self.first(y1, target_name="target1"), second)

    block = TwoHeads()
    with onnxblock.base(onnx.load("model.onnx")):
        block("y1", "y2")
        training_model, eval_model = block.to_model_proto()
    onnxblock.save_checkpoint(block.parameters(), "checkpoint")
"""

from __future__ import annotations

# The first import: if onnx is missing, its error message says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.onnxblock import blocks, loss, optim
from onnxtrain.onnxblock._block import Block
from onnxtrain.onnxblock.checkpoint_utils import load_checkpoint_to_model, save_checkpoint
from onnxtrain.onnxblock.model_accessor import base, custom_op_library, empty_base
from onnxtrain.onnxblock.onnxblock import ForwardBlock, TrainingBlock

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
