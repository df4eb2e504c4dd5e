"""onnxruntime-training 1.19.2: the gradient builder behind `artifacts.generate_artifacts`.

Needs `onnxruntime-training-cpu==1.19.2 onnx==1.16.2 'numpy<2'` and torch, Python 3.11.
"""

from __future__ import annotations

import onnx
from onnxruntime.training.onnxblock import _training_graph_utils as graph_utils

PACKAGE = "onnxruntime-training-cpu"


def gradient_model(model: onnx.ModelProto, of: str, names: list[str]) -> tuple[onnx.ModelProto, list[str]]:
    """Returns the model with gradients of a scalar, and their names."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    result, _ = graph_utils.build_gradient_graph(copy, set(names), set(), [of])
    outputs = {value.name for value in result.graph.output}
    found = [f"{name}_grad" for name in names]
    if missing := [name for name in found if name not in outputs]:
        raise ValueError(f"no outputs {missing} among {sorted(outputs)}")
    return result, found
