"""Defines the loss of knowledge distillation: a loss on the targets, mixed with the distance to a teacher's scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.errors import GraphBuildError

from ._base import Activation, Loss, Reduction, TargetSpec, narrow, reduce, widen
from ._classes import ClassLoss
from ._elementwise import softplus

_SOFTMAX = ("softmax", "exp")


# Without `eq`, because a loss may hold arrays, whose comparison returns an array.
@dataclass(frozen=True, kw_only=True, eq=False)
class DistillationLoss(Loss):
    """(1 - a)·loss(scores, target) + a·d(teacher, scores), with d = T²·KL(softmax(teacher/T) || softmax(scores/T)).

    With scores of independent labels, e.g. for binary cross-entropy, d is the same of sigmoid(teacher/T) and
    sigmoid(scores/T) per score. For scores that represent no probabilities, as in regression, it is (scores -
    teacher)². Positions whose label is ignored count in neither part; class weights and sample weights weigh both.

    Source: Hinton, Vinyals and Dean, 2015, Distilling the Knowledge in a Neural Network, section 2. The factor T² keeps
    the gradient's size independent of T.

    Attributes:
        hard: loss on the targets. It determines the form of d and the reduction.
        teacher: the teacher's scores, in the graph that the loss is appended to; with the shape of the scores.
        weight: a, above 0 and at most 1. With 1, there is no target.
        temperature: T, above 0.
        total: reduction of the whole loss. `reduction` may be "none" instead, to weight samples.
    """

    hard: Loss
    teacher: ir.Value
    weight: float
    temperature: float
    total: Reduction = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Only the constructor of a frozen dataclass may set fields. `replace(loss, reduction=...)` calls it, too.
        object.__setattr__(self, "hard", replace(self.hard, reduction=self.reduction))

    @property
    def activation(self) -> Activation | None:  # type: ignore[override]  # a class variable of other losses
        """The activation of the loss on the targets."""
        return self.hard.activation

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        specs = self.hard.targets(scores)
        self._check_teacher(scores)
        return specs if self.weight < 1 else []

    def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        # In float32 throughout: in float16, the sum of both parts would be rounded once more.
        wide = widen(op, scores)
        if self.weight == 1:
            return narrow(op, self._soft(op, wide, target), scores)
        hard = self.hard.build(op, wide, widen(op, target))
        soft = self._soft(op, wide, target, like=hard)
        loss: ir.Value = op.Add(op.Mul(hard, 1 - self.weight), op.Mul(soft, self.weight))
        loss.shape = hard.shape
        return narrow(op, loss, scores)

    def _soft(
        self, op: Emitter, scores: ir.Value, target: ir.Value, like: ir.Value | None = None
    ) -> ir.Value:
        """Emits the distance to the teacher, reduced as the loss on the targets, `like`."""
        counts = self._counts(op, scores, target)
        terms = self._terms(op, scores)
        if counts is not None:
            # Not 0·inf for ignored positions.
            terms = op.Where(op.Equal(counts, 0.0), 0.0, op.Mul(terms, counts))
            terms.shape = counts.shape
        if self.reduction == "none":
            return terms if like is None else self._per_sample(op, terms, like)
        if counts is None or self.reduction == "sum":
            return reduce(op, terms, self.reduction)
        mean: ir.Value = op.Div(op.ReduceSum(terms, keepdims=0), op.ReduceSum(counts, keepdims=0))
        mean.shape = ir.Shape(())
        return mean

    def _terms(self, op: Emitter, scores: ir.Value) -> ir.Value:
        """Emits the unreduced distance: one term per position for classes, otherwise one per score."""
        teacher = widen(op, self.teacher)
        if teacher.dtype != scores.dtype:
            teacher = op.Cast(teacher, to=scores.dtype)
            teacher.shape = self.teacher.shape
        if self.activation is None:
            difference = op.Sub(scores, teacher)
            terms: ir.Value = op.Mul(difference, difference)
            terms.shape = scores.shape
            return terms
        s, t = (self._cooled(op, value) for value in (scores, teacher))
        if self.activation in _SOFTMAX:
            axis = self._class_axis(scores)
            log_q, log_p, p = (
                op.LogSoftmax(s, axis=axis),
                op.LogSoftmax(t, axis=axis),
                op.Softmax(t, axis=axis),
            )
            # 0·log 0 is 0, as in PyTorch: a teacher may rule classes out by scores of minus infinity.
            products = op.Where(op.Greater(p, 0.0), op.Mul(p, op.Sub(log_p, log_q)), 0.0)
            terms = op.ReduceSum(products, [axis], keepdims=0)
            dims = list(scores.shape or ())
            terms.shape = ir.Shape([*dims[:axis], *dims[axis + 1 :]])
        else:
            # p·log(p/q) + (1 - p)·log((1 - p)/(1 - q)) with log sigmoid(x) = -softplus(-x).
            same = op.Sub(softplus(op, op.Neg(s)), softplus(op, op.Neg(t)))
            terms = op.Add(same, op.Mul(op.Sub(1.0, op.Sigmoid(t)), op.Sub(s, t)))
            terms.shape = scores.shape
        shape = terms.shape
        terms = op.Mul(terms, self.temperature**2)
        terms.shape = shape
        return terms

    def _cooled(self, op: Emitter, value: ir.Value) -> ir.Value:
        """Returns a value divided by the temperature."""
        if self.temperature == 1:
            return value
        cooled: ir.Value = op.Mul(value, 1 / self.temperature)
        cooled.shape = value.shape
        return cooled

    def _class_axis(self, scores: ir.Value) -> int:
        """Returns the non-negative index of the class axis."""
        if isinstance(self.hard, ClassLoss):
            return self.hard._class_axis(scores, self._scores_dims(scores))
        labels = self.hard.targets(scores)[0].class_labels
        return labels.axis if labels is not None else 1

    def _per_sample(self, op: Emitter, terms: ir.Value, like: ir.Value) -> ir.Value:
        """Reduces terms to one per sample if the loss on the targets has one per sample, as the Tversky loss."""
        rank, dims = len(static_dims(like) or ()), static_dims(terms)
        if dims is None or len(dims) == rank:
            return terms
        axes = list(range(rank, len(dims)))
        fewer: ir.Value = (
            op.ReduceSum(terms, axes, keepdims=0)
            if self.total == "sum"
            else op.ReduceMean(terms, axes, keepdims=0)
        )
        fewer.shape = like.shape
        return fewer

    def _counts(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value | None:
        if self.weight == 1:
            return None
        if isinstance(self.hard, ClassLoss):
            hard, scores, target = self.hard._with_classes_second(op, scores, target)
            return hard._counts(op, scores, target)
        return self.hard._counts(op, scores, target)

    def mean_over(self, labels: str | None) -> dict[str, Any] | None:
        return self.hard.mean_over(labels)

    def _check_teacher(self, scores: ir.Value) -> None:
        """Raises GraphBuildError if static sizes of the teacher's scores differ from those of the scores."""
        mine, others = static_dims(scores), static_dims(self.teacher)
        if mine is None or others is None:
            return
        if len(mine) == len(others) and all(
            None in pair or pair[0] == pair[1] for pair in zip(mine, others, strict=True)
        ):
            return
        what = "classes" if len(mine) == len(others) and self.activation is not None else "shapes"
        raise GraphBuildError(
            f"attaching the teacher: the scores {scores.name!r} of the student have shape {scores.shape}, but those of "
            f"the teacher have shape {self.teacher.shape}: the {what} differ. Both models must score the same classes, "
            f"in the same order; name another output of the teacher in {argument('teacher_output')}, or give one of "
            "the models a new head"
        )
