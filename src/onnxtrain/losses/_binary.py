"""Defines binary cross-entropy of probabilities, the losses of targets 1 and -1, and divergence of distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy.typing as npt
import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter, static_dims

from ._base import Activation, TargetSpec, narrow, widen
from ._elementwise import BroadcastWeights, ElementwiseLoss, TermwiseLoss, softplus
from ._joint import positive_part

# PyTorch's bounds of logarithms, and of the divisor of the gradient.
_LEAST_LOG = -100.0
_LEAST_DIVISOR = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class BCELoss(BroadcastWeights, ElementwiseLoss):
    """Binary cross-entropy -t·log(x) - (1 - t)·log(1 - x) of scores x that are probabilities, in [0, 1].

    As in PyTorch, logarithms are at least -100, and the gradient is (x - t) / max(x·(1 - x), 1e-12). A score or a
    target outside of [0, 1] makes the loss NaN. :class:`BCEWithLogitsLoss` computes the same from logits, without
    losing digits.

    Attributes:
        default_metrics: none, because "binary_accuracy" judges logits.
        weight: factor of each term; an array that broadcasts to the scores. None means 1.
    """

    default_metrics: ClassVar[tuple[str, ...]] = ()
    weight: npt.ArrayLike | None = None

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        x, t = op.stop_gradient(scores), op.stop_gradient(target)
        rest, other = op.Sub(1.0, x), op.Sub(1.0, t)
        log_x, log_rest = (op.Max(op.Log(p), _LEAST_LOG) for p in (x, rest))
        value = op.Neg(op.Add(op.Mul(t, log_x), op.Mul(other, log_rest)))
        # PyTorch's gradients do not follow from the clamped value, so they are added as slopes of a zero.
        slope = op.Div(op.Sub(x, t), op.Max(op.Mul(x, rest), _LEAST_DIVISOR))
        slope_t = op.Sub(log_rest, log_x)
        inside = op.And(
            op.GreaterOrEqual(op.Mul(x, rest), 0.0),
            op.GreaterOrEqual(op.Mul(t, other), 0.0),
        )
        value = op.Where(inside, value, math.nan)
        terms = op.Add(value, op.Mul(slope, op.Sub(scores, x)))
        terms = op.Add(terms, op.Mul(slope_t, op.Sub(target, t)))
        if self.weight is None:
            return terms
        return op.Mul(terms, op.const(self._weight_for("weight", self.weight, scores), like=scores))


@dataclass(frozen=True, kw_only=True)
class SoftMarginLoss(ElementwiseLoss):
    """Two-class logistic loss log(1 + exp(-t·x)), for targets t of 1.0 and -1.0.

    Attributes:
        default_metrics: none, because of the targets.
    """

    default_metrics: ClassVar[tuple[str, ...]] = ()

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        return softplus(op, op.Neg(op.Mul(target, scores)))


@dataclass(frozen=True, kw_only=True)
class HingeEmbeddingLoss(ElementwiseLoss):
    """The score x, a distance, for target 1.0, and max(margin - x, 0) for target -1.0.

    Attributes:
        default_metrics: none, because of the targets.
        margin: distance from which different samples cost nothing, e.g. 1.0.
    """

    default_metrics: ClassVar[tuple[str, ...]] = ()
    margin: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "margin", lambda margin: abs(margin) < math.inf, "a number")

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        far = positive_part(op, op.Sub(self.margin, scores))
        # As in PyTorch, a target that is neither 1 nor -1 gets both terms.
        different = op.Where(op.Equal(target, 1.0), 0.0, far)
        return op.Add(different, op.Where(op.Equal(target, -1.0), 0.0, scores))


@dataclass(frozen=True, kw_only=True, eq=False)
class MultiLabelSoftMarginLoss(BroadcastWeights, TermwiseLoss):
    """Binary cross-entropy of p = sigmoid(score), averaged over the classes, the last axis, of each sample.

    Attributes:
        activation: "sigmoid".
        default_metrics: "binary_accuracy".
        weight: one factor per class, [C]. None means 1.
    """

    activation: ClassVar[Activation | None] = "sigmoid"
    default_metrics: ClassVar[tuple[str, ...]] = ("binary_accuracy",)
    weight: npt.ArrayLike | None = None

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        if len(self._scores_dims(scores)) < 2:
            raise self._error(
                f"scores {scores.name!r} have shape {scores.shape}; this loss needs [N, ..., C]"
            )
        return super().targets(scores)

    def _terms_shape(self, scores: ir.Value) -> ir.Shape | None:
        return None if scores.shape is None else ir.Shape(scores.shape[:-1])

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        terms = op.Add(op.Mul(op.Sub(1.0, target), scores), softplus(op, op.Neg(scores)))
        if self.weight is not None:
            terms = op.Mul(terms, op.const(self._weight_for("weight", self.weight, scores), like=scores))
        return op.ReduceMean(terms, [-1], keepdims=0)


@dataclass(frozen=True, kw_only=True)
class KLDivLoss(ElementwiseLoss):
    """Kullback-Leibler divergence t·(log t - x) of scores x that are log-probabilities, e.g. from a LogSoftmax.

    The divergence of a distribution is the sum of its terms: choose the reduction "batchmean", which divides the sum by
    the number of samples. As in PyTorch, the default "mean" divides by the number of elements.

    Attributes:
        activation: "exp", which converts log-probabilities to probabilities.
        default_metrics: none.
        reduction: "mean", "batchmean", "sum" or "none".
        log_target: True for targets that are log-probabilities t: exp(t)·(t - x).
    """

    activation: ClassVar[Activation | None] = "exp"
    default_metrics: ClassVar[tuple[str, ...]] = ()
    reductions: ClassVar[tuple[str, ...]] = ("mean", "batchmean", "sum", "none")
    reduction: Literal["mean", "batchmean", "sum", "none"] = "mean"  # type: ignore[assignment]
    log_target: bool = False

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        if self.log_target:
            return op.Mul(op.Exp(target), op.Sub(target, scores))
        # 0·log 0 is 0.
        zero = op.Equal(target, 0.0)
        entropy = op.Where(zero, 0.0, op.Mul(target, op.Log(op.Where(zero, 1.0, target))))
        return op.Sub(entropy, op.Mul(target, scores))

    def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        if self.reduction != "batchmean":
            return super().build(op, scores, target)
        self._check_target(self.targets(scores)[0], target)
        wide = widen(op, scores)
        total = replace(self, reduction="sum").build(op, wide, widen(op, target))
        return self._quotient(op, total, _size(op, wide), scores)

    def build_weighted(self, op: Emitter, scores: ir.Value, target: ir.Value, weight: ir.Value) -> ir.Value:
        if self.reduction != "batchmean":
            return super().build_weighted(op, scores, target, weight)
        wide = widen(op, scores)
        total = replace(self, reduction="sum").build_weighted(op, wide, widen(op, target), weight)
        return self._quotient(op, total, op.ReduceSum(weight, keepdims=0), scores)

    @staticmethod
    def _quotient(op: Emitter, total: ir.Value, count: ir.Value, scores: ir.Value) -> ir.Value:
        loss: ir.Value = op.Div(total, count)
        loss.shape = ir.Shape(())
        return narrow(op, loss, scores)

    def mean_over(self, labels: str | None) -> dict[str, Any] | None:
        return {} if self.reduction == "batchmean" else super().mean_over(labels)


def _size(op: Emitter, scores: ir.Value) -> ir.Value:
    """Returns the number of samples as a scalar in the dtype of the scores."""
    first = (static_dims(scores) or (None,))[0]
    if first is not None:
        return op.const(float(max(first, 1)), like=scores)
    return op.Cast(op.Squeeze(op.dim(scores, 0), [0]), to=scores.dtype)
