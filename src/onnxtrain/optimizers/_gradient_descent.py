"""Defines the optimizers without bias correction: SGD, Adagrad and RMSprop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter, Operand
from onnxtrain.errors import GraphBuildError
from onnxtrain.functions.optimizer import (
    adagrad_step,
    momentum_step,
    nesterov_step,
    rmsprop_step,
    sgd_step,
)

from ._base import Moment, Optimizer, add_l2, require_not_negative, sparse_refusal


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent, like torch.optim.SGD.

    First, weight_decay·w is added to g. Without momentum, w' = w - lr·g. With momentum, b' = momentum·b +
    (1 - dampening)·g (b' = g at the first step) and w' = w - lr·b'; with nesterov, w' = w - lr·(g + momentum·b').

    Attributes:
        momentum: decay rate of the momentum b, e.g. 0.9; with 0 the optimizer has no state.
        dampening: the gradient is multiplied by 1 - dampening before it is added to the momentum, e.g. 0.1.
        weight_decay: coefficient of the L2 penalty, e.g. 1e-4.
        nesterov: True for Nesterov momentum, which requires momentum > 0 and dampening 0.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(self, "momentum", "weight_decay")
        require(self, "dampening", lambda value: abs(value) < float("inf"), "a number")
        # torch.optim.SGD rejects the same combinations.
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise GraphBuildError(
                "making SGD: nesterov=True needs a positive momentum and zero dampening, received "
                f"momentum={self.momentum} and dampening={self.dampening}"
            )

    def moments(self, shape: tuple[int, ...]) -> Sequence[Moment]:
        return [Moment("momentum")] if self.momentum else []

    def gradient_refusal(self, *, sparse: bool) -> str | None:
        return sparse_refusal(self, "momentum", "weight_decay") if sparse else None

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        if not self.momentum:
            return (learning_rate,)
        if not self.dampening:
            return (learning_rate, self.momentum)
        # PyTorch initializes the momentum with the whole gradient, without dampening.
        first = op.const(1.0, like=learning_rate)
        gain = op.Where(op.Equal(step, 1), first, op.const(1 - self.dampening, like=learning_rate))
        return (learning_rate, self.momentum, gain)

    def scaled(self, op: Emitter, scalars: Sequence[Operand], factor: ir.Value) -> Sequence[Operand] | None:
        # Without momentum and penalty, the learning rate only multiplies the gradient, so it can include the factor.
        return None if self.momentum or self.weight_decay else [op.Mul(factor, scalar) for scalar in scalars]

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        g = add_l2(op, w, g, self.weight_decay)
        if not moments:
            return (op.call(sgd_step, w, g, *scalars),)
        learning_rate, momentum, *gain = scalars
        # Only with dampening, which is rare, because it costs a multiplication per element of the gradient.
        if gain:
            g = op.Mul(g, *gain)
        step = nesterov_step if self.nesterov else momentum_step
        return op.call(step, w, g, *moments, learning_rate, momentum, _outputs=2)


@dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al., 2011), like torch.optim.Adagrad.

    First, weight_decay·w is added to g. Then s' = s + g² and w' = w - lr/(1 + (step - 1)·lr_decay)·g/(sqrt(s') + eps).

    Attributes:
        lr_decay: decay of the learning rate; e.g. 0.01 halves it after 100 steps.
        weight_decay: coefficient of the L2 penalty, e.g. 1e-4.
        initial_accumulator_value: initial value of all elements of s, e.g. 0.1.
        eps: added to the denominator for numerical stability, e.g. 1e-10.
    """

    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(self, "lr_decay", "weight_decay", "initial_accumulator_value", "eps")

    def moments(self, shape: tuple[int, ...]) -> Sequence[Moment]:
        return [Moment("sum of squares of the gradient", self.initial_accumulator_value)]

    def gradient_refusal(self, *, sparse: bool) -> str | None:
        return sparse_refusal(self, "weight_decay") if sparse else None

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        if self.lr_decay:
            # The first step has number 1 and, as in PyTorch, the full learning rate.
            done = op.Cast(op.Sub(step, 1), to=learning_rate.dtype)
            learning_rate = op.Div(learning_rate, op.Add(op.Mul(done, self.lr_decay), 1.0))
        return (learning_rate, self.eps)

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        g = add_l2(op, w, g, self.weight_decay)
        return op.call(adagrad_step, w, g, *moments, *scalars, _outputs=2)


@dataclass(frozen=True, kw_only=True)
class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton, 2012), like torch.optim.RMSprop.

    First, weight_decay·w is added to g. Then v' = alpha·v + (1 - alpha)·g², change = g/(sqrt(v') + eps), b' =
    momentum·b + change and w' = w - lr·b'. If centered, the root is sqrt(v' - m'²) with m' = alpha·m + (1 - alpha)·g;
    differences that rounding makes negative (NaN in PyTorch) are set to zero.

    Attributes:
        alpha: decay rate of the running means v and m, e.g. 0.99.
        eps: added to the denominator for numerical stability, e.g. 1e-8.
        momentum: decay rate of the momentum b, e.g. 0.9; 0 disables momentum, and b is not stored.
        centered: True to divide by the standard deviation of the gradient instead of its root mean square.
        weight_decay: coefficient of the L2 penalty, e.g. 1e-4.
    """

    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "alpha", lambda alpha: 0 <= alpha <= 1, "between 0 and 1")
        require_not_negative(self, "eps", "momentum", "weight_decay")

    def moments(self, shape: tuple[int, ...]) -> Sequence[Moment]:
        # In the order of the inputs of `rmsprop_step`.
        return [
            Moment("running mean of the gradient's square"),
            *([Moment("running mean of the gradient")] if self.centered else []),
            *([Moment("momentum")] if self.momentum else []),
        ]

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        common = (learning_rate, self.alpha, 1 - self.alpha, self.eps)
        return (*common, self.momentum) if self.momentum else common

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        g = add_l2(op, w, g, self.weight_decay)
        step = rmsprop_step(centered=self.centered, momentum=bool(self.momentum))
        return op.call(step, w, g, *moments, *scalars, _outputs=1 + len(moments))
