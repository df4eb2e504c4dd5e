"""Defines the focal loss for imbalanced binary labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter

from ._base import Activation
from ._elementwise import ElementwiseLoss, softplus


@dataclass(frozen=True, kw_only=True)
class FocalLoss(ElementwiseLoss):
    """Binary cross-entropy times (1 - p)^gamma for target 1, and p^gamma for target 0, with p = sigmoid(score).

    The factors down-weight well-classified examples (Lin et al., 2017, equation 5). With `alpha`, the loss is
    -alpha·(1 - p)^gamma·log(p) for target 1, and -(1 - alpha)·p^gamma·log(1 - p) for target 0. For a target t between 0
    and 1, it is t times the former plus (1 - t) times the latter, as in binary cross-entropy.

    Attributes:
        activation: "sigmoid".
        default_metrics: "binary_accuracy".
        alpha: weight of target 1, from 0 to 1, e.g. 0.25; the weight of target 0 is 1 - alpha. With None, both weights
            are 1.
        gamma: exponent, non-negative, e.g. 2.0. A larger exponent reduces the loss of well-classified examples more
            strongly; 0 gives binary cross-entropy, weighted by `alpha`.
    """

    activation: ClassVar[Activation | None] = "sigmoid"
    default_metrics: ClassVar[tuple[str, ...]] = ("binary_accuracy",)
    alpha: float | None = 0.25
    gamma: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "alpha", lambda alpha: alpha is None or 0 <= alpha <= 1, "from 0 to 1, or None")
        require(self, "gamma", lambda gamma: 0 <= gamma < float("inf"), "a non-negative number")

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        # log(p) = -softplus(-x) and log(1 - p) = -softplus(x). Computing powers of p as exp(gamma·log(p)) keeps
        # gradients finite where p is rounded to 0 or 1, unlike Pow of a sigmoid for gamma below 1.
        minus_log_p, minus_log_q = softplus(op, op.Neg(scores)), softplus(op, scores)

        def term(minus_log_target: ir.Value, minus_log_other: ir.Value) -> ir.Value:
            return op.Mul(op.Exp(op.Mul(minus_log_other, -self.gamma)), minus_log_target)

        positive, negative = term(minus_log_p, minus_log_q), term(minus_log_q, minus_log_p)
        if self.alpha is not None:
            positive, negative = op.Mul(positive, self.alpha), op.Mul(negative, 1 - self.alpha)
        return op.Add(op.Mul(positive, target), op.Mul(negative, op.Sub(1.0, target)))
