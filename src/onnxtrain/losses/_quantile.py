"""Defines the quantile loss for regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter

from ._elementwise import ElementwiseLoss


@dataclass(frozen=True, kw_only=True)
class QuantileLoss(ElementwiseLoss):
    """Quantile (pinball) loss max(q·d, (q - 1)·d) of d = target - score, with q = quantile.

    A model trained with it predicts this quantile of the target: for 0.9, a value that 90 % of the targets do not
    exceed. With 0.5, it is half of the L1 loss. Where score and target are equal, the gradient is the mean of the left
    and right derivatives, 0.5 - q.

    Attributes:
        default_metrics: "mae".
        quantile: q, between 0 and 1, e.g. 0.9.
    """

    default_metrics: ClassVar[tuple[str, ...]] = ("mae",)
    quantile: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "quantile", lambda q: 0 < q < 1, "between 0 and 1, e.g. 0.9")

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        d = op.Sub(target, scores)
        return op.Max(op.Mul(d, self.quantile), op.Mul(d, self.quantile - 1))
