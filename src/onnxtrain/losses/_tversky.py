"""Defines the Tversky loss for the overlap of regions, which includes the Dice loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter

from ._base import Activation
from ._elementwise import SampleLoss, sample_sum


@dataclass(frozen=True, kw_only=True)
class TverskyLoss(SampleLoss):
    """1 - (TP + smooth) / (TP + alpha·FP + beta·FN + smooth): 1 minus the Tversky index of each sample.

    With p = sigmoid(score) and sums over all positions of a sample: TP = Σ p·t, FP = Σ p·(1 - t), FN = Σ (1 - p)·t
    (Salehi et al., 2017, equation 3). Targets t are in [0, 1]. With alpha = beta = 0.5, it is the Dice loss.

    Attributes:
        activation: "sigmoid".
        default_metrics: "binary_accuracy".
        alpha: weight of false positives, non-negative, e.g. 0.3.
        beta: weight of false negatives, non-negative, e.g. 0.7; if larger than alpha, it favors recall.
        smooth: positive constant added to numerator and denominator, both of which count positions, e.g. 1.0. Without
            it, a sample without positive targets would have no gradient.
    """

    activation: ClassVar[Activation | None] = "sigmoid"
    default_metrics: ClassVar[tuple[str, ...]] = ("binary_accuracy",)
    alpha: float = 0.5
    beta: float = 0.5
    smooth: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "beta"):
            require(self, name, lambda weight: 0 <= weight < float("inf"), "a non-negative number")
        require(self, "smooth", lambda smooth: 0 < smooth < float("inf"), "a positive number")

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        p, not_p, not_target = op.Sigmoid(scores), op.Sigmoid(op.Neg(scores)), op.Sub(1.0, target)
        hits = sample_sum(op, op.Mul(p, target), scores)
        false_alarms = op.Mul(sample_sum(op, op.Mul(p, not_target), scores), self.alpha)
        missed = op.Mul(sample_sum(op, op.Mul(not_p, target), scores), self.beta)
        errors = op.Add(false_alarms, missed)
        # 1 - (TP + s) / (TP + e + s) = e / (TP + e + s), which loses no digits to cancellation for losses near 0.
        return op.Div(errors, op.Add(op.Add(hits, errors), self.smooth))
