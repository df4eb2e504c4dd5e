"""Switch BatchNormalization and Dropout between training and inference mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.tidy.constants import add_constant
from onnxtrain.passes.tidy.replace_value import stand_in
from onnxtrain.passes.tidy.unique_names import fresh_name

Mode = Literal["as_exported", "training", "inference"]
"""Mode for an op that behaves differently in training; "as_exported" leaves the op alone."""

_MODES = get_args(Mode)
# Input and output index of each running statistic. BatchNormalization-14 has inputs X, scale, B, input_mean, input_var
# and outputs Y, running_mean, running_var.
STATISTICS = ((3, 1), (4, 2))


class TrainingModePass(ir.passes.InPlacePass):
    """Put BatchNormalization and Dropout nodes, also in subgraphs, into a mode.

    - BatchNormalization in training normalises by the statistics of the batch and returns the updated running
      statistics as outputs 1 and 2, named `<statistic>_updated`. In inference it has no such outputs, and their readers
      read the statistics that went in.
    - Dropout in training has the constant `true` as input `training_mode`. In inference it has no such input, whose
      default is false.

    Expects opset 14 or newer. Names of graph outputs, momentum, epsilon, ratio and seed stay.
    """

    def __init__(
        self,
        batch_norm: Mode | Mapping[ir.Node, Mode] = "as_exported",
        dropout: Mode | Mapping[ir.Node, Mode] = "as_exported",
    ) -> None:
        """Choose the modes.

        Args:
            batch_norm: Mode of all BatchNormalization nodes, e.g. "training", or modes of some nodes; others stay as
                they are.
            dropout: The same for Dropout.

        Raises:
            ValueError: A mode is none of "as_exported", "training", "inference".
        """
        super().__init__()
        for name, modes in (("batch_norm", batch_norm), ("dropout", dropout)):
            for mode in modes.values() if isinstance(modes, Mapping) else (modes,):
                if mode in _MODES:
                    continue
                raise ValueError(f"{name}={mode!r}: choose one of {', '.join(map(repr, _MODES))}.")
        self.batch_norm = batch_norm
        self.dropout = dropout

    def requires(self, model: ir.Model) -> None:
        """Require opset 14: before, BatchNormalization has no attribute `training_mode`."""
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
    """Return whether `node` is a BatchNormalization in training mode, normalising by statistics of the batch."""
    return (
        node.op_type == "BatchNormalization"
        and node.domain == ""
        and node.attributes.get_int("training_mode", 0) == 1
    )


def _batch_norm_to_training(model: ir.Model, node: ir.Node) -> bool:
    """Let a BatchNormalization train and return updated statistics; return whether it has changed."""
    # Nothing to do: the pass must not report a modification.
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
    """Let a BatchNormalization normalise by its running statistics; return whether it has changed."""
    if not is_training_batch_norm(node) and len(node.outputs) == 1:
        return False
    node.attributes.pop("training_mode", None)
    for source, target in STATISTICS:
        before = node.inputs[source]
        if before is None or len(node.outputs) <= target:
            continue
        stand_in(node.outputs[target], before, node)
    node.resize_outputs(1)
    return True


def _dropout_to_training(model: ir.Model, node: ir.Node) -> bool:
    """Let a Dropout draw masks; return whether it has changed."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    if mode is not None and mode.const_value is not None and bool(mode.const_value.numpy()):
        return False
    node.resize_inputs(3)
    node.replace_input_with(2, _true(model))
    return True


def _dropout_to_inference(model: ir.Model, node: ir.Node) -> bool:
    """Let a Dropout return its input; return whether it has changed."""
    if len(node.inputs) <= 2:
        return False
    node.resize_inputs(2)
    return True


def _true(model: ir.Model) -> ir.Value:
    """Return the constant `true` that all Dropout nodes share; add it if there is none."""
    name = "onnxtrain.training_mode"
    value = model.graph.initializers.get(name)
    return add_constant(model.graph, ir.tensor(np.array(True), name=name)) if value is None else value
