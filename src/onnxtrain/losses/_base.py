"""Defines the base class of losses: specification of the target, reduction, checks, sample weights."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxtrain._names import enumerated
from onnxtrain._settings import integers_to_floats, require
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.errors import GraphBuildError
from onnxtrain.passes import why_untyped

# Stored as metadata of values, which is kept by serialization, cloning and opset conversion.
TARGET_KEY = "onnxtrain.target"
"""Metadata key of a graph input that is a target: JSON, `{}` or
`{"class_labels": {"count": 10, "ignore_index": -100}}`."""

LABELS_KEY = "onnxtrain.class_labels"
"""Metadata key of a graph input that the model reads, and a loss reads as its labels: JSON as for `TARGET_KEY`."""

MEAN_KEY = "onnxtrain.loss_mean"
"""Metadata key of a loss: the result of :meth:`Loss.mean_over` as JSON."""

GROUPS = "groups"
"""Entry of a target's JSON: the number of rows per sample, e.g. 2 for pairs of texts, or a symbolic size."""

WEIGHT_NAME = "sample_weight"
"""Suggested name of the graph input with one weight per sample."""

Reduction = Literal["mean", "sum", "none"]
"""Reduction of the terms of a loss, one per sample or element; "none" returns the terms themselves."""
Activation = Literal["softmax", "softmax_last", "exp", "sigmoid"]

# Sums of these dtypes overflow (float16 ends at 65,504) or stop growing (bfloat16 has 8 bits of precision).
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_LABEL_DTYPES = (ir.DataType.INT64, ir.DataType.INT32)


@dataclass(frozen=True)
class ClassLabels:
    """The allowed values of integer targets: 0 .. count-1, and `ignore_index`.

    Attributes:
        count: number of classes, e.g. 10; None if it is symbolic.
        ignore_index: label of positions that are ignored, e.g. -100; None if there is none.
        axis: class axis of the scores, e.g. 1.
        scores: dimensions of scores with more than two axes, e.g. ("batch", 7, 512), for error messages; else None.
        shift: the scores at position t of axis 1 predict the label at t + shift: 1 for next-token prediction.
    """

    count: int | None
    ignore_index: int | None
    axis: int = 1
    scores: tuple[int | str | None, ...] | None = None
    shift: int = 0

    def described(self) -> dict[str, Any]:
        """Returns the fields as a JSON-compatible dict.

        Omits `axis` and `scores` if the scores have at most two axes, and `shift` if it is 0.
        """
        several = {} if self.scores is None else {"axis": self.axis, "scores": list(self.scores)}
        shifted = {"shift": self.shift} if self.shift else {}
        return {"count": self.count, "ignore_index": self.ignore_index, **several, **shifted}


@dataclass(frozen=True)
class LabelSequences:
    """The allowed values of a target with a sequence of labels per sample, [N, S], as CTC takes it.

    Attributes:
        lengths: name of the target with the number of labels of each sample, [N], e.g. "target_lengths". Numbers after
            these labels are padding.
        blank: class that is not a label, e.g. 0.
        count: number of classes with the blank, e.g. 11; None if it is symbolic.
    """

    lengths: str
    blank: int
    count: int | None


@dataclass(frozen=True)
class TargetSpec:
    """The target of a loss.

    Attributes:
        name: suggested name of the graph input, e.g. "labels".
        dtype: element type of the input, e.g. INT64.
        shape: dimensions of the input, e.g. ("batch", 10); symbolic dimensions have the same names as in the scores.
        class_labels: allowed labels; None for a target without class labels.
        groups: if each sample consists of several rows of the scores, e.g. the texts of a pair, their number, or the
            name of a symbolic size; None for one row per sample.
        sequences: allowed labels of a target with a sequence of labels per sample; else None.
    """

    name: str
    dtype: ir.DataType
    shape: tuple[int | str | None, ...]
    class_labels: ClassLabels | None = None
    groups: int | str | None = None
    sequences: LabelSequences | None = None

    def as_input(self) -> ir.Value:
        """Returns a new value with this name, dtype and shape, marked as a target by :data:`TARGET_KEY`."""
        value = ir.Value(name=self.name, shape=ir.Shape(self.shape), type=ir.TensorType(self.dtype))
        value.metadata_props[TARGET_KEY] = self.described
        return value

    @property
    def described(self) -> str:
        """This specification as JSON, for the metadata of the graph input."""
        labels = {"class_labels": self.class_labels.described()} if self.class_labels else {}
        sequences = {"sequences": asdict(self.sequences)} if self.sequences else {}
        return json.dumps(labels | ({} if self.groups is None else {GROUPS: self.groups}) | sequences)


@dataclass(frozen=True, kw_only=True)
class Loss(ABC):
    """A loss function of scores (the model's output) and a target.

    Attributes:
        reduction: "mean" or "sum" for a scalar of shape [], "none" for one value per position.
        activation: function that converts the scores to probabilities, e.g. "softmax" along the class axis, or
            "softmax_last" along the last axis; None if the scores do not represent probabilities, as in regression.
        label_metrics: names of the metrics that `Trainer` records for class labels, e.g. ("accuracy",).
        default_metrics: names of the metrics that `Trainer` records for targets without class labels, e.g. ("mae",).
        reductions: the values of `reduction` that the loss has.
    """

    reduction: Reduction = "mean"
    activation: ClassVar[Activation | None] = None
    label_metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    default_metrics: ClassVar[tuple[str, ...]] = ()
    reductions: ClassVar[tuple[str, ...]] = ("mean", "sum", "none")

    def __post_init__(self) -> None:
        # Subclasses call this method before their own checks, whose messages then show the converted number.
        integers_to_floats(self)
        allowed = [repr(name) for name in self.reductions]
        require(self, "reduction", lambda value: value in self.reductions, enumerated(allowed))

    @abstractmethod
    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        """Returns the targets that this loss needs for these scores.

        Raises:
            GraphBuildError: the dtype or rank of the scores is unknown or not supported by the loss.
        """

    @abstractmethod
    def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        """Appends the loss to a graph.

        Args:
            op: emitter of the graph of `scores` and `target`.
            scores: output of the model, floating point.
            target: target, with the dtype and shape returned by :meth:`targets`.

        Returns:
            The loss, in the dtype of the scores; a scalar, shape [], unless the reduction is "none".

        Raises:
            GraphBuildError: dtypes or static shapes of scores, target and weights do not match.
        """

    def build_weighted(self, op: Emitter, scores: ir.Value, target: ir.Value, weight: ir.Value) -> ir.Value:
        """Appends the loss with one weight per sample to a graph.

        A sample with weight 0 has no effect; a sample with weight 2 counts as two equal samples. The loss is
        sum(w[i]·l[i]) over the samples i, where l[i] is the sum of the sample's terms. For the reduction "mean", it is
        divided by sum(w[i]·c[i]), where c[i] is the sum of the class weights of the sample's terms: 1 for a term
        without a class weight, 0 for an ignored label. This agrees with PyTorch's mean for a loss with class weights,
        and with Keras' `mean_with_sample_weight`.

        Args:
            op: emitter of the graph of the three values.
            scores: as for :meth:`build`.
            target: as for :meth:`build`.
            weight: non-negative, shape [N], in the scores' dtype (float32 for float16 and bfloat16 scores).

        Returns:
            The loss, in the dtype of the scores, of shape [].

        Raises:
            GraphBuildError: as for :meth:`build`, or the reduction is "none".
        """
        if self.reduction == "none":
            raise self._error("sample weights need the reduction 'mean' or 'sum'")
        wide = widen(op, scores)
        target = widen(op, target)
        # For widened scores, `build` returns float32 terms, which are weighted and summed before rounding.
        terms = replace(self, reduction="none").build(op, wide, target)
        counts = self._counts(op, wide, target) if self.reduction == "mean" else None
        # Every sample has the same number of terms, so a mean per sample avoids counting them.
        share = self.reduction == "mean" and counts is None
        loss = _weighted_sum(op, _per_sample(op, terms, mean=share), weight)
        if self.reduction == "mean":
            total = (
                op.ReduceSum(weight, keepdims=0)
                if counts is None
                else _weighted_sum(op, _per_sample(op, counts, mean=False), weight)
            )
            loss = op.Div(loss, total)
        loss.shape = ir.Shape(())
        return narrow(op, loss, scores)

    def _counts(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value | None:
        """Returns the weight of each loss term in the mean, as a tensor with the shape of the terms.

        Returns None if all weights are 1.
        """
        return None

    def mean_over(self, labels: str | None) -> dict[str, Any] | None:
        """Describes what the loss is averaged over, for the manifest.

        A program that runs the artifacts needs this to compute the mean loss of several batches.

        Args:
            labels: name of the graph input with the target; None if the model computes the target.

        Returns:
            {} for a mean over samples; None for the reductions "sum" and "none". For a mean over non-ignored labels:
            {"labels": "labels", "ignore_index": -100, "weight": None} with the name of the graph input, and the class
            weights or None. An entry "shift": 1 excludes the first label of each sequence, as in next-token prediction.
        """
        return {} if self.reduction == "mean" else None

    def _error(self, problem: str) -> GraphBuildError:
        """Returns the error for scores, targets or settings that this loss does not support."""
        return GraphBuildError(f"building {type(self).__name__}: {problem}")

    def _scores_dims(self, scores: ir.Value) -> tuple[int | str | None, ...]:
        """Returns the dimensions of the scores.

        Raises:
            GraphBuildError: the dtype of the scores is unknown or not floating point, or their rank is unknown.
        """
        if scores.dtype is None:
            raise self._error(f"the dtype of scores {scores.name!r} is unknown.{why_untyped(scores)}")
        if not scores.dtype.is_floating_point():
            raise self._error(f"scores {scores.name!r} are {scores.dtype}; choose a floating-point output")
        if scores.shape is None:
            raise self._error(
                f"the rank of scores {scores.name!r} is unknown; run shape inference or set their shape."
                f"{why_untyped(scores)}"
            )
        return tuple(dim if isinstance(dim, int) else dim.value for dim in scores.shape)

    def _check_target(self, spec: TargetSpec, target: ir.Value) -> None:
        """Raises GraphBuildError if the target's dtype is not supported, or its static sizes do not match `spec`."""
        # ONNX's losses accept int32 labels as well as the int64 of new inputs.
        allowed = _LABEL_DTYPES if spec.class_labels else (spec.dtype,)
        if target.dtype not in allowed:
            wanted = " or ".join(str(dtype) for dtype in allowed)
            raise self._error(f"target {target.name!r} is {target.dtype}, not {wanted}; convert the target")
        dims = static_dims(target)
        # Only static sizes are compared: if a symbolic size differs at run time, ONNX Runtime's kernels raise an error.
        if dims is not None and (
            len(dims) != len(spec.shape)
            or any(
                isinstance(size, int) and dim not in (None, size)
                for dim, size in zip(dims, spec.shape, strict=True)
            )
        ):
            raise self._error(
                f"target {target.name!r} has shape {target.shape}, but these scores need "
                f"{ir.Shape(spec.shape)}; {self._shape_advice(spec)}"
            )

    def _shape_advice(self, spec: TargetSpec) -> str:
        """Returns a hint for the error about a target whose shape does not match `spec`."""
        return "reshape the target or the scores"


def reduce(op: Emitter, terms: ir.Value, reduction: Reduction) -> ir.Value:
    """Returns the mean or the sum of the terms, shape []; for "none", the terms themselves."""
    if reduction == "none":
        return terms
    # ONNX's reductions without `axes` reduce all axes.
    loss: ir.Value = (
        op.ReduceMean(terms, keepdims=0) if reduction == "mean" else op.ReduceSum(terms, keepdims=0)
    )
    # The emitter infers dtypes but not shapes; otherwise, shape inference of the whole model would be needed to find
    # that this is a scalar.
    loss.shape = ir.Shape(())
    return loss


def _per_sample(op: Emitter, terms: ir.Value, *, mean: bool) -> ir.Value:
    """Returns the sum or the mean of each sample's terms, shape [N]."""
    axes = list(range(1, len(static_dims(terms) or (None,))))
    if not axes:
        return terms
    each: ir.Value = op.ReduceMean(terms, axes, keepdims=0) if mean else op.ReduceSum(terms, axes, keepdims=0)
    return each


def _weighted_sum(op: Emitter, terms: ir.Value, weight: ir.Value) -> ir.Value:
    """Returns the sum of terms times weights, shape []."""
    total: ir.Value = op.ReduceSum(op.Mul(terms, weight), keepdims=0)
    total.shape = ir.Shape(())
    return total


def widen(op: Emitter, value: ir.Value) -> ir.Value:
    """Casts float16 and bfloat16 to float32; returns other values unchanged."""
    if value.dtype not in _HALF:
        return value
    wide: ir.Value = op.Cast(value, to=ir.DataType.FLOAT)
    wide.shape = value.shape
    return wide


def narrow(op: Emitter, loss: ir.Value, scores: ir.Value) -> ir.Value:
    """Casts a loss to the dtype of the scores, after a computation in float32 (see :func:`widen`)."""
    if loss.dtype == scores.dtype:
        return loss
    narrow: ir.Value = op.Cast(loss, to=scores.dtype)
    narrow.shape = loss.shape
    return narrow


def numbers(loss: Loss, field: str, value: npt.ArrayLike) -> np.ndarray:
    """Converts a setting to a float64 array of finite numbers; `field` names the setting in errors."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise GraphBuildError(
            f"making {type(loss).__name__}: {field} is {value!r}; give an array of numbers"
        ) from error
    # A NaN weight would only become apparent as a NaN loss in training.
    if not np.isfinite(array).all():
        raise GraphBuildError(
            f"making {type(loss).__name__}: {field} holds NaN or infinity; give finite numbers"
        )
    return array
