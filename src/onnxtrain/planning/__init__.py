"""Measures which trainings of a model fit into a given memory.

`plan_training` runs a few steps of each choice of parameters (all, LoRA adapters, biases and norms, the last layers) in
a process of its own, and returns memory and time of each.
"""

from __future__ import annotations

# First of all imports: where onnx is missing, the error then says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.planning._memory import memory_text, parse_memory
from onnxtrain.planning._plan import PlanChoice, plan_training

__all__ = ["PlanChoice", "memory_text", "parse_memory", "plan_training"]
