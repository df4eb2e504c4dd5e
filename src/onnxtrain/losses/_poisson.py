"""Defines the negative log-likelihood of counts under a Poisson distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter

from ._elementwise import ElementwiseLoss


@dataclass(frozen=True, kw_only=True)
class PoissonNLLLoss(ElementwiseLoss):
    """Negative log-likelihood of counts t with log-rates x, the scores: exp(x) - t·x.

    Attributes:
        default_metrics: none, because the scores are logarithms of rates.
        log_input: False if the scores are rates: x - t·log(x + eps).
        full: True to add Stirling's approximation of log t! where t > 1: t·log(t) - t + log(2·pi·t)/2.
        eps: added to rates, so that the logarithm of a rate of 0 is finite; positive, e.g. 1e-8.
    """

    default_metrics: ClassVar[tuple[str, ...]] = ()
    log_input: bool = True
    full: bool = False
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "eps", lambda eps: 0 < eps < float("inf"), "a positive number")

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        if self.log_input:
            terms: ir.Value = op.Sub(op.Exp(scores), op.Mul(target, scores))
        else:
            terms = op.Sub(scores, op.Mul(target, op.Log(op.Add(scores, self.eps))))
        if not self.full:
            return terms
        # Avoids the logarithm of 0 even where Where selects the other branch.
        many = op.Greater(target, 1.0)
        count = op.Where(many, target, 1.0)
        half = op.Mul(op.Log(op.Mul(count, 2 * math.pi)), 0.5)
        stirling = op.Add(op.Sub(op.Mul(count, op.Log(count)), count), half)
        return op.Add(terms, op.Where(many, stirling, 0.0))
