"""Defines Prodigy, an optimizer that estimates its own step size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter, Operand
from onnxtrain.functions.optimizer import adam_step

from ._base import Moment, Optimizer, StepInputs, require_betas, require_not_negative


@dataclass(frozen=True, kw_only=True)
class Prodigy(Optimizer):
    """Prodigy (Mishchenko and Defazio, 2024, algorithm 4): Adam that estimates its step size d.

    With x0 the initial parameter and c = sqrt(beta2): d = max(d, d_coef·r/||s||_1); r' = c·r + (1 - c)·lr·d²·<g,
    x0 - w>; s' = c·s + (1 - c)·lr·d²·g; m' = beta1·m + (1 - beta1)·d·g; v' = beta2·v + (1 - beta2)·d²·g²; w' =
    (1 - lr·d·weight_decay)·w - lr·d·m'/(sqrt(v') + d·eps). The inner product in r and the norm of s are sums over all
    parameters that share d, i.e. have the same settings, learning rate and moment dtype.

    Pass `learning_rate=1.0` to the trainer; a schedule may lower it. A group with its own learning rate or weight decay
    has its own d.

    Attributes:
        elementwise: False, because d depends on all parameters.
        betas: decay rates of the running means m and v, e.g. (0.9, 0.999).
        eps: multiplied by d and added to the denominator for numerical stability, e.g. 1e-8.
        weight_decay: coefficient of decoupled weight decay, e.g. 0.01.
        d0: step size before the first estimate. The estimate only grows, so it must be small, e.g. 1e-6.
        d_coef: factor applied to the estimate, e.g. 0.5 for smaller steps.
    """

    elementwise: ClassVar[bool] = False

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    d0: float = 1e-6
    d_coef: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_betas(self)
        require_not_negative(self, "eps", "weight_decay")
        for field in ("d0", "d_coef"):
            require(self, field, lambda value: 0 < value < math.inf, "a positive number")

    def moments(self, shape: tuple[int, ...]) -> Sequence[Moment]:
        return [
            Moment("running mean of the gradient times d"),
            Moment("running mean of its square"),
            Moment("s, without the factor d0²"),
            Moment("x0, the parameter before the first step"),
            Moment("the parameter's part of r, without the factor d0²", shape=()),
            Moment("d", self.d0, shape=()),
        ]

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        return learning_rate, op.Equal(step, 1)

    def shared_scalars(
        self, op: Emitter, scalars: Sequence[Operand], inputs: Sequence[StepInputs]
    ) -> Sequence[Operand]:
        learning_rate, is_first = scalars
        _, _, s, _, r, d = zip(*(entry.moments for entry in inputs), strict=True)
        # The paper computes the estimate at the end of a step, for the next one. Here it is computed at the beginning,
        # from the r and s of the previous step, so that it does not depend on the gradient.
        norm = op.Sum(*(op.ReduceL1(value, keepdims=0) for value in s))
        # Before the first step, r and s are zero, and the estimate is 0/tiny = 0 instead of 0/0.
        estimate = op.Div(op.Sum(*r), op.Max(norm, 1e-37))
        # Every parameter has a copy of d, because state belongs to parameters; all copies are equal.
        new_d = op.Max(*d, op.Mul(estimate, self.d_coef))
        step_size = op.Mul(learning_rate, new_d)
        # r and s are only used as r/||s||, so both are stored without the factor d0² = 1e-12, with which they would
        # approach the smallest float32.
        ratio = op.Mul(new_d, 1 / self.d0)
        gain = op.Mul(op.Mul(learning_rate, op.Mul(ratio, ratio)), 1 - math.sqrt(self.betas[1]))
        return new_d, step_size, gain, is_first

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        d, step_size, gain, is_first = scalars
        m, v, s, x0, r, _ = moments
        (beta1, beta2), decay = self.betas, math.sqrt(self.betas[1])
        start = op.Where(is_first, w, x0)
        # A host may bind w' to the memory of w, so all reads of w must precede w'. Both r' and w' read it through
        # `moved`, which is computed before w'.
        moved = op.Sub(w, start)
        new_s = op.Add(op.Mul(s, decay), op.Mul(g, gain))
        new_r = op.Sub(op.Mul(r, decay), op.Mul(op.ReduceSum(op.Mul(g, moved), keepdims=0), gain))
        shrunk = (
            op.Sub(moved, op.Mul(w, op.Mul(step_size, self.weight_decay))) if self.weight_decay else moved
        )
        squared = op.Mul(op.Mul(d, d), 1 - beta2)
        adam = (beta1, op.Mul(d, 1 - beta1), beta2, squared, step_size, op.Mul(d, self.eps))
        result, new_m, new_v = op.call(adam_step, shrunk, g, m, v, *adam, _outputs=3)
        # Each output must be a value of its own, so d is copied.
        return op.Add(start, result), new_m, new_v, new_s, start, new_r, op.Identity(d)
