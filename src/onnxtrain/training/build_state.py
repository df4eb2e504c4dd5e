"""Defines the state shared by the stages of `build_training_graphs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir


@dataclass
class Build:
    """State of one call of `build_training_graphs`; its stages fill the fields from top to bottom.

    Attributes:
        forward: graph from the user's inputs and targets to its outputs, the loss and then the additional outputs.
        trainable: names of the parameters to train, e.g. ["fc.weight", "fc.bias"].
        sparse: names of the parameters with sparse gradients, which hold only the rows that a batch reads, e.g.
            ["table"].
        parameters: initial value of each parameter, trained or not, in graph order.
        statistics: initial value of each BatchNorm running statistic, in graph order.
        unreached: names of the parameters that were selected for training although the loss does not depend on them;
            they are removed from `trainable` and `sparse`.
        input_gradients: names of the inputs whose gradients are the training model's last outputs, e.g. ["x"].
        updated: per running statistic, the output that holds it after the step, e.g.
            {"bn.running_mean": "bn.running_mean_updated"}.
        row_indices: per sparse parameter, the output that holds the row indices of its gradient, e.g.
            {"table": "table_grad_indices"}.
        random: the seed input from which Dropout masks are drawn, the last input; None if the model needs no seed.
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
