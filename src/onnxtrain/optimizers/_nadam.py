"""Defines NAdam, which is Adam with Nesterov momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.emitter import Emitter, Operand

from ._base import Moment, Optimizer, add_l2, bias_correction, require_betas, require_not_negative


@dataclass(frozen=True, kw_only=True)
class NAdam(Optimizer):
    """NAdam (Dozat, 2016, "Incorporating Nesterov Momentum into Adam"), like torch.optim.NAdam.

    With m' and v' the running means of g and g², c2 = 1 - beta2**step, mu(t) = beta1·(1 - 0.96**(t·momentum_decay)/2),
    p' = mu(1)·...·mu(step), mu = mu(step) and mu' = mu(step + 1):

    w' = w - lr·((1 - mu)/(1 - p')·g + mu'/(1 - p'·mu')·m')/(sqrt(v'/c2) + eps).

    Attributes:
        betas: decay rates of the running means m and v, e.g. (0.9, 0.999).
        eps: added to the denominator for numerical stability, e.g. 1e-8.
        weight_decay: coefficient of the L2 penalty, or of the decoupled weight decay, e.g. 1e-4.
        momentum_decay: how fast mu approaches beta1, e.g. 4e-3.
        decoupled_weight_decay: True for decoupled weight decay, as in AdamW; False for an L2 penalty.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_betas(self)
        require_not_negative(self, "eps", "weight_decay", "momentum_decay")

    def moments(self, shape: tuple[int, ...]) -> Sequence[Moment]:
        return [
            Moment("running mean of the gradient"),
            Moment("running mean of its square"),
            Moment("product of the momenta", 1.0, ()),
        ]

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        def momentum(t: ir.Value) -> ir.Value:
            half: ir.Value = op.Mul(
                op.Pow(0.96, op.Mul(op.Cast(t, to=learning_rate.dtype), self.momentum_decay)), 0.5
            )
            return op.Mul(op.Sub(1.0, half), self.betas[0])

        correction = bias_correction(op, self.betas[1], step, learning_rate)
        decay = op.Sub(1.0, op.Mul(learning_rate, self.weight_decay))
        return learning_rate, momentum(step), momentum(op.Add(step, 1)), correction, decay

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        rate, momentum, next_momentum, correction, decay = scalars
        if self.decoupled_weight_decay:
            w = op.Mul(w, decay) if self.weight_decay else w
        else:
            g = add_l2(op, w, g, self.weight_decay)
        beta1, beta2 = self.betas
        mean = op.Add(op.Mul(moments[0], beta1), op.Mul(g, 1 - beta1))
        square = op.Add(op.Mul(moments[1], beta2), op.Mul(op.Mul(g, 1 - beta2), g))
        product = op.Mul(moments[2], momentum)
        along_g = op.Div(op.Mul(rate, op.Sub(1.0, momentum)), op.Sub(1.0, product))
        along_mean = op.Div(op.Mul(rate, next_momentum), op.Sub(1.0, op.Mul(product, next_momentum)))
        root = op.Add(op.Sqrt(op.Div(square, correction)), self.eps)
        change = op.Div(op.Add(op.Mul(g, along_g), op.Mul(mean, along_mean)), root)
        return op.Sub(w, change), mean, square, product
