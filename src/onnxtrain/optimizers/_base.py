"""What every optimizer has: its moments, its step of one parameter, gradient clipping."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter, Operand

from ._clipping import GradientClipping

__all__ = ["MomentSpec", "Optimizer", "add_l2", "bias_correction", "require_not_negative"]


@dataclass(frozen=True)
class MomentSpec:
    """One tensor of optimizer state per parameter, of the parameter's shape.

    Attributes:
        name: `momentum0`, `momentum1`, ...: the suffix of its graph input and its key in checkpoints.
        initial_value: what it is filled with before the first step.
        meaning: what it holds.
    """

    name: str
    initial_value: float
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """An optimizer: hyperparameters, and how to write its step.

    The learning rate is an input of the optimizer model, not a field.

    Attributes:
        clip_grad: how to clip the gradients before they are used, before any weight decay is added to them.
    """

    clip_grad: GradientClipping | None = None

    def __post_init__(self) -> None:
        require(
            self,
            "clip_grad",
            lambda clip: clip is None or isinstance(clip, GradientClipping),
            "ClipGradNorm(...), ClipGradValue(...) or None",
        )

    def state_spec(self) -> tuple[MomentSpec, ...]:
        """Returns the moments that each parameter has, in the order of the optimizer model's inputs."""
        return tuple(
            MomentSpec(f"momentum{index}", value, meaning)
            for index, (meaning, value) in enumerate(self._moments())
        )

    @abstractmethod
    def _moments(self) -> Sequence[tuple[str, float]]:
        """Meaning and initial value of each moment."""

    @abstractmethod
    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        """Returns the scalars that :meth:`update` needs: what does not depend on the parameter.

        Args:
            op: writes into the optimizer model.
            learning_rate: float [], in the dtype of the computation.
            step: int64 [], 1 at the first step.
        """

    @abstractmethod
    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        """Returns the new parameter and its new moments, in the dtype of `w`.

        Args:
            op: writes into the optimizer model.
            w: the parameter.
            g: its gradient, clipped, of the same shape and dtype.
            moments: one per entry of :meth:`state_spec`, of the same shape and dtype.
            scalars: what :meth:`scalars` returned.
        """


def require_not_negative(owner: object, *fields: str) -> None:
    """Raises GraphBuildError unless these fields of an optimizer are zero or positive."""
    for field in fields:
        require(owner, field, lambda value: 0 <= value < float("inf"), "zero or a positive number")


def add_l2(op: Emitter, w: ir.Value, g: ir.Value, weight_decay: float) -> ir.Value:
    """Returns g + weight_decay·w, the gradient of the loss with an L2 penalty."""
    return op.Add(g, op.Mul(w, weight_decay)) if weight_decay else g


def bias_correction(op: Emitter, beta: float, step: ir.Value, like: ir.Value) -> ir.Value:
    """Returns 1 - beta**step in the dtype of `like`.

    As -2t/(1 - t) with t = tanh(step·log(beta)/2): subtracting a power from one loses five of float32's
    seven digits for beta = 0.9999, and float64 kernels are missing from the smaller web builds of ONNX
    Runtime.
    """
    if beta == 0:
        return op.const(1.0, like=like)
    count = op.Cast(step, to=like.dtype)
    tanh = op.Tanh(op.Mul(count, op.const(math.log(beta) / 2, like=like)))
    return op.Div(op.Mul(tanh, -2.0), op.Sub(1.0, tanh))
