"""Trains low-rank adapters (LoRA) for a deployed model, and exchanges them with PEFT and onnxruntime-genai.

`add_lora` adds adapters to a model, `adapter_model` adds inputs for adapters to a deployed model, `save_adapter` and
`load_adapter` write and read adapter files, and `merge` adds adapters to the weights.
"""

from __future__ import annotations

# The first import: if onnx is missing, its error message says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.errors import AdapterMismatchError
from onnxtrain.lora._config import LoraConfig
from onnxtrain.lora._description import METADATA_KEY
from onnxtrain.lora._files import load_adapter, save_adapter
from onnxtrain.lora._insert import adapter_model, add_lora, target_names, train_adapters
from onnxtrain.lora._layers import LinearLayer, linear_layers
from onnxtrain.lora._merge import merge
from onnxtrain.lora._names import copy_module_names

__all__ = [
    "METADATA_KEY", "AdapterMismatchError", "LinearLayer", "LoraConfig", "adapter_model", "add_lora",
    "copy_module_names", "linear_layers", "load_adapter", "merge", "save_adapter", "target_names", "train_adapters",
]  # fmt: skip
