"""Analyzes ONNX's classification losses in a model that was exported with its loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import known_array
from onnxtrain.op_facts import CASTS, VIEWS

LABEL_OPS = frozenset({"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"})
"""Ops whose second input contains class labels and whose first output is the loss."""


def label_mean(node: ir.Node) -> dict[str, Any] | None:
    """Describes what a node of :data:`LABEL_OPS` averages over, in the format of :meth:`Loss.mean_over`.

    Returns:
        The manifest's `loss_mean` entry. None for a sum. {} for the reduction "none", and for a mean if the labels
        cannot be traced to an integer input of the model, the class weights are not constant, or there are class
        weights and the model shifts the labels.
    """
    reduction = node.attributes.get_string("reduction", "mean")
    if reduction == "sum":
        return None
    ignore_index = node.attributes.get_int("ignore_index", None)
    labels, shift = _follow_labels(node.inputs[1], ignore_index)
    weight = node.inputs[2] if len(node.inputs) > 2 else None
    weights = known_array(weight)
    # The runtime checks labels before it looks up their weights, except labels that the model partly removes.
    unknown_weight = weight is not None and (weights is None or shift > 0)
    if reduction != "mean" or labels is None or unknown_weight:
        return {}
    return {
        "labels": labels.name,
        "ignore_index": ignore_index,
        "weight": None if weights is None else weights.astype(float).tolist(),
        **({"shift": shift} if shift else {}),
    }


def _follow_labels(value: ir.Value | None, ignore_index: int | None) -> tuple[ir.Value | None, int]:
    """Traces labels back to an input of the model, through casts, reshapes, and the shift of a language model.

    A language model removes the first label of each sequence, because no token predicts it. It may append an ignored
    label, so that the logits need not be sliced.

    Returns:
        The integer input, and the number of labels removed at the start of axis 1. If the labels are computed in a
        different way, (None, 0).
    """
    shift = 0
    while value is not None and not value.is_graph_input():
        node = value.producer()
        kind = "" if node is None or node.domain else node.op_type
        if node is None or not (
            kind in CASTS
            # Before the Slice, axis 1 must be the input's axis 1.
            or (kind in VIEWS and not shift)
            or (kind == "Slice" and not shift and _cut(node))
            or (kind == "Pad" and _adds_ignored(node, ignore_index))
        ):
            return None, 0
        if kind == "Slice":
            shift = _cut(node)
        value = node.inputs[0]
    integers = value is not None and value.dtype is not None and value.dtype.is_integer()
    return (value, shift) if integers else (None, 0)


def _cut(node: ir.Node) -> int:
    """Returns k if a Slice computes `labels[:, k:]`, e.g. 1, and 0 if it computes something else."""
    starts, ends, axes = (known_array(value) for value in [*node.inputs[1:], None][:3])
    steps = np.ones(1) if len(node.inputs) < 5 or node.inputs[4] is None else known_array(node.inputs[4])
    source = node.inputs[0]
    if (
        source is None
        or source.shape is None
        or starts is None
        or ends is None
        or axes is None
        or steps is None
    ):
        return 0
    one_axis = starts.size == 1 and axes.item() % len(source.shape) == 1 and steps.item() == 1
    if not one_axis or starts.item() <= 0:
        return 0
    size = source.shape[1]
    # Exporters write the maximum int64 for "up to the end".
    end = size if isinstance(size, int) else np.iinfo(np.int32).max
    return int(starts.item()) if ends.item() >= end else 0


def _adds_ignored(node: ir.Node, ignore_index: int | None) -> bool:
    """True if a Pad only appends ignored labels at the ends of axes."""
    pads, fill = known_array(node.inputs[1]), known_array(node.inputs[2] if len(node.inputs) > 2 else None)
    if node.attributes.get_string("mode", "constant") != "constant" or pads is None or fill is None:
        return False
    if fill.item() != ignore_index:
        return False
    begins, ends = np.split(pads, 2)
    return not begins.any() and bool((ends >= 0).all())
