"""Builds the eval model of a training run, in which Dropout and BatchNormalization are in inference mode."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxtrain.emitter import find_value, values_by_name
from onnxtrain.fusion import MeanLossPass, PackedProductPass
from onnxtrain.passes import (
    CleanupPass,
    FloatDequantizedPass,
    LongSumsPass,
    TrainingModePass,
    lift_constants,
    suit_runtime,
)
from onnxtrain.training.build_state import Build
from onnxtrain.training.forward_graph import computed_names


def build_eval_model(
    build: Build, model: ir.Model, file_outputs: Collection[str], *, as_deployed: bool
) -> ir.Model:
    """Copies the forward graph and switches Dropout and BatchNormalization to inference mode.

    Args:
        build: the build.
        model: the canonical model.
        file_outputs: outputs of the file, of which copies and constants are kept by name.
        as_deployed: True to keep the numerics of the file.
    """
    # Before the training model is built, which changes the forward graph in place.
    evaluation = build.forward.clone()
    TrainingModePass(batch_norm="inference", dropout="inference")(evaluation)
    CleanupPass(keep=set())(evaluation)
    # By names, which may stand for other values once passes have written nodes.
    _name_copies(evaluation, model, file_outputs)
    file_values = computed_names(evaluation)
    evaluation = suit_runtime(evaluation)
    # Evaluation would otherwise need the memory of a float weight that training does not need.
    if not as_deployed:
        FloatDequantizedPass()(evaluation)
        PackedProductPass()(evaluation)
        MeanLossPass()(evaluation)
    LongSumsPass(file_values if as_deployed else ())(evaluation)
    lift_constants(evaluation)
    return evaluation


def _name_copies(evaluation: ir.Model, model: ir.Model, names: Collection[str]) -> None:
    """Adds those of the named values that are copies of values of the eval model, or constants, in place.

    A device can then export them: the eval model has lost the Identity nodes of the file, and constants that the loss
    does not read.

    Args:
        evaluation: the eval model.
        model: the canonical model, which has the values.
        names: outputs of the file, e.g. ["logits", "anchors"].
    """
    present = values_by_name(evaluation.graph)
    for name in names:
        value = find_value(model.graph, name)
        while value is not None and value.name not in present and (node := value.producer()) is not None:
            value = node.inputs[0] if node.op_type == "Identity" else None
        if value is None or name in present:
            continue
        original = present.get(str(value.name))
        if original is None and value.const_value is not None:
            # The name of an initializer could be one that onnx_ir gives to a later node.
            constant = ir.node("Constant", [], {"value": value.const_value})
            evaluation.graph.append(constant)
            original = constant.outputs[0]
            original.type, original.shape = value.type, value.shape
        if original is not None and original.name != name:
            copy = ir.node("Identity", [original])
            copy.outputs[0].name, copy.outputs[0].type = name, original.type
            copy.outputs[0].shape = original.shape
            evaluation.graph.append(copy)
