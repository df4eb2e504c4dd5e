"""Warns if a loss that expects logits is applied to probabilities."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain._printable import get_logger
from onnxtrain._words import argument
from onnxtrain.losses._base import Loss
from onnxtrain.op_facts import CASTS, VIEWS

_log = get_logger()

_PROBABILITIES = ("Softmax", "Sigmoid")


def warn_of_probabilities(loss: Loss, scores: ir.Value) -> None:
    """Warns if a loss that expects logits is applied to the output of a Softmax or Sigmoid.

    Args:
        loss: the loss. A loss without an `activation`, e.g. MSELoss, may be applied to probabilities.
        scores: the loss's input, e.g. the output "prob" of a classifier from a model zoo.
    """
    if loss.activation is None:
        return
    node = scores.producer()
    while node is not None and node.inputs and node.op_type in CASTS | VIEWS:
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type not in _PROBABILITIES or node.domain or node.inputs[0] is None:
        return
    wanted = "log-probabilities" if loss.activation == "exp" else "scores (logits)"
    # `nll` needs the logarithm of the softmax, which is not a value of the model.
    remedy = (
        "Choose cross_entropy, and"
        if loss.activation == "exp"
        else "Gradients become small and training slow. Choose"
    )
    _log.warning(
        "%s expects %s, but '%s' is computed by %s. %s its input as the scores: %s. The outputs of the trained "
        "model stay the same.",
        type(loss).__name__,
        wanted,
        scores.name,
        node.op_type,
        remedy,
        argument("loss_input_names", [str(node.inputs[0].name)]),
    )
