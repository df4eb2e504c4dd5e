"""Defines Adafactor, whose state has one element per row and per column instead of one per element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter, Operand
from onnxtrain.functions.optimizer import adafactor_matrix_step, adafactor_step

from ._base import Moment, Optimizer, require_not_negative


@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Adafactor (Shazeer and Stern, 2018), like torch.optim.Adafactor: factored second moments.

    At step t, with b = t**beta2_decay and rho = min(lr, 1/sqrt(t)): rows' = (1 - b)·rows + b·mean(g² over each row);
    columns' is computed in the same way. The second moment v' is estimated as rows'·columns'/max(mean(rows'), eps1).
    For vectors and scalars, it is not factored: v' = (1 - b)·v + b·g². With u = g/sqrt(max(v', eps1²)): w' = (1 -
    lr·weight_decay)·w - rho·max(eps2, rms(w))/max(1, rms(u)/d)·u. Steps are relative to the magnitude of the parameter;
    typical learning rates are around 1e-2.

    Attributes:
        elementwise: False, because the moments and root mean squares depend on all elements of a parameter.
        beta2_decay: exponent of b, at most 0, e.g. -0.8. The closer to 0, the faster old gradients are forgotten.
        eps: (eps1, eps2), e.g. (None, 1e-3). eps1 keeps the denominators away from zero; None means the machine
            epsilon of the dtype. If the root mean square of a parameter is below eps2, eps2 is used instead.
        d: root mean square of u above which u is scaled down, e.g. 1.0.
        weight_decay: coefficient of decoupled weight decay, e.g. 0.01.
    """

    elementwise: ClassVar[bool] = False

    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "beta2_decay", lambda value: -math.inf < value <= 0, "a number of at most 0")
        require(
            self,
            "eps",
            lambda eps: len(eps) == 2 and (eps[0] is None or 0 <= eps[0] < 1) and 0 <= eps[1] < math.inf,
            "two non-negative numbers, of which the first is below 1 or None",
        )
        require(self, "d", lambda value: 1 <= value < math.inf, "a number of at least 1")
        require_not_negative(self, "weight_decay")

    def moments(self, shape: tuple[int, ...]) -> Sequence[Moment]:
        # A factored vector would save nothing. Rows of an empty matrix may have no mean.
        if len(shape) < 2 or 0 in shape:
            return [Moment("running mean of the gradient's square")]
        return [
            Moment("running mean of the gradient's square over each row", shape=(*shape[:-1], 1)),
            Moment(
                "running mean of the gradient's square over each column", shape=(*shape[:-2], 1, shape[-1])
            ),
        ]

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        count = op.Cast(step, to=learning_rate.dtype)
        # 1 at the first step, so that the running means start at the first squares, without a bias.
        renew = op.Pow(count, self.beta2_decay)
        rho = op.Min(learning_rate, op.Reciprocal(op.Sqrt(count)))
        decay = op.Sub(1.0, op.Mul(learning_rate, self.weight_decay))
        return op.Sub(1.0, renew), renew, rho, decay

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        assert w.dtype is not None
        assert w.shape is not None
        # For the dtype of the computation: float32 for a float16 parameter.
        eps1 = float(np.finfo(w.dtype.numpy()).eps) if self.eps[0] is None else self.eps[0]
        # An empty parameter has no root mean square, because it has 0 elements.
        count = float(max(1, math.prod(w.shape.numpy())))
        settings = (count, eps1, eps1**2, self.eps[1], self.d)
        step = adafactor_step if len(moments) == 1 else adafactor_matrix_step
        return op.call(step, w, g, *moments, *scalars, *settings, _outputs=1 + len(moments))
