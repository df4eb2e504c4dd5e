"""Losses as blocks: the losses of `onnxtrain.losses`, appended to the base model.

Each is called with the name of the scores and optionally the name of the target. A target that the base model
does not have becomes a new graph input of the dtype and shape that the loss needs; a value that it has is
used.
"""

from __future__ import annotations

import numpy.typing as npt
import onnx_ir as ir

from onnxtrain import losses
from onnxtrain.emitter import Emitter
from onnxtrain.onnxblock import _graft
from onnxtrain.onnxblock._block import Block

__all__ = [
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "HuberLoss",
    "L1Loss",
    "LossBlock",
    "MSELoss",
    "NLLLoss",
    "SmoothL1Loss",
]


class LossBlock(Block):
    """A block that appends a loss of `onnxtrain.losses`.

    Attributes:
        loss: the loss and its settings.
    """

    def __init__(self, loss: losses.Loss) -> None:
        super().__init__()
        self.loss = loss

    def _build_loss(self, scores_name: str, target_name: str) -> str:
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
        """Writes what a loss has recorded on inputs of an IR graph to those of the base model."""
        marks = {value.name: value.metadata_props for value in origin.inputs}
        for info in self.base.graph.input:
            if info.name in marks:
                del info.metadata_props[:]
                for key, text in marks[info.name].items():
                    info.metadata_props.add(key=key, value=text)


class _FloatTargetLoss(LossBlock):
    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Appends the loss.

        Args:
            loss_input_name: name of the scores, floating point.
            target_name: name of the target, of the scores' dtype and shape.

        Returns:
            The name of the loss: a scalar, or with reduction "none" a tensor of the scores' shape.
        """
        return self._build_loss(loss_input_name, target_name)


class MSELoss(_FloatTargetLoss):
    """Squared error (scores - target)².

    Args:
        reduction: "mean", "sum" or "none".
    """

    def __init__(self, reduction: losses.Reduction = "mean") -> None:
        super().__init__(losses.MSELoss(reduction=reduction))


class L1Loss(_FloatTargetLoss):
    """Absolute error |scores - target|.

    Args:
        reduction: "mean", "sum" or "none".
    """

    def __init__(self, reduction: losses.Reduction = "mean") -> None:
        super().__init__(losses.L1Loss(reduction=reduction))


class HuberLoss(_FloatTargetLoss):
    """Huber's loss: quadratic up to `delta`, linear beyond; see :class:`onnxtrain.losses.HuberLoss`.

    Args:
        reduction: "mean", "sum" or "none".
        delta: positive, in units of the scores.
    """

    def __init__(self, reduction: losses.Reduction = "mean", delta: float = 1.0) -> None:
        super().__init__(losses.HuberLoss(reduction=reduction, delta=delta))


class SmoothL1Loss(_FloatTargetLoss):
    """Huber's loss divided by its threshold; see :class:`onnxtrain.losses.SmoothL1Loss`.

    Args:
        reduction: "mean", "sum" or "none".
        beta: threshold, not negative, in units of the scores.
    """

    def __init__(self, reduction: losses.Reduction = "mean", beta: float = 1.0) -> None:
        super().__init__(losses.SmoothL1Loss(reduction=reduction, beta=beta))


class BCEWithLogitsLoss(_FloatTargetLoss):
    """Binary cross-entropy of sigmoid(scores), in a form that does not overflow.

    Args:
        weight: multiplies each term; array that broadcasts to the scores.
        reduction: "mean", "sum" or "none".
        pos_weight: multiplies the terms of positive targets; array that broadcasts to the scores, as [C].
    """

    def __init__(
        self,
        weight: npt.ArrayLike | None = None,
        reduction: losses.Reduction = "mean",
        pos_weight: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__(losses.BCEWithLogitsLoss(weight=weight, reduction=reduction, pos_weight=pos_weight))


class _LabelLoss(LossBlock):
    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Appends the loss.

        Args:
            scores_input_name: name of the scores, floating point [N, C, d1, ...].
            labels_name: name of the labels, int64 [N, d1, ...].

        Returns:
            The name of the loss: a scalar, or with reduction "none" a tensor of the labels' shape.
        """
        return self._build_loss(scores_input_name, labels_name)


_IGNORED_BY_DEFAULT = -100
"""Label that does not count unless the caller says otherwise, as in PyTorch."""


class CrossEntropyLoss(_LabelLoss):
    """Cross-entropy of softmax(scores) along the axis of the classes against class labels.

    Args:
        weight: one weight per class, float [C].
        reduction: "mean" (weighted), "sum" or "none".
        ignore_index: label of positions that do not count; None for -100, which is no class either way.
        label_smoothing: in [0, 1]: the part of the target's mass that is spread evenly over all classes.
        axis: of the scores, along which the classes lie: -1 for scores [batch, sequence, vocabulary]. None is 1.
    """

    def __init__(
        self,
        weight: npt.ArrayLike | None = None,
        reduction: losses.Reduction = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        axis: int | None = None,
    ) -> None:
        index = _IGNORED_BY_DEFAULT if ignore_index is None else ignore_index
        super().__init__(
            losses.CrossEntropyLoss(
                weight=weight,
                reduction=reduction,
                ignore_index=index,
                label_smoothing=label_smoothing,
                axis=axis,
            )
        )


class NLLLoss(_LabelLoss):
    """Negative log-likelihood of class labels, for scores that are log-probabilities.

    Args:
        weight: one weight per class, float [C].
        reduction: "mean" (weighted), "sum" or "none".
        ignore_index: label of positions that do not count; None for -100.
        axis: of the scores, along which the classes lie; None is 1.
    """

    def __init__(
        self,
        weight: npt.ArrayLike | None = None,
        reduction: losses.Reduction = "mean",
        ignore_index: int | None = None,
        axis: int | None = None,
    ) -> None:
        index = _IGNORED_BY_DEFAULT if ignore_index is None else ignore_index
        super().__init__(losses.NLLLoss(weight=weight, reduction=reduction, ignore_index=index, axis=axis))
