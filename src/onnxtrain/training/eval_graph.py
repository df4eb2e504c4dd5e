"""Builds the eval model of a training run, in which Dropout and BatchNormalization are in inference mode."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxtrain.emitter import computed_names, find_value, values_by_name
from onnxtrain.fusion import MeanLossPass, PackedProductPass
from onnxtrain.passes import (
    CleanupPass,
    FloatDequantizedPass,
    LongSumsPass,
    RacingScatterPass,
    TrainingModePass,
    apply_workarounds,
    lift_constants,
    remove_unread_initializers,
)
from onnxtrain.training.build_state import Build


def build_eval_model(
    build: Build, model: ir.Model, file_outputs: Collection[str], *, as_deployed: bool
) -> ir.Model:
    """Returns the eval model: a copy of the forward graph with Dropout and BatchNormalization in inference mode.

    Args:
        build: state of the build, with the forward graph.
        model: the canonical model.
        file_outputs: names of the model file's outputs. Outputs that are copies of other values, or constants, are kept
            under these names.
        as_deployed: True to leave out rewrites that change how the file's ops round.
    """
    # A copy, because building the training model changes the forward graph in place.
    evaluation = build.forward.clone()
    TrainingModePass(batch_norm="inference", dropout="inference")(evaluation)
    CleanupPass(keep=set())(evaluation)
    of_forward = set(evaluation.graph.initializers)
    # Before the passes below: once they have written nodes, a name may belong to another value.
    _name_copies(evaluation, model, file_outputs)
    file_values = computed_names(evaluation.graph)
    # A device exports outputs of the model from the eval model, whether it returns them or not.
    evaluation = apply_workarounds(evaluation, keep_unread=True)
    # Otherwise evaluation would dequantize a weight to float in memory, which training avoids.
    if not as_deployed:
        FloatDequantizedPass()(evaluation)
        PackedProductPass()(evaluation)
        MeanLossPass()(evaluation)
    LongSumsPass(file_values if as_deployed else ())(evaluation)
    RacingScatterPass()(evaluation)
    lift_constants(evaluation)
    # ONNX Runtime warns of initializers that nothing reads, such as the axes of a sum that a pass wrote differently.
    graph = evaluation.graph
    remove_unread_initializers(
        graph, [value for name, value in graph.initializers.items() if name not in of_forward]
    )
    return evaluation


def _name_copies(evaluation: ir.Model, model: ir.Model, names: Collection[str]) -> None:
    """Restores the model file's outputs that cleanup removed from the eval model: copies of values, and constants.

    Cleanup removes Identity nodes and constants that the loss does not read, but a device needs these outputs to export
    the trained model.

    Args:
        evaluation: the eval model, changed in place.
        model: the canonical model, which still has all outputs of the file.
        names: names of these outputs, e.g. ["logits", "anchors"].
    """
    present = values_by_name(evaluation.graph)
    for name in names:
        value = find_value(model.graph, name)
        while value is not None and value.name not in present:
            node = value.producer()
            if node is None or node.op_type != "Identity":
                break
            value = node.inputs[0]
        if value is None or name in present:
            continue
        original = present.get(str(value.name))
        tensor = ir.convenience.get_const_tensor(value)
        if original is None and tensor is not None:
            # A Constant node, not an initializer: onnx_ir could give the initializer's name to a later node.
            constant = ir.node("Constant", [], {"value": tensor})
            evaluation.graph.append(constant)
            original = constant.outputs[0]
            original.type, original.shape = value.type, value.shape
        if original is not None and original.name != name:
            copy = ir.node("Identity", [original])
            copy.outputs[0].name, copy.outputs[0].type = name, original.type
            copy.outputs[0].shape = original.shape
            evaluation.graph.append(copy)
