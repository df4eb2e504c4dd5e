"""The inference model of a training run: the outputs of the original model, without targets and loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import find_value
from onnxtrain.passes import CleanupPass, TrainingModePass, promote_initializers, settle_shapes, suit_runtime


def build_inference_model(
    model: ir.Model, outputs: Sequence[str], parameters: Sequence[str], statistics: Sequence[str]
) -> ir.Model | None:
    """Returns the part of a canonical model that computes `outputs`, in inference mode; `model` is not changed.

    Its inputs are those of the user that are needed, then all parameters, then all statistics, as the eval model has
    them, so that a host binds the same buffers to both. None where there are no outputs.
    """
    inference = model.clone()
    values = [find_value(inference.graph, name) for name in outputs]
    if not outputs or None in values:
        return None
    inference.graph.outputs.clear()
    inference.graph.outputs.extend(value for value in values if value is not None)
    TrainingModePass(batch_norm="inference", dropout="inference")(inference)
    CleanupPass(keep={*parameters, *statistics})(inference)
    for value in tuple(inference.graph.inputs):
        if not value.uses() and not value.is_graph_output():
            inference.graph.inputs.remove(value)
    promote_initializers(inference, [*parameters, *statistics])
    inference = settle_shapes(inference)
    CleanupPass(keep=set())(inference)
    return suit_runtime(inference)


def inference_entry(model: ir.Model, held: Sequence[str]) -> dict[str, Any]:
    """Returns what the manifest says of an inference model, of which the store holds some inputs."""
    return {
        "inputs": [str(value.name) for value in model.graph.inputs if value.name not in set(held)],
        "outputs": [str(value.name) for value in model.graph.outputs],
    }
