"""Switch BatchNormalization and Dropout between training and inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.tidy.constants import mark_constant
from onnxtrain.passes.tidy.unique_names import fresh_name

Mode = Literal["as_exported", "training", "inference"]
"""What becomes of an op that behaves differently in training."""

_MODES = ("as_exported", "training", "inference")
# BatchNormalization-14: inputs X, scale, B, input_mean, input_var; outputs Y, running_mean, running_var.
STATISTICS = ((3, 1), (4, 2))


class TrainingModePass(ir.passes.InPlacePass):
    """Put every BatchNormalization and Dropout, also in subgraphs, into the wanted mode.

    - BatchNormalization in training normalises with the statistics of the batch and has the updated running
      statistics as outputs 1 and 2, named `<statistic>_updated`; in inference these outputs do not exist, and
      their consumers get the statistics that went in.
    - Dropout in training has the constant `true` as its input `training_mode`; in inference it lacks that
      input, which the schema defines as false.

    Names of graph outputs stay. The other attributes and inputs (momentum, epsilon, ratio, seed) stay too.
    """

    def __init__(
        self,
        batch_norm: Mode | Mapping[ir.Node, Mode] = "as_exported",
        dropout: Mode | Mapping[ir.Node, Mode] = "as_exported",
    ) -> None:
        """Choose a mode for each of the two ops, for all its nodes or for some.

        Raises:
            ValueError: A mode is none of "as_exported", "training", "inference".
        """
        super().__init__()
        for name, given in (("batch_norm", batch_norm), ("dropout", dropout)):
            for mode in given.values() if isinstance(given, Mapping) else (given,):
                if mode in _MODES:
                    continue
                raise ValueError(f"{name}={mode!r}: choose one of {', '.join(map(repr, _MODES))}.")
        self.batch_norm = batch_norm
        self.dropout = dropout

    def requires(self, model: ir.Model) -> None:
        """Require opset 14, where both ops have got their `training_mode`."""
        if model.graph.opset_imports[""] < 14:
            raise ir.passes.PreconditionError(
                "TrainingModePass needs opset 14 or newer; canonicalize the model."
            )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Switch the ops in place."""
        switches: dict[tuple[str, Mode], Callable[[ir.Model, ir.Node], bool]] = {
            ("BatchNormalization", "training"): _batch_norm_to_training,
            ("BatchNormalization", "inference"): _batch_norm_to_inference,
            ("Dropout", "training"): _dropout_to_training,
            ("Dropout", "inference"): _dropout_to_inference,
        }
        wanted = {"BatchNormalization": self.batch_norm, "Dropout": self.dropout}
        modified = False
        for node in tuple(ir.traversal.RecursiveGraphIterator(model.graph)):
            mode = wanted.get(node.op_type) if node.domain == "" else None
            if isinstance(mode, Mapping):
                mode = mode.get(node)
            switch = switches.get((node.op_type, mode)) if mode is not None else None
            if switch is not None:
                modified |= switch(model, node)
        return ir.passes.PassResult(model, modified)


def is_training_batch_norm(node: ir.Node) -> bool:
    """Return whether `node` is a BatchNormalization that normalises by the statistics of the batch."""
    return (
        node.op_type == "BatchNormalization"
        and node.domain == ""
        and node.attributes.get_int("training_mode", 0) == 1
    )


def _batch_norm_to_training(model: ir.Model, node: ir.Node) -> bool:
    if is_training_batch_norm(node) and len(node.outputs) == 3 and all(out.name for out in node.outputs):
        return False
    node.attributes.add(ir.AttrInt64("training_mode", 1))
    node.resize_outputs(3)
    for source, target in STATISTICS:
        before, after = node.inputs[source], node.outputs[target]
        if before is None:
            continue
        after.name = after.name or fresh_name(model, f"{before.name}_updated")
        after.type, after.shape = before.type, before.shape
    return True


def _batch_norm_to_inference(model: ir.Model, node: ir.Node) -> bool:
    if not is_training_batch_norm(node) and len(node.outputs) == 1:
        return False
    node.attributes.pop("training_mode", None)
    for source, target in STATISTICS:
        before = node.inputs[source]
        if before is None or len(node.outputs) <= target:
            continue
        after = node.outputs[target]
        if after.is_graph_output():
            # A graph output keeps its name, so it cannot be the statistic itself.
            name, after.name = after.name, None
            copy = ir.node(
                "Identity", [before], outputs=[ir.Value(name=name, type=after.type, shape=after.shape)]
            )
            node.append(copy)
            after.replace_all_uses_with(copy.outputs[0], replace_graph_outputs=True)
        else:
            after.replace_all_uses_with(before)
    node.resize_outputs(1)
    return True


def _dropout_to_training(model: ir.Model, node: ir.Node) -> bool:
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    if mode is not None and mode.const_value is not None and bool(mode.const_value.numpy()):
        return False
    node.resize_inputs(3)
    node.replace_input_with(2, _true(model))
    return True


def _dropout_to_inference(model: ir.Model, node: ir.Node) -> bool:
    if len(node.inputs) <= 2:
        return False
    node.resize_inputs(2)
    return True


def _true(model: ir.Model) -> ir.Value:
    """Return the initializer that switches every Dropout on, which the first one adds."""
    name = "onnxtrain.training_mode"
    value = model.graph.initializers.get(name)
    if value is None:
        tensor = ir.tensor(np.array(True), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape([]), const_value=tensor)
        mark_constant(value)
        model.graph.register_initializer(value)
    return value
