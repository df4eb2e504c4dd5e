"""Builds the inference model of a training run: the original model's outputs, without targets or loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import find_value
from onnxtrain.passes import (
    CleanupPass,
    TrainingModePass,
    apply_workarounds,
    promote_initializers,
    settle_shapes,
)


def build_inference_model(
    model: ir.Model, outputs: Sequence[str], parameters: Sequence[str], statistics: Sequence[str]
) -> ir.Model | None:
    """Returns the part of a canonical model that computes `outputs`, in inference mode.

    The inputs of the inference model are the user inputs that the outputs need, then all parameters, then all
    statistics, in the order of the eval model, so that a host can bind the same buffers to both models.

    Returns:
        A new model, or None if `outputs` is empty or names a value that the model does not have.
    """
    inference = model.clone()
    values = [find_value(inference.graph, name) for name in outputs]
    # A model whose only output is its loss predicts nothing.
    if not outputs or None in values:
        return None
    inference.graph.outputs.clear()
    inference.graph.outputs.extend(value for value in values if value is not None)
    TrainingModePass(batch_norm="inference", dropout="inference")(inference)
    CleanupPass(keep={*parameters, *statistics})(inference)
    # If the model itself computes the loss, its labels are inputs that nothing reads any more.
    for value in tuple(inference.graph.inputs):
        if not value.uses() and not value.is_graph_output():
            inference.graph.inputs.remove(value)
    # After the removal of unused inputs: parameters that only the loss reads stay inputs, because hosts bind the same
    # parameters to all models.
    promote_initializers(inference, [*parameters, *statistics])
    # The parameters have no values now, so nothing derived from them can be folded; shapes are inferred again.
    inference = settle_shapes(inference)
    CleanupPass(keep=set())(inference)
    return apply_workarounds(inference)


def inference_entry(model: ir.Model, held: Sequence[str]) -> dict[str, Any]:
    """Returns the manifest entry of an inference model.

    Args:
        model: the inference model.
        held: names of the inputs that are parameters or running statistics, which a host reads from the checkpoint.
    """
    return {
        "inputs": [str(value.name) for value in model.graph.inputs if value.name not in set(held)],
        "outputs": [str(value.name) for value in model.graph.outputs],
    }
