"""Defines Lion, whose update is the sign of an averaged gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.emitter import Emitter, Operand
from onnxtrain.functions.optimizer import lion_step

from ._base import Moment, Optimizer, require_betas, require_not_negative


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2): sign updates.

    w' = (1 - lr·weight_decay)·w - lr·sign(beta1·m + (1 - beta1)·g); m' = beta2·m + (1 - beta2)·g. Apart from
    weight decay, every element changes by lr. Choose a learning rate three to ten times smaller than for AdamW, and a
    larger weight decay.

    Attributes:
        betas: (beta1, beta2), e.g. (0.9, 0.99): the weight of m in the average that determines the sign, and the decay
            rate of m.
        weight_decay: coefficient of decoupled weight decay, e.g. 0.1.
    """

    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_betas(self)
        require_not_negative(self, "weight_decay")

    def moments(self, shape: tuple[int, ...]) -> Sequence[Moment]:
        return [Moment("running mean of the gradient")]

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        return *self.betas, learning_rate, op.Sub(1.0, op.Mul(learning_rate, self.weight_decay))

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        return op.call(lion_step, w, g, *moments, *scalars, _outputs=2)
