"""Wraps the losses of `onnxtrain.losses` as blocks, which append a loss to the base model.

A loss is called with the name of the scores (the model's output) and, optionally, the name of the target. If the base
model has no value with the target's name, a graph input with the dtype and shape that the loss needs is added.
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
    "FunctionLoss",
    "HuberLoss",
    "L1Loss",
    "LossBlock",
    "MSELoss",
    "NLLLoss",
    "SmoothL1Loss",
]


# The label that onnxruntime-training and PyTorch ignore by default.
_IGNORED_BY_DEFAULT = -100


class LossBlock(Block):
    """A block that appends a loss from `onnxtrain.losses` to the base model.

    Attributes:
        loss: the loss and its settings, e.g. `losses.MSELoss(reduction="sum")`.
    """

    def __init__(self, loss: losses.Loss) -> None:
        super().__init__()
        self.loss = loss

    def _build_loss(self, scores_name: str, target_name: str) -> str:
        """Appends the loss, with a new input for the target if necessary; returns the name of the loss."""
        # `attach_loss` analyzes in the whole model how scores and labels are computed; a graft only contains the new
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
        """Copies the metadata of graph inputs, e.g. the mark of the target, from `origin` to the base model.

        Args:
            origin: a copy of the base model's graph. If the target is an existing input, `attach_loss` has marked it
                only in this copy.
        """
        marks = {value.name: value.metadata_props for value in origin.inputs}
        for info in self.base.graph.input:
            if info.name in marks:
                del info.metadata_props[:]
                for key, text in marks[info.name].items():
                    info.metadata_props.add(key=key, value=text)


class FunctionLoss(LossBlock):
    """A loss that is a function of PyTorch tensors, an ONNX model, or has several outputs or targets.

    Args:
        loss: the function, e.g. `lambda scores, y: F.cross_entropy(scores, y)`, the path of a `.onnx` file, or a loss
            of `onnxtrain.losses`, e.g. TripletMarginLoss(). See :func:`onnxtrain.losses.make_loss`.

    Example:
        >>> from onnxtrain import losses, onnxblock
        >>> block = onnxblock.loss.FunctionLoss(losses.TripletMarginLoss(margin=0.5))
    """

    def __init__(self, loss: object) -> None:
        super().__init__(losses.make_loss(loss))

    def build(self, *input_names: str) -> str:
        """Appends the loss, with a new input for each target that is not named.

        Args:
            input_names: names of the outputs of the model that the loss takes, then of existing values to use as
                targets.

        Returns:
            The name of the loss.
        """
        loss = self.loss
        if not isinstance(loss, losses.JointLoss):
            return self._build_loss(*(input_names if len(input_names) > 1 else (*input_names, "target")))
        origin = self._accessor.to_ir().graph

        def write(op: Emitter, *_: ir.Value) -> ir.Value:
            return losses.attach_joint_loss(op, loss, input_names, named=True)

        result = self._append(write, *input_names, wish="loss")
        self._keep_marks(origin)
        return result


@dataclass(eq=False, repr=False)
class _NamedLoss(LossBlock):
    """Base class for blocks that wrap one loss class, `makes`.

    Subclasses are dataclasses; their fields are the settings of the loss, in onnxruntime-training's argument order.
    """

    makes: ClassVar[type[losses.Loss]]

    def __post_init__(self) -> None:
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        # None means -100 in onnxruntime-training, but "ignore no label" in `onnxtrain.losses`.
        if "ignore_index" in settings and settings["ignore_index"] is None:
            settings["ignore_index"] = _IGNORED_BY_DEFAULT
        super().__init__(self.makes(**settings))


# Argument names are part of the API: scripts for onnxruntime-training pass `target_name=` or `labels_name=`.
class _FloatTargetLoss(_NamedLoss):
    """Base class for losses whose target has the scores' dtype and shape."""

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Appends the loss.

        Args:
            loss_input_name: name of the scores, floating point.
            target_name: name of the target, with the scores' dtype and shape.

        Returns:
            The name of the loss: a scalar, or a tensor of the scores' shape with reduction "none".
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
    """Huber loss: quadratic up to `delta`, linear beyond; see :class:`onnxtrain.losses.HuberLoss`.

    Args:
        reduction: "mean", "sum" or "none".
        delta: positive threshold in units of the scores.
    """

    makes = losses.HuberLoss
    reduction: losses.Reduction = "mean"
    delta: float = 1.0


@dataclass(eq=False, repr=False)
class SmoothL1Loss(_FloatTargetLoss):
    """Huber loss divided by its threshold; see :class:`onnxtrain.losses.SmoothL1Loss`.

    Args:
        reduction: "mean", "sum" or "none".
        beta: non-negative threshold in units of the scores.
    """

    makes = losses.SmoothL1Loss
    reduction: losses.Reduction = "mean"
    beta: float = 1.0


@dataclass(eq=False, repr=False)
class BCEWithLogitsLoss(_FloatTargetLoss):
    """Binary cross-entropy of sigmoid(scores), numerically stable.

    Args:
        weight: weight of each element; an array that broadcasts to the scores.
        reduction: "mean", "sum" or "none".
        pos_weight: weight of positive targets; an array that broadcasts to the scores, e.g. [C].
    """

    makes = losses.BCEWithLogitsLoss
    weight: npt.ArrayLike | None = None
    reduction: losses.Reduction = "mean"
    pos_weight: npt.ArrayLike | None = None


class _LabelLoss(_NamedLoss):
    """Base class for losses whose target consists of class labels."""

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Appends the loss.

        Args:
            scores_input_name: name of the scores, floating point: [N, C, d1, ...], unless the loss has a different
                class axis; [batch, sequence, vocabulary] for :class:`CausalLMLoss`.
            labels_name: name of the labels, int64 [N, d1, ...].

        Returns:
            The name of the loss: a scalar, or a tensor of the labels' shape with reduction "none".
        """
        return self._build_loss(scores_input_name, labels_name)


@dataclass(eq=False, repr=False)
class CrossEntropyLoss(_LabelLoss):
    """Cross-entropy of softmax(scores) along the class axis against class labels.

    Args:
        weight: one weight per class, float [C].
        reduction: "mean" (weighted), "sum" or "none".
        ignore_index: label of ignored positions, e.g. 0 for padding. None means -100, which is never a class.
        label_smoothing: fraction of the target, from 0 to 1, that is distributed evenly over all classes.
        axis: class axis of the scores, e.g. -1 for [batch, sequence, vocabulary]. None means 1.
    """

    makes = losses.CrossEntropyLoss
    weight: npt.ArrayLike | None = None
    reduction: losses.Reduction = "mean"
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    axis: int | None = None


@dataclass(eq=False, repr=False)
class CausalLMLoss(_LabelLoss):
    """Next-token cross-entropy of logits [batch, sequence, vocabulary].

    The labels [batch, sequence] are the input tokens; the loss shifts them by one position.

    Args:
        reduction: "mean", "sum" or "none".
        ignore_index: label of ignored tokens, e.g. 0 for padding. None means -100.
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
        ignore_index: label of ignored positions; None means -100.
        axis: class axis of the scores, e.g. -1. None means 1.
    """

    makes = losses.NLLLoss
    weight: npt.ArrayLike | None = None
    reduction: losses.Reduction = "mean"
    ignore_index: int | None = None
    axis: int | None = None
