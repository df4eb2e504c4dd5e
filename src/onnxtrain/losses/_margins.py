"""Defines the margin losses of class labels: multi-class, multi-label, and the angular margin of ArcFace."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy.typing as npt
import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter, static_dims

from ._base import ClassLabels, Loss, TargetSpec, narrow, numbers, reduce, widen
from ._classes import ClassLoss


@dataclass(frozen=True, kw_only=True, eq=False)
class MultiMarginLoss(Loss):
    """Multi-class hinge loss Σ max(0, margin - x[label] + x[i])ᵖ / C over the other classes i.

    Scores are [N, C], labels [N]. As in PyTorch, the mean divides by the number of samples, also with `weight`.

    Attributes:
        p: exponent, 1 or 2.
        margin: difference of scores that costs nothing, e.g. 1.0.
        weight: one factor per class, [C], for the samples of this class. None means 1.
    """

    p: int = 1
    margin: float = 1.0
    weight: npt.ArrayLike | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "p", lambda p: p in (1, 2) and not isinstance(p, bool), "1 or 2")
        require(self, "margin", lambda margin: abs(margin) < math.inf, "a number")
        if self.weight is not None:
            numbers(self, "weight", self.weight)

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        dims = self._scores_dims(scores)
        if len(dims) != 2:
            raise self._error(f"scores {scores.name!r} have shape {scores.shape}; this loss needs [N, C]")
        count = dims[1] if isinstance(dims[1], int) else None
        size = None if self.weight is None else numbers(self, "weight", self.weight).shape
        if size is not None and (len(size) != 1 or count not in (None, size[0])):
            raise self._error(
                f"weight has shape {list(size)}, and the scores {scores.name!r} have shape {scores.shape}; give one "
                "weight per class"
            )
        labels = ClassLabels(count if size is None else size[0], None)
        return [TargetSpec("labels", ir.DataType.INT64, dims[:1], labels)]

    def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        spec = self.targets(scores)[0]
        self._check_target(spec, target)
        x = widen(op, scores)
        column = op.Unsqueeze(target, [1])
        missed = op.Add(op.Sub(x, op.GatherElements(x, column, axis=1)), self.margin)
        missed = op.Where(op.Greater(missed, 0.0), missed, 0.0)
        if self.p == 2:
            missed = op.Mul(missed, missed)
        if self.weight is not None:
            weight = op.const(numbers(self, "weight", self.weight), like=x)
            missed = op.Mul(missed, op.Gather(weight, column))
        classes = op.Range(0, op.Squeeze(op.dim(x, 1), [0]), 1)
        own = op.Equal(classes, op.Cast(column, to=ir.DataType.INT64))
        terms = op.ReduceMean(op.Where(own, 0.0, missed), [1], keepdims=0)
        terms.shape = ir.Shape(spec.shape)
        return narrow(op, reduce(op, terms, self.reduction), scores)


@dataclass(frozen=True, kw_only=True)
class MultiLabelMarginLoss(Loss):
    """Multi-label hinge loss Σ max(0, 1 - x[t] + x[i]) / C over all pairs of a label t and another class i.

    Scores are [N, C]. The target is [N, C], int64: the labels of a sample, then -1, after which nothing counts.
    """

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        dims = self._scores_dims(scores)
        if len(dims) != 2:
            raise self._error(f"scores {scores.name!r} have shape {scores.shape}; this loss needs [N, C]")
        return [TargetSpec("labels", ir.DataType.INT64, dims)]

    def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        spec = self.targets(scores)[0]
        self._check_target(spec, target)
        x = widen(op, scores)
        # True before the first negative label.
        ended = op.CumSum(op.Cast(op.Less(target, 0), to=ir.DataType.INT64), op.const(1))
        listed = op.Equal(ended, 0)
        labels = op.Where(listed, target, 0)
        classes = op.Range(0, op.Squeeze(op.dim(x, 1), [0]), 1)  # [C]
        pairs = op.And(
            op.Equal(op.Unsqueeze(labels, [2]), classes), op.Unsqueeze(listed, [2])
        )  # [N, labels, C]
        is_label = op.ReduceMax(op.Cast(pairs, to=ir.DataType.FLOAT), [1], keepdims=1)  # [N, 1, C]
        chosen = op.Unsqueeze(op.GatherElements(x, labels, axis=1), [2])
        missed = op.Add(op.Sub(op.Unsqueeze(x, [1]), chosen), 1.0)
        missed = op.Where(op.Greater(missed, 0.0), missed, 0.0)
        counts = op.And(op.Unsqueeze(listed, [2]), op.Equal(is_label, 0.0))
        of_labels = op.ReduceMean(op.Where(counts, missed, 0.0), [2], keepdims=0)
        terms = op.ReduceSum(of_labels, [1], keepdims=0)
        terms.shape = ir.Shape(spec.shape[:1])
        return narrow(op, reduce(op, terms, self.reduction), scores)


@dataclass(frozen=True, kw_only=True, eq=False)
class ArcFaceLoss(ClassLoss):
    """Cross-entropy of scale·cos(θ), where the angle θ of the label's class is enlarged by the margin.

    The scores are cosines of angles between a sample's embedding and each class, in [-1, 1]: the product of both,
    divided by their lengths (Deng et al., 2019). Where θ + margin exceeds π, the score is lowered by margin·sin(margin)
    instead, as in the authors' code, so that it still decreases with θ.

    Attributes:
        margin: additional angle in radians, from 0 to π, e.g. 0.5.
        scale: factor of the cosines before the softmax, positive, e.g. 64.0.
    """

    margin: float = 0.5
    scale: float = 64.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "margin", lambda margin: 0 <= margin < math.pi, "from 0 to less than pi")
        require(self, "scale", lambda scale: 0 < scale < math.inf, "a positive number")

    def _build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        spec = self.targets(scores)[0]
        cosine = widen(op, scores)
        # The slope of the sine is infinite where the cosine is 1 or -1.
        square = op.Sub(1.0, op.Mul(cosine, cosine))
        positive = op.Greater(square, _LEAST_SQUARE)
        sine = op.Where(positive, op.Sqrt(op.Where(positive, square, 1.0)), math.sqrt(_LEAST_SQUARE))
        turned = op.Sub(op.Mul(cosine, math.cos(self.margin)), op.Mul(sine, math.sin(self.margin)))
        lowered = op.Sub(cosine, self.margin * math.sin(self.margin))
        within = op.Greater(cosine, math.cos(math.pi - self.margin))
        with_margin = op.Where(within, turned, lowered)
        rank = len(static_dims(scores) or ())
        classes = op.Range(0, op.Squeeze(op.dim(scores, 1), [0]), 1)
        classes = op.Reshape(classes, [1, -1] + [1] * (rank - 2))
        own = op.Equal(classes, op.Cast(op.Unsqueeze(target, [1]), to=ir.DataType.INT64))
        logits: ir.Value = op.Mul(op.Where(own, with_margin, cosine), self.scale)
        logits.shape = scores.shape
        weight = self._class_weights(op, scores, cosine)
        loss: ir.Value = op.SoftmaxCrossEntropyLoss(
            logits, target, weight, ignore_index=self.ignore_index, reduction=self.reduction
        )
        loss.shape = ir.Shape(spec.shape if self.reduction == "none" else ())
        return narrow(op, loss, scores)


_LEAST_SQUARE = 1e-12
"""Lower bound of the squared sine of an angle, whose square root has a finite slope."""
