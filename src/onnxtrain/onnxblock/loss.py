"""Defines losses as blocks: they append the losses of `onnxtrain.losses` to the base model.

A loss is called with the name of the scores and, optionally, the name of the target. If the base model has no value of
the target's name, it gets a new graph input of the dtype and shape that the loss needs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import numpy.typing as npt
import onnx_ir as ir

from onnxtrain import losses
from onnxtrain.emitter import Emitter
from onnxtrain.onnxblock import _graft
from onnxtrain.onnxblock._block import Block

__all__ = [
    "BCEWithLogitsLoss",
    "CausalLMLoss",
    "CrossEntropyLoss",
    "HuberLoss",
    "L1Loss",
    "LossBlock",
    "MSELoss",
    "NLLLoss",
    "SmoothL1Loss",
]


# Label that onnxruntime-training ignores by default, as PyTorch does.
_IGNORED_BY_DEFAULT = -100


class LossBlock(Block):
    """A block that appends a loss of `onnxtrain.losses`.

    Attributes:
        loss: the loss with its settings, e.g. `losses.MSELoss(reduction="sum")`.
    """

    def __init__(self, loss: losses.Loss) -> None:
        super().__init__()
        self.loss = loss

    def _build_loss(self, scores_name: str, target_name: str) -> str:
        """Appends the loss, and a new input for the target if the base model lacks it; returns the name of the loss."""
        # `attach_loss` looks at the whole model for what the scores and labels come from; a graft is only the new
        # nodes.
        exists = _graft.has_value(self.base, target_name)
        origin = self._accessor.to_ir().graph

        def write(op: Emitter, *_: ir.Value) -> ir.Value:
            target = target_name if exists else None
            return losses.attach_loss(
                op, self.loss, scores_name, target, new_target=target_name, origin=origin
            )

        result = self._append(write, scores_name, *([target_name] if exists else []), wish="loss")
        self._keep_marks(origin)
        return result

    def _keep_marks(self, origin: ir.Graph) -> None:
        """Copies the metadata that a loss has recorded on inputs of the onnx_ir graph to those of the base model."""
        # `to_ir` made a copy, in which `attach_loss` has marked an existing input as target.
        marks = {value.name: value.metadata_props for value in origin.inputs}
        for info in self.base.graph.input:
            if info.name in marks:
                del info.metadata_props[:]
                for key, text in marks[info.name].items():
                    info.metadata_props.add(key=key, value=text)


@dataclass(eq=False, repr=False)
class _NamedLoss(LossBlock):
    """Base class of loss blocks that are dataclasses: their fields are the settings of the loss in `makes`.

    The fields are in the order of the arguments in onnxruntime-training.
    """

    makes: ClassVar[type[losses.Loss]]

    def __post_init__(self) -> None:
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        # None means -100 in onnxruntime-training; in `onnxtrain.losses` it means that no label is ignored.
        if "ignore_index" in settings and settings["ignore_index"] is None:
            settings["ignore_index"] = _IGNORED_BY_DEFAULT
        super().__init__(self.makes(**settings))


# The names of the arguments are part of the API: scripts for onnxruntime-training pass `target_name=` or
# `labels_name=`.
class _FloatTargetLoss(_NamedLoss):
    """Base class of losses whose target has the scores' dtype and shape."""

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Appends the loss.

        Args:
            loss_input_name: name of the scores, floating point.
            target_name: name of the target, of the scores' dtype and shape.

        Returns:
            The name of the loss: a scalar, or with reduction "none" a tensor of the scores' shape.
        """
        return self._build_loss(loss_input_name, target_name)


@dataclass(eq=False, repr=False)
class MSELoss(_FloatTargetLoss):
    """Squared error (scores - target)².

    Args:
        reduction: "mean", "sum" or "none".
    """

    makes = losses.MSELoss
    reduction: losses.Reduction = "mean"


@dataclass(eq=False, repr=False)
class L1Loss(_FloatTargetLoss):
    """Absolute error |scores - target|.

    Args:
        reduction: "mean", "sum" or "none".
    """

    makes = losses.L1Loss
    reduction: losses.Reduction = "mean"


@dataclass(eq=False, repr=False)
class HuberLoss(_FloatTargetLoss):
    """Huber's loss: quadratic up to `delta`, linear beyond; see :class:`onnxtrain.losses.HuberLoss`.

    Args:
        reduction: "mean", "sum" or "none".
        delta: positive threshold in units of the scores.
    """

    makes = losses.HuberLoss
    reduction: losses.Reduction = "mean"
    delta: float = 1.0


@dataclass(eq=False, repr=False)
class SmoothL1Loss(_FloatTargetLoss):
    """Huber's loss divided by its threshold; see :class:`onnxtrain.losses.SmoothL1Loss`.

    Args:
        reduction: "mean", "sum" or "none".
        beta: threshold of at least 0 in units of the scores.
    """

    makes = losses.SmoothL1Loss
    reduction: losses.Reduction = "mean"
    beta: float = 1.0


@dataclass(eq=False, repr=False)
class BCEWithLogitsLoss(_FloatTargetLoss):
    """Binary cross-entropy of sigmoid(scores), in a form that does not overflow.

    Args:
        weight: factor of each term; array that broadcasts to the scores.
        reduction: "mean", "sum" or "none".
        pos_weight: factor of the terms of positive targets; array that broadcasts to the scores, e.g. [C].
    """

    makes = losses.BCEWithLogitsLoss
    weight: npt.ArrayLike | None = None
    reduction: losses.Reduction = "mean"
    pos_weight: npt.ArrayLike | None = None


class _LabelLoss(_NamedLoss):
    """Base class of losses whose target is class labels."""

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Appends the loss.

        Args:
            scores_input_name: name of the scores, floating point [N, C, d1, ...].
            labels_name: name of the labels, int64 [N, d1, ...].

        Returns:
            The name of the loss: a scalar, or with reduction "none" a tensor of the labels' shape.
        """
        return self._build_loss(scores_input_name, labels_name)


@dataclass(eq=False, repr=False)
class CrossEntropyLoss(_LabelLoss):
    """Cross-entropy of softmax(scores) along the axis of the classes against class labels.

    Args:
        weight: one weight per class, float [C].
        reduction: "mean" (weighted), "sum" or "none".
        ignore_index: label of positions that do not count, e.g. 0 for padding. None stands for -100, which is never
            the number of a class.
        label_smoothing: fraction, from 0 to 1, of the target's mass that is spread evenly over all classes.
        axis: axis of the scores along which the classes lie, e.g. -1 for [batch, sequence, vocabulary]. None is 1.
    """

    makes = losses.CrossEntropyLoss
    weight: npt.ArrayLike | None = None
    reduction: losses.Reduction = "mean"
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    axis: int | None = None


@dataclass(eq=False, repr=False)
class CausalLMLoss(_LabelLoss):
    """Cross-entropy of the scores [batch, sequence, vocabulary] at each token against the next token.

    The labels, [batch, sequence], are the tokens themselves; the loss shifts them.

    Args:
        reduction: "mean", "sum" or "none".
        ignore_index: label of tokens that do not count, e.g. 0 for padding. None stands for -100.
    """

    makes = losses.CausalLMLoss
    reduction: losses.Reduction = "mean"
    ignore_index: int | None = None


@dataclass(eq=False, repr=False)
class NLLLoss(_LabelLoss):
    """Negative log-likelihood of class labels, for scores that are log-probabilities.

    Args:
        weight: one weight per class, float [C].
        reduction: "mean" (weighted), "sum" or "none".
        ignore_index: label of positions that do not count; None stands for -100.
        axis: axis of the scores along which the classes lie, e.g. -1. None is 1.
    """

    makes = losses.NLLLoss
    weight: npt.ArrayLike | None = None
    reduction: losses.Reduction = "mean"
    ignore_index: int | None = None
    axis: int | None = None
