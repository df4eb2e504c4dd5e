"""Measures which training configurations of a model fit into a given amount of memory.

`plan_training` tries several choices of parameters to train: all, LoRA adapters, biases and norms, or the last layers.
For each choice, it trains a few steps in a separate process and measures the memory and the time per step.
"""

from __future__ import annotations

# Must be the first import: if onnx is not installed, the error then says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.planning._memory import memory_text, parse_memory
from onnxtrain.planning._plan import PlanChoice, plan_training

__all__ = ["PlanChoice", "memory_text", "parse_memory", "plan_training"]
