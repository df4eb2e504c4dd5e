"""Defines the losses of two or three outputs of a model: triplets, pairs, and a mean with a variance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter, static_dims

from ._base import TargetSpec
from ._joint import JointLoss, positive_part

Distance = Callable[[Emitter, ir.Value, ir.Value], ir.Value]
"""Function of an emitter and two values [N, ..., D] that returns their distances [N, ...]."""

# The constant that PyTorch adds to squared lengths.
_COSINE_EPS = 1e-12


@dataclass(frozen=True, kw_only=True)
class _TripletLoss(JointLoss):
    """Base class of losses max(d(anchor, positive) - d(anchor, negative) + margin, 0); subclasses define `_distance`.

    Attributes:
        takes: ("anchor", "positive", "negative"), each [N, ..., D]. There is no target.
        margin: least difference between the two distances that costs nothing; positive, e.g. 1.0.
        swap: True to use the distance between positive and negative where it is smaller than that between anchor and
            negative (Balntas et al., 2016).
    """

    takes: ClassVar[tuple[str, ...]] = ("anchor", "positive", "negative")
    margin: float = 1.0
    swap: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "margin", lambda margin: 0 < margin < math.inf, "a positive number")

    def joint_targets(self, scores: Sequence[ir.Value]) -> list[TargetSpec]:
        self._same_dims(scores, rank=2)
        return []

    def _joint_terms(self, op: Emitter, scores: Sequence[ir.Value], targets: Sequence[ir.Value]) -> ir.Value:
        anchor, positive, negative = scores
        near, far = self._distance(op, anchor, positive), self._distance(op, anchor, negative)
        if self.swap:
            # At a tie, Min gives each side half of the gradient, as torch.min does.
            far = op.Min(far, self._distance(op, positive, negative))
        terms = positive_part(op, op.Add(op.Sub(near, far), self.margin))
        assert anchor.shape is not None
        terms.shape = ir.Shape(anchor.shape[:-1])
        return terms

    def _distance(self, op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TripletMarginLoss(_TripletLoss):
    """Triplet loss max(d(anchor, positive) - d(anchor, negative) + margin, 0) with d(a, b) = ‖a - b + eps‖ₚ.

    Attributes:
        p: order of the norm along the last axis, at least 1, e.g. 2.0; `math.inf` for the largest element.
        eps: added to each difference, e.g. 1e-6.
    """

    p: float = 2.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "p", lambda p: p >= 1, "a number that is at least 1")
        require(self, "eps", lambda eps: 0 <= eps < math.inf, "a non-negative number")

    def _distance(self, op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
        return pairwise_distance(op, a, b, self.p, self.eps)


@dataclass(frozen=True, kw_only=True)
class TripletMarginWithDistanceLoss(_TripletLoss):
    """Triplet loss max(d(anchor, positive) - d(anchor, negative) + margin, 0) with a distance d of your choice.

    Attributes:
        distance_function: "euclidean", "cosine" for 1 minus the cosine of the angle, or a function `(op, a, b) -> d`
            that appends nodes with the emitter `op`. For a function of PyTorch tensors, pass
            `torch.nn.TripletMarginWithDistanceLoss(distance_function=...)` as the loss.
    """

    distance_function: Literal["euclidean", "cosine"] | Distance = "euclidean"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self,
            "distance_function",
            lambda value: callable(value) or value in ("euclidean", "cosine"),
            "'euclidean', 'cosine' or a function (op, a, b)",
        )

    def _distance(self, op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
        if self.distance_function == "euclidean":
            return pairwise_distance(op, a, b, 2.0, 1e-6)
        if self.distance_function == "cosine":
            # The lower bound of the lengths is that of torch.nn.functional.cosine_similarity.
            norms = [op.Max(_root(op, op.ReduceSum(op.Mul(x, x), [-1], keepdims=0)), 1e-8) for x in (a, b)]
            return op.Sub(
                1.0, op.Div(op.ReduceSum(op.Mul(a, b), [-1], keepdims=0), op.Mul(norms[0], norms[1]))
            )
        assert callable(self.distance_function)
        result = self.distance_function(op, a, b)
        dims = static_dims(result) if isinstance(result, ir.Value) else ()
        if not isinstance(result, ir.Value) or (
            dims is not None and len(dims) != len(static_dims(a) or ()) - 1
        ):
            raise self._error(
                f"distance_function returned {result!r}; it must return one distance per pair, the shape of its "
                "arguments without the last axis"
            )
        return result


@dataclass(frozen=True, kw_only=True)
class CosineEmbeddingLoss(JointLoss):
    """1 - cos(x₁, x₂) for pairs with target 1, max(cos(x₁, x₂) - margin, 0) for pairs with target -1.

    Attributes:
        takes: ("x1", "x2"), each [N, D]. The target is [N], 1.0 or -1.0 in the dtype of the outputs.
        margin: cosine up to which different samples cost nothing, from -1 to 1, e.g. 0.5.
    """

    takes: ClassVar[tuple[str, ...]] = ("x1", "x2")
    margin: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "margin", lambda margin: -1 <= margin <= 1, "from -1 to 1")

    def joint_targets(self, scores: Sequence[ir.Value]) -> list[TargetSpec]:
        dims = self._same_dims(scores, rank=2)
        assert scores[0].dtype is not None
        if len(dims) != 2:
            raise self._error(f"it needs outputs of shape [N, D], received {scores[0].shape}")
        return [TargetSpec("target", scores[0].dtype, dims[:1])]

    def _joint_terms(self, op: Emitter, scores: Sequence[ir.Value], targets: Sequence[ir.Value]) -> ir.Value:
        a, b = scores
        product, *squares = (
            op.ReduceSum(op.Mul(x, y), [-1], keepdims=0) for x, y in ((a, b), (a, a), (b, b))
        )
        first, second = (op.Add(square, _COSINE_EPS) for square in squares)
        cosine = op.Div(product, op.Sqrt(op.Mul(first, second)))
        alike = op.Where(op.Equal(targets[0], 1.0), op.Sub(1.0, cosine), 0.0)
        different = op.Where(op.Equal(targets[0], -1.0), positive_part(op, op.Sub(cosine, self.margin)), 0.0)
        terms: ir.Value = op.Add(alike, different)
        terms.shape = targets[0].shape
        return terms


@dataclass(frozen=True, kw_only=True)
class MarginRankingLoss(JointLoss):
    """max(-t·(x₁ - x₂) + margin, 0): x₁ should be larger for target 1, and x₂ for target -1.

    Attributes:
        takes: ("x1", "x2"), of the same shape. The target has that shape and dtype, with the values 1.0 and -1.0.
        margin: least difference that costs nothing, e.g. 0.5.
    """

    takes: ClassVar[tuple[str, ...]] = ("x1", "x2")
    margin: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "margin", lambda margin: abs(margin) < math.inf, "a number")

    def joint_targets(self, scores: Sequence[ir.Value]) -> list[TargetSpec]:
        dims = self._same_dims(scores)
        assert scores[0].dtype is not None
        return [TargetSpec("target", scores[0].dtype, dims)]

    def _joint_terms(self, op: Emitter, scores: Sequence[ir.Value], targets: Sequence[ir.Value]) -> ir.Value:
        product = op.Mul(op.Neg(targets[0]), op.Sub(scores[0], scores[1]))
        terms = positive_part(op, op.Add(product, self.margin))
        terms.shape = scores[0].shape
        return terms


@dataclass(frozen=True, kw_only=True)
class GaussianNLLLoss(JointLoss):
    """Negative log-likelihood of a normal distribution with a predicted mean and variance: (log v + (m - t)²/v)/2.

    Attributes:
        takes: ("mean", "var"), where the variance is positive, has the shape of the mean, and may have the size 1 in
            its last axis or lack that axis. The target has the shape of the mean. A negative variance makes the
            loss NaN.
        full: True to add the constant log(2·pi)/2.
        eps: smallest variance, e.g. 1e-6. As in PyTorch, a smaller one still gets a gradient.
    """

    takes: ClassVar[tuple[str, ...]] = ("mean", "var")
    full: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "eps", lambda eps: 0 < eps < math.inf, "a positive number")

    def joint_targets(self, scores: Sequence[ir.Value]) -> list[TargetSpec]:
        mean, var = (self._scores_dims(value) for value in scores)
        assert scores[0].dtype is not None
        # The sizes that may differ: the last one of the variance may be 1 or missing.
        fits = len(var) == len(mean) - 1 or (
            len(var) == len(mean)
            and (
                not mean
                or var[-1] in (1, mean[-1])
                or not (isinstance(var[-1], int) and isinstance(mean[-1], int))
            )
        )
        pairs = zip(var[: max(len(mean) - 1, 0)], mean, strict=False)
        clash = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
        if not fits or clash or scores[0].dtype != scores[1].dtype:
            raise self._error(
                f"the variance {scores[1].name!r} {scores[1].dtype} {scores[1].shape} must have the dtype and shape of "
                f"the mean {scores[0].name!r} {scores[0].dtype} {scores[0].shape}, or one value per sample"
            )
        return [TargetSpec("target", scores[0].dtype, mean)]

    def _joint_terms(self, op: Emitter, scores: Sequence[ir.Value], targets: Sequence[ir.Value]) -> ir.Value:
        mean, var = scores
        if len(static_dims(var) or ()) < len(static_dims(mean) or ()):
            var = op.Unsqueeze(var, [-1])
        # The value is clamped, and the gradient is that of `var`, as PyTorch clamps under `no_grad`.
        fixed = op.stop_gradient(var)
        clamped = op.Where(op.Less(fixed, self.eps), self.eps, fixed)
        valid = op.Where(op.Less(fixed, 0.0), math.nan, clamped)
        var = op.Add(valid, op.Sub(var, fixed))
        error = op.Sub(mean, targets[0])
        terms = op.Mul(op.Add(op.Log(var), op.Div(op.Mul(error, error), var)), 0.5)
        if self.full:
            terms = op.Add(terms, 0.5 * math.log(2 * math.pi))
        terms.shape = mean.shape
        return terms


def pairwise_distance(op: Emitter, a: ir.Value, b: ir.Value, p: float, eps: float) -> ir.Value:
    """Returns the norm of order `p` of a - b + eps along the last axis, as torch.nn.functional.pairwise_distance."""
    difference = op.Add(op.Sub(a, b), eps)
    if p == 2:
        return _root(op, op.ReduceSum(op.Mul(difference, difference), [-1], keepdims=0))
    size = op.Abs(difference)
    if p == 1:
        return op.ReduceSum(size, [-1], keepdims=0)
    if p == math.inf:
        return op.ReduceMax(size, [-1], keepdims=0)
    # The gradient of a power below 2 is infinite at 0, and PyTorch's is 0 there.
    zero = op.Equal(size, 0.0)
    powers = op.Where(zero, 0.0, op.Pow(op.Where(zero, 1.0, size), p))
    total = op.ReduceSum(powers, [-1], keepdims=0)
    none = op.Equal(total, 0.0)
    return op.Where(none, 0.0, op.Pow(op.Where(none, 1.0, total), 1 / p))


def _root(op: Emitter, square: ir.Value) -> ir.Value:
    """Returns the square root, with a gradient of 0 at 0, as of PyTorch's norms."""
    zero = op.Equal(square, 0.0)
    return op.Where(zero, 0.0, op.Sqrt(op.Where(zero, 1.0, square)))
