"""Defines the state shared by the stages of `build_training_graphs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir


@dataclass
class Build:
    """State of one call of `build_training_graphs`; its stages fill the fields from top to bottom.

    Attributes:
        forward: graph that computes the loss and the additional outputs, in this order, from the user's inputs and the
            targets.
        trainable: names of the parameters to train, e.g. ["fc.weight", "fc.bias"].
        sparse: names of the parameters with sparse gradients, which contain only the rows used in a batch, e.g.
            ["table"].
        parameters: initial value of each parameter, trained or not, in graph order.
        statistics: initial value of each BatchNorm running statistic, in graph order.
        unreached: names of the parameters that were selected for training although the loss does not depend on them;
            they are removed from `trainable` and `sparse`.
        input_gradients: names of the inputs whose gradients are the training model's last outputs, e.g. ["x"].
        updated: for each running statistic, the name of the output with its updated value, e.g. {"bn.running_mean":
            "bn.running_mean_updated"}.
        row_indices: for each sparse parameter, the name of the output with its gradient's row indices, e.g. {"table":
            "table_grad_indices"}.
        random: the seed input for Dropout masks, which is the last input; None if the model needs no seed.
    """

    forward: ir.Model
    trainable: list[str]
    sparse: list[str]
    parameters: dict[str, ir.TensorProtocol]
    statistics: dict[str, ir.TensorProtocol]
    unreached: list[str] = field(default_factory=list)
    input_gradients: Sequence[str] = ()
    updated: dict[str, str] = field(default_factory=dict)
    row_indices: dict[str, str] = field(default_factory=dict)
    random: ir.Value | None = None
