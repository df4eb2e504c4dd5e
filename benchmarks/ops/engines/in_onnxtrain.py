"""onnxtrain."""

from __future__ import annotations

import onnx

from onnxtrain.autodiff import differentiate

PACKAGE = "onnxtrain"


def gradient_model(model: onnx.ModelProto, of: str, names: list[str]) -> tuple[onnx.ModelProto, list[str]]:
    """Returns the model with gradients of a scalar, and their names."""
    result = differentiate(model, of, names)
    return result, [value.name for value in result.graph.output][-len(names) :]
