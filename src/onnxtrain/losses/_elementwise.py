"""Defines the elementwise losses, such as the squared error, and the base class of losses with one term per sample."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter, static_dims

from ._base import Activation, Loss, TargetSpec, narrow, numbers, reduce, widen


class TermwiseLoss(Loss):
    """Base class for losses whose target has the shape and dtype of the scores; subclasses define the terms."""

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        dims = self._scores_dims(scores)
        assert scores.dtype is not None
        return [TargetSpec("target", scores.dtype, dims)]

    def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        self._check_target(self.targets(scores)[0], target)
        terms = self._terms(op, widen(op, scores), widen(op, target))
        # The emitter infers dtypes but not shapes, and sample weights need the rank of the terms.
        terms.shape = self._terms_shape(scores)
        return narrow(op, reduce(op, terms, self.reduction), scores)

    @abstractmethod
    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        """Emits the unreduced loss of scores and target, which are float32 or float64."""

    @abstractmethod
    def _terms_shape(self, scores: ir.Value) -> ir.Shape | None:
        """Returns the shape of the terms, or None if the shape of the scores is unknown."""


class ElementwiseLoss(TermwiseLoss):
    """A loss with one term per element, and a target with the scores' shape and dtype; subclasses define `_terms`."""

    # For regression; subclasses for probabilities override them.
    default_metrics: ClassVar[tuple[str, ...]] = ("mae", "rmse")

    def _terms_shape(self, scores: ir.Value) -> ir.Shape | None:
        return scores.shape


class SampleLoss(TermwiseLoss):
    """A loss with one term per sample, shape [N], for scores and targets of shape [N, d1, ...].

    Subclasses define `_terms`, and call :func:`sample_sum` to sum over the positions of each sample.
    """

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        if len(self._scores_dims(scores)) < 2:
            raise self._error(
                f"scores {scores.name!r} have shape {scores.shape}; this loss needs [N, d1, ...]"
            )
        return super().targets(scores)

    def _terms_shape(self, scores: ir.Value) -> ir.Shape | None:
        return None if scores.shape is None else ir.Shape(scores.shape[:1])


class BroadcastWeights(Loss):
    """Base class of losses with settings that are arrays of weights, which broadcast to the scores."""

    def _weight_for(self, field: str, value: npt.ArrayLike, scores: ir.Value) -> np.ndarray:
        """Returns a setting, e.g. `weight`, as an array, after checking that it broadcasts to the scores.

        Args:
            field: name of the field, e.g. "pos_weight", for error messages.
            value: value of the field.
            scores: the scores. The axes of the weights are aligned with their last axes, as in NumPy.

        Raises:
            GraphBuildError: the weights are not finite numbers, or do not broadcast to the scores.
        """
        array = numbers(self, field, value)
        # NumPy's and ONNX's broadcasting aligns the last axes; a symbolic size (None) matches any weight.
        dims = static_dims(scores) or ()
        tail = dims[len(dims) - array.ndim :] if array.ndim <= len(dims) else ()
        if array.ndim > len(dims) or any(
            n not in (1, dim) for n, dim in zip(array.shape, tail, strict=True) if dim
        ):
            raise self._error(
                f"{field} has shape {list(array.shape)}, which does not broadcast to the scores' "
                f"{scores.shape}; pass one weight per element of the last dimensions"
            )
        return array


@dataclass(frozen=True, kw_only=True)
class MSELoss(ElementwiseLoss):
    """Squared error (score - target)²."""

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        difference = op.Sub(scores, target)
        # Not Pow, whose kernel calls the power function for each element.
        return op.Mul(difference, difference)


@dataclass(frozen=True, kw_only=True)
class L1Loss(ElementwiseLoss):
    """Absolute error |score - target|."""

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        return op.Abs(op.Sub(scores, target))


@dataclass(frozen=True, kw_only=True)
class HuberLoss(ElementwiseLoss):
    """Huber loss of d = score - target: d²/2 where |d| <= delta, delta·(|d| - delta/2) elsewhere.

    Attributes:
        delta: error at which the loss changes from quadratic to linear; positive, in units of the scores, e.g. 1.0.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "delta", lambda delta: 0 < delta < float("inf"), "a positive number")

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        return _huber(op, op.Sub(scores, target), self.delta)


@dataclass(frozen=True, kw_only=True)
class SmoothL1Loss(ElementwiseLoss):
    """Huber loss divided by its threshold: d²/(2·beta) where |d| < beta, else |d| - beta/2; |d| for beta = 0.

    Attributes:
        beta: error at which the loss changes from quadratic to linear; non-negative, in units of the scores, e.g. 1.0.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "beta", lambda beta: 0 <= beta < float("inf"), "a non-negative number")

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        difference: ir.Value = op.Sub(scores, target)
        # As in PyTorch, the limit for beta = 0 is the absolute error.
        if self.beta == 0:
            return op.Abs(difference)
        return op.Mul(_huber(op, difference, self.beta), 1 / self.beta)


# Without `eq`, because weights may be arrays, whose comparison returns an array.
@dataclass(frozen=True, kw_only=True, eq=False)
class BCEWithLogitsLoss(BroadcastWeights, ElementwiseLoss):
    """Binary cross-entropy -t·log(p) - (1 - t)·log(1 - p) of p = sigmoid(score), for targets t in [0, 1].

    Computed in a numerically stable form, (1 - t)·x + (1 + (w - 1)·t)·softplus(-x) with x = score and w = pos_weight.

    Attributes:
        activation: "sigmoid".
        default_metrics: "binary_accuracy", because the targets are probabilities of one class.
        weight: factor of each term; an array that broadcasts to the scores, e.g. one weight per label. None means 1.
        pos_weight: factor of the terms of positive targets, e.g. 5.0 if they are rare; broadcasts like `weight`. None
            means 1.
    """

    activation: ClassVar[Activation | None] = "sigmoid"
    default_metrics: ClassVar[tuple[str, ...]] = ("binary_accuracy",)
    weight: npt.ArrayLike | None = None
    pos_weight: npt.ArrayLike | None = None

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        minus_log_p = softplus(op, op.Neg(scores))
        if self.pos_weight is not None:
            # 1 + (p - 1)·t is p for a positive target and 1 for a negative one.
            excess = self._weight_for("pos_weight", self.pos_weight, scores) - 1
            minus_log_p = op.Mul(op.Add(op.Mul(target, op.const(excess, like=scores)), 1.0), minus_log_p)
        terms: ir.Value = op.Add(op.Mul(op.Sub(1.0, target), scores), minus_log_p)
        if self.weight is not None:
            terms = op.Mul(terms, op.const(self._weight_for("weight", self.weight, scores), like=scores))
        return terms


def softplus(op: Emitter, x: ir.Value) -> ir.Value:
    """Returns log(1 + exp(x))."""
    # ONNX Runtime has no float64 CPU kernel for Softplus, so it is max(x, 0) + log(1 + exp(-|x|)) there. Where is used
    # instead of Max and Abs, so that at x = 0 both parts take the same branch, and the derivative is 1/2.
    if x.dtype != ir.DataType.DOUBLE:
        return op.Softplus(x)
    positive = op.Greater(x, 0.0)
    size = op.Where(positive, x, op.Neg(x))
    return op.Add(op.Where(positive, x, 0.0), op.Log(op.Add(op.Exp(op.Neg(size)), 1.0)))


def sample_sum(op: Emitter, values: ir.Value, like: ir.Value) -> ir.Value:
    """Returns the sum of each sample's values, shape [N]; `like` has the shape of the values, e.g. the scores."""
    assert like.shape is not None
    result: ir.Value = op.ReduceSum(values, list(range(1, len(like.shape))), keepdims=0)
    return result


def _huber(op: Emitter, difference: ir.Value, delta: float) -> ir.Value:
    """Returns c·(d - c/2) with c = clip(d, -delta, delta), which equals both branches of the Huber loss."""
    clipped = op.Clip(difference, -delta, delta)
    return op.Mul(clipped, op.Sub(difference, op.Mul(clipped, 0.5)))
