"""Trains on standardized targets, while targets and predictions of the model keep their units."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError

from ._base import Loss, TargetSpec
from ._poisson import PoissonNLLLoss

# Largest rounding error of a target, in standard deviations.
_COARSEST = 0.01


@dataclass(frozen=True)
class TargetScale:
    """Mean and standard deviation of a target, one for all targets or one for each column.

    With `Recipe(target_scale=...)`, the loss compares the network's output with (target - mean) / deviation, and the
    models return output * deviation + mean. So the network learns a standardized target, as in scikit-learn's
    `TransformedTargetRegressor(transformer=StandardScaler())`, while predictions and metrics such as "mae" are in the
    target's units. The loss itself is that of the standardized target.

    Attributes:
        mean: mean of the target, e.g. 22.5, or of each column, e.g. (22.5, 1.2).
        deviation: standard deviation, positive.

    Raises:
        GraphBuildError: a number is not finite, a deviation is not positive, or there are not as many of each.

    >>> TargetScale(mean=2, deviation=0.5)
    TargetScale(mean=(2.0,), deviation=(0.5,))
    """

    mean: Any
    deviation: Any

    def __post_init__(self) -> None:
        for entry in fields(self):
            try:
                array = np.atleast_1d(np.asarray(getattr(self, entry.name), np.float64))
            except (TypeError, ValueError):
                array = np.array([np.nan])
            if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
                raise GraphBuildError(
                    f"making TargetScale: {entry.name} is {getattr(self, entry.name)!r}; it must be a finite number, "
                    "or one for each column of the target"
                )
            # Only the constructor of a frozen dataclass may set fields.
            object.__setattr__(self, entry.name, tuple(array.tolist()))
        if len(self.mean) != len(self.deviation) or min(self.deviation) <= 0:
            raise GraphBuildError(
                f"making TargetScale: deviation is {self.deviation}; it must be one positive number for each mean"
            )


def _constants(scale: TargetScale, op: Emitter, like: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns mean and deviation as constants, in the dtype of `like`: shape [], or [n] for n columns."""
    assert like.dtype is not None
    mean, deviation = (
        op.const(np.array(values if len(values) > 1 else values[0]), like.dtype)
        for values in (scale.mean, scale.deviation)
    )
    return mean, deviation


class ScaledTargetLoss(Loss):
    """A loss that compares its scores with the standardized target.

    Args:
        loss: the loss, e.g. `MSELoss()`.
        scale: mean and deviation of the target.
    """

    def __init__(self, loss: Loss, scale: TargetScale) -> None:
        # Not a dataclass field of this class: the reduction is that of the loss.
        object.__setattr__(self, "reduction", loss.reduction)
        object.__setattr__(self, "loss", loss)
        object.__setattr__(self, "scale", scale)

    loss: Loss
    scale: TargetScale

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        """Returns the targets of the loss. Raises GraphBuildError if they are no quantities, or of another width."""
        specs = self.loss.targets(scores)
        spec, count = specs[0], len(self.scale.mean)
        name = type(self.loss).__name__
        if self.loss.activation is not None or spec.class_labels or isinstance(self.loss, PoissonNLLLoss):
            raise self._problem(
                f"the targets of {name} are no quantities that can be standardized; choose mse, l1, huber, smooth_l1 "
                f"or quantile, or leave {argument('target_scale')} out"
            )
        width = spec.shape[-1] if len(spec.shape) > 1 else 1
        if count > 1 and isinstance(width, int) and width != count:
            raise self._problem(f"it has {count} columns, but the target of {name} has {width}")
        # ONNX's number types that numpy lacks are rounded more coarsely than float32.
        held = np.dtype(np.float64 if spec.dtype == ir.DataType.DOUBLE else np.float32)
        if spec.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            raise self._problem(f"the target of {name} is {spec.dtype}, which is too coarse; use float32")
        for mean, deviation in zip(self.scale.mean, self.scale.deviation, strict=True):
            spacing = float(np.spacing(held.type(abs(mean))))
            if not spacing < _COARSEST * deviation:
                raise self._problem(
                    f"a target with mean {mean:g} and standard deviation {deviation:g} is too coarse in {held.name}, "
                    f"whose numbers are {spacing:g} apart there; subtract a constant from the target"
                )
        return specs

    def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        """Appends the loss of the standardized target."""
        return self.loss.build(op, scores, self._standardized(op, target))

    def build_weighted(self, op: Emitter, scores: ir.Value, target: ir.Value, weight: ir.Value) -> ir.Value:
        """Appends the weighted loss of the standardized target."""
        return self.loss.build_weighted(op, scores, self._standardized(op, target), weight)

    def mean_over(self, labels: str | None) -> dict[str, Any] | None:
        """Describes what the loss is averaged over, as the loss itself does."""
        return self.loss.mean_over(labels)

    def _standardized(self, op: Emitter, target: ir.Value) -> ir.Value:
        mean, deviation = _constants(self.scale, op, target)
        result: ir.Value = op.Div(op.Sub(target, mean), deviation)
        result.shape = target.shape
        return result

    def _problem(self, problem: str) -> GraphBuildError:
        return GraphBuildError(f"building the training graph: {argument('target_scale')}: {problem}")


def restore_units(op: Emitter, output: str, scale: TargetScale) -> None:
    """Converts an output of a model from standardized values to the target's units.

    Args:
        op: emitter of the model's graph.
        output: name of the output that the loss reads. The new output has this name.
        scale: mean and deviation of the target.

    Raises:
        GraphBuildError: it is no output of the model, so that a prediction would stay standardized.
    """
    outputs = op.graph.outputs
    index = next((i for i, value in enumerate(outputs) if value.name == output), None)
    if index is None:
        raise GraphBuildError(
            f"building the training graph: {argument('target_scale')} converts the output that the loss reads, but "
            f"{output!r} is no output of the model; its outputs are {', '.join(str(value.name) for value in outputs)}"
        )
    standardized = outputs[index]
    standardized.name = op.unique_name(f"{output}_standardized")
    mean, deviation = _constants(scale, op, standardized)
    restored: ir.Value = op.Add(op.Mul(standardized, deviation), mean)
    restored.name, restored.shape, restored.type = output, standardized.shape, standardized.type
    outputs[index] = restored
