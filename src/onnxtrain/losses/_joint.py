"""Defines `JointLoss`, the base class of losses of several outputs of the model or with several targets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.emitter import Emitter, static_dims

from ._base import Loss, TargetSpec, _per_sample, _weighted_sum, narrow, reduce, widen


@dataclass(frozen=True, kw_only=True)
class JointLoss(Loss):
    """A loss of several outputs of the model, or with any number of targets.

    Subclasses define :meth:`joint_targets` and :meth:`_joint_terms`. The losses of `torch.nn` also set `takes`.

    Attributes:
        takes: what each output means, in order, e.g. ("anchor", "positive", "negative").
    """

    takes: ClassVar[tuple[str, ...]] = ("scores",)

    def chosen(self, outputs: Sequence[ir.Value], *, named: bool) -> tuple[list[ir.Value], list[ir.Value]]:
        """Splits values of the model into those that the loss takes as outputs and those it takes as targets.

        Args:
            outputs: all outputs of the model; or, if `named`, the values that the user names.
            named: True if the user names the values. Those beyond the outputs are then targets.

        Raises:
            GraphBuildError: the number of values does not match the loss.
        """
        count = len(self.takes)
        if len(outputs) < count or (len(outputs) > count and not named):
            names = ", ".join(str(value.name) for value in outputs)
            raise self._error(
                f"it takes {count} outputs of the model ({', '.join(self.takes)}), received {len(outputs)}: "
                f"{names}; name them in this order in {argument('loss_input_names')}"
            )
        return list(outputs[:count]), list(outputs[count:])

    @abstractmethod
    def joint_targets(self, scores: Sequence[ir.Value]) -> list[TargetSpec]:
        """Returns the targets that this loss needs for these outputs of the model, in order; [] if it needs none.

        Raises:
            GraphBuildError: a dtype or shape is unknown or not supported by the loss.
        """

    @abstractmethod
    def _joint_terms(self, op: Emitter, scores: Sequence[ir.Value], targets: Sequence[ir.Value]) -> ir.Value:
        """Emits the unreduced loss of outputs and targets, which are float32 or float64 if they are floating point.

        The first axis of the result is the batch, and its shape is set.
        """

    def _averaged(self, op: Emitter, terms: ir.Value, targets: Sequence[ir.Value]) -> ir.Value:
        """Returns the terms whose mean is the loss for the reduction "mean"; by default the terms themselves."""
        return terms

    def build_joint(
        self,
        op: Emitter,
        scores: Sequence[ir.Value],
        targets: Sequence[ir.Value],
        weight: ir.Value | None = None,
    ) -> ir.Value:
        """Appends the loss to a graph.

        Args:
            op: emitter of the graph of all values.
            scores: outputs of the model.
            targets: targets, with the dtypes and shapes returned by :meth:`joint_targets`.
            weight: one weight per sample, as for :meth:`Loss.build_weighted`; None for weights of 1.

        Returns:
            The loss, in the dtype of the first output; a scalar, shape [], unless the reduction is "none".

        Raises:
            GraphBuildError: dtypes or static shapes do not match.
        """
        for spec, target in zip(self.joint_targets(scores), targets, strict=True):
            self._check_target(spec, target)
        wide_targets = [widen(op, target) for target in targets]
        terms = self._joint_terms(op, [widen(op, value) for value in scores], wide_targets)
        if self.reduction == "mean":
            terms = self._averaged(op, terms, wide_targets)
        scalar = static_dims(terms) == ()
        if weight is None:
            return narrow(op, terms if scalar else reduce(op, terms, self.reduction), scores[0])
        if self.reduction == "none":
            raise self._error("sample weights need the reduction 'mean' or 'sum'")
        if scalar:
            raise self._error(
                "sample weights need one value per sample, shape [N], but this loss is one number for the whole batch"
            )
        loss = _weighted_sum(op, _per_sample(op, terms, mean=self.reduction == "mean"), weight)
        if self.reduction == "mean":
            loss = op.Div(loss, op.ReduceSum(weight, keepdims=0))
            loss.shape = ir.Shape(())
        return narrow(op, loss, scores[0])

    # The interface of losses with one output and one target.

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        return self.joint_targets([scores])

    def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        return self.build_joint(op, [scores], [target])

    def build_weighted(self, op: Emitter, scores: ir.Value, target: ir.Value, weight: ir.Value) -> ir.Value:
        return self.build_joint(op, [scores], [target], weight)

    # Checks that subclasses share.

    def _same_dims(self, scores: Sequence[ir.Value], rank: int = 1) -> tuple[int | str | None, ...]:
        """Returns the dimensions of the first output, after checking that all outputs have the same static sizes.

        Raises:
            GraphBuildError: dtypes, ranks or static sizes differ, or the rank is below `rank`.
        """
        dims = [self._scores_dims(value) for value in scores]
        shown = ", ".join(f"{value.name!r} {value.dtype} {value.shape}" for value in scores)
        first = dims[0]
        if len({value.dtype for value in scores}) > 1 or any(
            len(other) != len(first)
            or any(
                isinstance(a, int) and isinstance(b, int) and a != b
                for a, b in zip(other, first, strict=True)
            )
            for other in dims[1:]
        ):
            raise self._error(f"its outputs must have the same dtype and shape, received {shown}")
        if len(first) < rank:
            axes = ", ".join(["N", "D"][:rank])
            raise self._error(f"it needs outputs of shape [{axes}, ...], received {shown}")
        return first


def positive_part(op: Emitter, x: ir.Value) -> ir.Value:
    """Returns max(x, 0); as with torch.clamp_min, the derivative at 0 is 1."""
    return op.Where(op.GreaterOrEqual(x, 0.0), x, 0.0)
