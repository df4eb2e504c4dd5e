"""Defines gradient clipping by norm and by value."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain._settings import integers_to_floats, require
from onnxtrain.emitter import Emitter
from onnxtrain.functions.optimizer import sum_of_squares


class GradientClipping(ABC):
    """Base class for gradient clipping, which limits gradients before an optimizer uses them."""

    @abstractmethod
    def apply(self, op: Emitter, gradients: Sequence[ir.Value]) -> list[ir.Value]:
        """Returns the clipped gradients, with the same shapes and dtypes (float or double)."""

    def factor(self, op: Emitter, gradients: Sequence[ir.Value]) -> ir.Value | None:
        """Returns the scalar, float or double, that scales all gradients; None if clipping is per element."""
        return None


@dataclass(frozen=True)
class ClipGradNorm(GradientClipping):
    """Scales all gradients by max_norm/norm if their total Euclidean norm exceeds max_norm.

    This is the formula used in onnxruntime-training. `torch.nn.utils.clip_grad_norm_` divides by norm + 1e-6, a
    relative difference of 1e-6/norm. As in PyTorch, one NaN makes all gradients NaN; if an element is infinite, it
    becomes NaN and all finite elements become 0.

    Attributes:
        max_norm: maximum norm of all gradients together, positive, e.g. 1.0.
    """

    max_norm: float = 1.0

    def __post_init__(self) -> None:
        integers_to_floats(self)
        _require_positive(self, "max_norm")

    def apply(self, op: Emitter, gradients: Sequence[ir.Value]) -> list[ir.Value]:
        factor = self.factor(op, gradients)
        factors = {dtype: cast(op, factor, dtype) for g in gradients if (dtype := g.dtype) is not None}
        return [op.Mul(gradient, factors[gradient.dtype]) for gradient in gradients if gradient.dtype]

    def factor(self, op: Emitter, gradients: Sequence[ir.Value]) -> ir.Value:
        # Gradients of different dtypes share one norm, computed in the widest of them.
        dtypes = {gradient.dtype for gradient in gradients}
        wide = ir.DataType.DOUBLE if ir.DataType.DOUBLE in dtypes else ir.DataType.FLOAT
        norm = _norm(op, gradients, wide)
        # Squares of float32 overflow from 2e19 on, even if the norm itself does not. Only then is it computed again
        # with scaling.
        scaled, plain = op.subgraph({}), op.subgraph({})
        down, up = _SCALES[wide]
        small = [scaled.Mul(cast(scaled, gradient, wide), down) for gradient in gradients]
        for value, gradient in zip(small, gradients, strict=True):
            value.shape = gradient.shape
        scaled.graph.outputs.append(scaled.Mul(_norm(scaled, small, wide), up))
        plain.graph.outputs.append(plain.Identity(norm))
        norm = op.If(op.IsInf(norm), then_branch=scaled.graph, else_branch=plain.graph)
        for value in (norm, *scaled.graph.outputs, *plain.graph.outputs):
            value.type, value.shape = ir.TensorType(wide), ir.Shape(())
        # With Max, the factor is 1 for norms up to max_norm, and a norm of zero is never a divisor.
        return op.Div(self.max_norm, op.Max(norm, self.max_norm))


# Powers of two, which do not round: the square of the largest number times the first is far from overflow.
_SCALES = {ir.DataType.FLOAT: (2.0**-70, 2.0**70), ir.DataType.DOUBLE: (2.0**-520, 2.0**520)}
# ONNX Runtime adds the inputs of Sum sequentially.
_TERMS = 16


def _norm(op: Emitter, gradients: Sequence[ir.Value], wide: ir.DataType) -> ir.Value:
    """Returns the total Euclidean norm of the gradients, a scalar in the dtype `wide`."""
    if op.can_call and all(gradient.dtype == wide == ir.DataType.FLOAT for gradient in gradients):
        groups = [gradients[first : first + _TERMS] for first in range(0, len(gradients), _TERMS)]
        squares = [_scalar(op.call(sum_of_squares([g.shape for g in group]), *group)) for group in groups]
    else:
        squares = [_scalar(cast(op, _scalar(op.ReduceSumSquare(g, keepdims=0)), wide)) for g in gradients]
    while len(squares) > 1:
        squares = [_scalar(op.Sum(*squares[i : i + _TERMS])) for i in range(0, len(squares), _TERMS)]
    return _scalar(op.Sqrt(squares[0]))


def _scalar(value: ir.Value) -> ir.Value:
    """Declares that a value has shape [], because onnx's checker requires shapes in subgraphs; returns the value."""
    value.shape = ir.Shape(())
    return value


@dataclass(frozen=True)
class ClipGradValue(GradientClipping):
    """Clamps each element of each gradient to [-value, value].

    Attributes:
        value: maximum absolute value, positive, e.g. 0.5.
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        integers_to_floats(self)
        _require_positive(self, "value")

    def apply(self, op: Emitter, gradients: Sequence[ir.Value]) -> list[ir.Value]:
        return [op.Clip(gradient, -self.value, self.value) for gradient in gradients]


def _require_positive(owner: GradientClipping, field: str) -> None:
    """Raises GraphBuildError unless a field is a positive, finite number."""
    require(
        owner,
        field,
        lambda value: isinstance(value, numbers.Real) and 0 < float(value) < float("inf"),
        "a positive number",
    )


def cast(op: Emitter, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Casts a value to `dtype`, or returns it unchanged if it already has this dtype."""
    if value.dtype == dtype:
        return value
    result = op.Cast(value, to=dtype)
    # Muon and Adafactor need the shape of a parameter after the Cast.
    result.shape = value.shape
    return result
