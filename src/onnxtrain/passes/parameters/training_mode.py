"""Switches BatchNormalization and Dropout between training and inference mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.tidy.constants import add_constant, known_array
from onnxtrain.passes.tidy.replace_value import stand_in
from onnxtrain.passes.tidy.unique_names import fresh_name

Mode = Literal["as_exported", "training", "inference"]
"""Mode for an op that behaves differently in training; "as_exported" keeps the op's mode."""

_MODES = get_args(Mode)
# Input and output index of each running statistic. BatchNormalization-14 has inputs X, scale, B, input_mean, input_var
# and outputs Y, running_mean, running_var.
STATISTICS = ((3, 1), (4, 2))


class TrainingModePass(ir.passes.InPlacePass):
    """Sets the mode of BatchNormalization and Dropout nodes in the main graph and its subgraphs.

    - In training mode, BatchNormalization normalizes with the batch's statistics, and returns the updated running
      statistics as outputs 1 and 2, named `<statistic>_updated`. In inference mode these outputs are removed, and their
      readers use the input statistics.
    - In training mode, Dropout has the constant `true` as input `training_mode`. In inference mode this input is
      removed, because its default is false.

    Expects opset 14 or newer. Graph outputs keep their names, and nodes keep their momentum, epsilon, ratio and seed.
    """

    def __init__(
        self,
        batch_norm: Mode | Mapping[ir.Node, Mode] = "as_exported",
        dropout: Mode | Mapping[ir.Node, Mode] = "as_exported",
    ) -> None:
        """Creates the pass.

        Args:
            batch_norm: mode of all BatchNormalization nodes, e.g. "training", or a mapping from nodes to modes; other
                nodes keep their mode.
            dropout: the same for Dropout.

        Raises:
            ValueError: a mode is not one of "as_exported", "training", "inference".
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
        """Requires opset 14, because BatchNormalization had no attribute `training_mode` before."""
        if model.graph.opset_imports[""] < 14:
            raise ir.passes.PreconditionError(
                "TrainingModePass needs opset 14 or newer; canonicalize the model."
            )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Switches the ops in place."""
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
    """True if `node` is a BatchNormalization in training mode, which normalizes with the batch's statistics."""
    return (
        node.op_type == "BatchNormalization"
        and node.domain == ""
        and node.attributes.get_int("training_mode", 0) == 1
    )


def trains(node: ir.Node) -> bool:
    """True if a Dropout is in training mode, or if its mode is only known at run time."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return False
    mode = known_array(node.inputs[2])
    return mode is None or bool(mode)


def _batch_norm_to_training(model: ir.Model, node: ir.Node) -> bool:
    """Switches a BatchNormalization to training mode, and adds the updated running statistics as outputs 1 and 2.

    Returns:
        True if the node was modified.
    """
    # The pass must not report a modification.
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
    """Switches a BatchNormalization to inference mode, and removes outputs 1 and 2.

    Their consumers use the running statistics in the inputs instead.

    Returns:
        True if the node was modified.
    """
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
    """Switches a Dropout to training mode. Returns True if it was modified."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    if mode is not None and mode.const_value is not None and bool(mode.const_value.numpy()):
        return False
    node.resize_inputs(3)
    node.replace_input_with(2, _true(model))
    return True


def _dropout_to_inference(model: ir.Model, node: ir.Node) -> bool:
    """Switches a Dropout to inference mode. Returns True if it was modified."""
    if len(node.inputs) <= 2:
        return False
    node.resize_inputs(2)
    return True


def _true(model: ir.Model) -> ir.Value:
    """Returns the constant `true` that all Dropout nodes share, and adds it to the model if necessary."""
    name = "onnxtrain.training_mode"
    value = model.graph.initializers.get(name)
    return add_constant(model.graph, ir.tensor(np.array(True), name=name)) if value is None else value
