"""ORTModule: PyTorch's loop and optimizer, forward and backward in ONNX Runtime."""

from __future__ import annotations

import functools

import engine_torch
from timing import serve

from onnxtrain.ortmodule import DebugOptions, FallbackPolicy, ORTModule

if __name__ == "__main__":
    options = DebugOptions(fallback_policy=FallbackPolicy.DISABLE)
    serve(functools.partial(engine_torch.make, wrap=lambda module: ORTModule(module, options)))
