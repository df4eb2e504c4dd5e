"""Defines the losses with one class per position: cross-entropy and negative log-likelihood."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy.typing as npt
import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain._words import argument, words
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.errors import GraphBuildError

from ._base import Activation, ClassLabels, Loss, TargetSpec, narrow, numbers, reduce, widen


# Without `eq`, because a weight may be an array, whose comparison returns an array.
@dataclass(frozen=True, kw_only=True, eq=False)
class ClassLoss(Loss):
    """A loss with one class label per position.

    Scores are [N, C, d1, ...], or [N, d1, ..., C] with `axis=-1`; labels are [N, d1, ...], in 0 .. C-1 or
    `ignore_index`. The mean is the sum of the terms divided by the total weight of the non-ignored labels. As in
    PyTorch, it is NaN, with zero gradients, if all labels of a batch are ignored.

    Attributes:
        weight: one weight per class, float [C], e.g. [1.0, 5.0]; None for weights of 1.
        ignore_index: label of ignored positions, e.g. -100; None if no label is ignored.
        axis: class axis of the scores, e.g. -1 for [batch, sequence, vocabulary] of a language model. None means 1, as
            in ONNX and PyTorch, and raises GraphBuildError if the shape is ambiguous.
    """

    weight: npt.ArrayLike | None = None
    ignore_index: int | None = -100
    axis: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight is not None:
            shape = list(numbers(self, "weight", self.weight).shape)
            if len(shape) != 1:
                raise GraphBuildError(
                    f"making {type(self).__name__}: weight has shape {shape}; "
                    "give one weight per class, shape [C]"
                )
        if self.axis is not None:
            # By type, because True is an int for isinstance: axis=True would silently mean axis 1.
            require(
                self,
                "axis",
                lambda axis: type(axis) is int and axis != 0,
                "an int other than 0, which is the batch axis",
            )

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        dims = self._scores_dims(scores)
        if len(dims) < 2:
            raise self._error(
                f"scores {scores.name!r} have shape {scores.shape}; class labels need [N, C, d1, ...], "
                "batch first and classes second"
            )
        axis = self._class_axis(scores, dims)
        weights = None if self.weight is None else numbers(self, "weight", self.weight).size
        classes = dims[axis]
        # The number of class weights limits the labels if the number of classes is symbolic.
        count = classes if isinstance(classes, int) else weights
        labels = ClassLabels(count, self.ignore_index, axis, dims if len(dims) > 2 else None)
        return [TargetSpec("labels", ir.DataType.INT64, (*dims[:axis], *dims[axis + 1 :]), labels)]

    def _class_axis(self, scores: ir.Value, dims: tuple[int | str | None, ...]) -> int:
        """Returns the non-negative index of the class axis.

        Raises:
            GraphBuildError: the scores have no such axis, or `axis` is None and the shape is ambiguous.
        """
        rank = len(dims)
        if self.axis is not None:
            if not -rank <= self.axis < rank or self.axis % rank == 0:
                raise self._error(
                    f"axis={self.axis} is not a class axis of the scores {scores.name!r} of shape "
                    f"{scores.shape}; choose from 1 to {rank - 1}, or -1 for the last"
                )
            return self.axis % rank
        is_static, last_is_static = isinstance(dims[1], int), isinstance(dims[-1], int)
        # If scores [batch, sequence, classes] are interpreted as [batch, classes, sequence], and sequence and classes
        # have the same size, training raises no error. So axis 1 is only assumed if this is ruled out. Images [N, C, H,
        # W] of unknown size always have their classes there in PyTorch, and a mistake raises an error for the first
        # batch.
        if rank == 2 or (
            dims[1] != dims[2] if is_static and rank == 3 else is_static or not (rank == 3 or last_is_static)
        ):
            product = _last_axis_product(scores) if rank > 2 else None
            if product is None:
                return 1
            raise self._error(
                f"the scores {scores.name!r} have shape {scores.shape}. Classes are taken from axis 1, as "
                f"in ONNX and PyTorch, but {product} computes the scores with a linear layer along the "
                f"last axis, like the head of a language model. Pass {argument('loss', 'causal_lm')} if "
                f"they predict the next token. {_other_axis(type(self).__name__, dims, 1)} If axis 1 is "
                f"the class axis, pass {words().loss_setting(type(self).__name__, 'axis', 1)}"
            )
        why = (
            f"which has the same size as the last axis ({dims[1]})"
            if is_static
            else f"whose size is unknown ({dims[1] or 'unnamed'})"
        )
        raise self._error(
            f"the scores {scores.name!r} have shape {scores.shape}. Classes are taken from axis 1, as in "
            f"ONNX and PyTorch, {why}. {_other_axis(type(self).__name__, dims, 1)} If axis 1 is the class "
            f"axis, pass {words().loss_setting(type(self).__name__, 'axis', 1)}"
        )

    def _shape_advice(self, spec: TargetSpec) -> str:
        labels = spec.class_labels
        if labels is None or labels.scores is None:
            return super()._shape_advice(spec)
        return (
            f"classes are taken from axis {labels.axis} of the scores. "
            f"{_other_axis(type(self).__name__, labels.scores, labels.axis)}"
        )

    def _classes_second(self, op: Emitter, value: ir.Value, axis: int) -> ir.Value:
        """Transposes a value so that its class axis becomes axis 1, after the batch axis."""
        assert value.shape is not None
        order = [0, axis, *(k for k in range(1, value.shape.rank()) if k != axis)]
        moved: ir.Value = op.Transpose(value, perm=order)
        moved.shape = ir.Shape([value.shape[k] for k in order])
        return moved

    def _with_classes_second(
        self, op: Emitter, scores: ir.Value, target: ir.Value
    ) -> tuple[Self, ir.Value, ir.Value]:
        """Transposes the scores, and a target of class probabilities, so that classes are on axis 1, as ONNX requires.

        Returns:
            A copy of this loss with `axis=1`, the scores and the target. All three are unchanged if the class axis is
            already 1.
        """
        spec = self.targets(scores)[0]
        # Before the transposition, because the message contains the axis that the user chose.
        self._check_target(spec, target)
        axis = self._class_axis(scores, self._scores_dims(scores))
        if axis == 1:
            return self, scores, target
        # Labels have no class axis to move.
        moved = target if spec.class_labels else self._classes_second(op, target, axis)
        # `axis` is set, because after the transposition the sizes may be ambiguous.
        return replace(self, axis=1), self._classes_second(op, scores, axis), moved

    def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        loss, scores, target = self._with_classes_second(op, scores, target)
        return loss._build(op, scores, target)

    def build_weighted(self, op: Emitter, scores: ir.Value, target: ir.Value, weight: ir.Value) -> ir.Value:
        # Here as well as in `build`, because the counts of the mean are gathered along axis 1, too.
        loss, scores, target = self._with_classes_second(op, scores, target)
        return super(ClassLoss, loss).build_weighted(op, scores, target, weight)

    @abstractmethod
    def _build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        """Appends the loss, for scores with class axis 1."""

    def mean_over(self, labels: str | None) -> dict[str, Any] | None:
        mean = super().mean_over(labels)
        if mean is None or labels is None:
            return mean
        weight = None if self.weight is None else numbers(self, "weight", self.weight).tolist()
        return {"labels": labels, "ignore_index": self.ignore_index, "weight": weight}

    def _ignored(self, op: Emitter, labels: ir.Value) -> ir.Value | None:
        """Returns a Boolean mask of the ignored labels, or None if the loss has no `ignore_index`."""
        if self.ignore_index is None:
            return None
        ignored: ir.Value = op.Equal(labels, op.const(self.ignore_index, labels.dtype))
        return ignored

    def _counts(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value | None:
        """Returns the class weight of each label, with 0 for ignored labels.

        Returns None if the loss has neither class weights nor an `ignore_index`.
        """
        weight, ignored = self._class_weights(op, scores, scores), self._ignored(op, target)
        counts: ir.Value | None = None
        if weight is None:
            counts = None if ignored is None else op.Cast(op.Not(ignored), to=scores.dtype)
        elif ignored is None:
            counts = op.Gather(weight, target)
        else:
            # An ignored label such as -100 is out of range for Gather, whose kernel raises an error.
            safe = op.Where(ignored, op.const(0, target.dtype), target)
            counts = op.Where(ignored, 0.0, op.Gather(weight, safe))
        if counts is not None:
            counts.shape = target.shape
        return counts

    def _class_weights(self, op: Emitter, scores: ir.Value, like: ir.Value) -> ir.Value | None:
        """Returns the class weights as a constant with the dtype of `like`, or None if the loss has no class weights.

        Raises:
            GraphBuildError: the number of weights differs from the number of classes.
        """
        if self.weight is None:
            return None
        array = numbers(self, "weight", self.weight)
        classes = (static_dims(scores) or (None, None))[1]
        # For a symbolic number of classes, the kernels compare it at the first batch.
        if classes is not None and classes != array.size:
            raise self._error(
                f"weight has {array.size} entries, and scores {scores.name!r} of shape {scores.shape} have "
                f"{classes} classes (dimension 1); give one weight per class"
            )
        return op.const(array, like=like)


@dataclass(frozen=True, kw_only=True, eq=False)
class NLLLoss(ClassLoss):
    """Negative log-likelihood: -weight[label]·scores[label], for scores that are log-probabilities.

    Attributes:
        activation: "exp", which converts log-probabilities to probabilities.
    """

    activation: ClassVar[Activation | None] = "exp"

    def _build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        spec = self.targets(scores)[0]
        wide = widen(op, scores)
        weight = self._class_weights(op, scores, wide)
        loss: ir.Value = op.NegativeLogLikelihoodLoss(
            wide, target, weight, ignore_index=self.ignore_index, reduction=self.reduction
        )
        loss.shape = ir.Shape(spec.shape if self.reduction == "none" else ())
        return narrow(op, loss, scores)


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossEntropyLoss(ClassLoss):
    """Cross-entropy of softmax(scores) along the class axis: -log softmax(scores)[label].

    With `probabilities`, the target is not a label but one probability per class, in the shape and dtype of the scores,
    and the loss is -sum(weight·target·log softmax(scores)) over the classes. As in PyTorch, the mean then divides
    the sum by the number of positions, not by the total class weight as for labels.

    Attributes:
        activation: "softmax", along the class axis.
        default_metrics: "probability_accuracy", which `Trainer` records if `probabilities` is True.
        label_smoothing: fraction of the target that is distributed evenly over all classes, e.g. 0.1 (Szegedy et al.,
            2016, section 7).
        probabilities: True for targets that are class probabilities instead of labels.
    """

    activation: ClassVar[Activation | None] = "softmax"
    default_metrics: ClassVar[tuple[str, ...]] = ("probability_accuracy",)
    label_smoothing: float = 0.0
    probabilities: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "label_smoothing", lambda value: 0 <= value <= 1, "between 0 and 1")
        if self.probabilities:
            # The default -100 is accepted, because it cannot be distinguished from an omitted argument.
            require(
                self,
                "ignore_index",
                lambda index: index is None or index < 0,
                "left out with probabilities=True, which has no labels to ignore",
            )

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        labels = super().targets(scores)
        if not self.probabilities:
            return labels
        assert scores.dtype is not None
        return [TargetSpec("target", scores.dtype, self._scores_dims(scores))]

    def mean_over(self, labels: str | None) -> dict[str, Any] | None:
        return super().mean_over(None if self.probabilities else labels)

    def _build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        wide = widen(op, scores)
        weight = self._class_weights(op, scores, wide)
        positions = ir.Shape(ClassLoss.targets(self, scores)[0].shape)
        if self.probabilities:
            terms = self._probability_terms(op, wide, widen(op, target), weight)
            terms.shape = positions
            loss = reduce(op, terms, self.reduction)
        elif self.label_smoothing:
            # ONNX's SoftmaxCrossEntropyLoss has no label smoothing.
            loss = self._smoothed(op, wide, target, weight, positions)
        else:
            # A single op instead of LogSoftmax and a sum, because its gradient, softmax minus one-hot labels, is one
            # kernel.
            loss = op.SoftmaxCrossEntropyLoss(
                wide, target, weight, ignore_index=self.ignore_index, reduction=self.reduction
            )
            loss.shape = positions if self.reduction == "none" else ir.Shape(())
        return narrow(op, loss, scores)

    def _probability_terms(
        self, op: Emitter, scores: ir.Value, target: ir.Value, weight: ir.Value | None
    ) -> ir.Value:
        """Emits -sum_c weight[c]·target[c]·log p[c], after label smoothing of the target probabilities."""
        if self.label_smoothing:
            target = op.Add(op.Mul(target, 1 - self.label_smoothing), self._smoothing_share(op, scores))
        return _class_sum(op, op.Mul(op.LogSoftmax(scores, axis=1), target), weight, like=scores)

    def _smoothed(
        self, op: Emitter, scores: ir.Value, labels: ir.Value, weight: ir.Value | None, positions: ir.Shape
    ) -> ir.Value:
        """Emits the loss with label smoothing s: the reduction of these terms, one per label.

        -(1 - s)·w[label]·log p[label] - (s/C)·sum_c w[c]·log p[c]

        `positions` is the shape of the labels.
        """
        log_p: ir.Value = op.LogSoftmax(scores, axis=1)
        of_label = op.NegativeLogLikelihoodLoss(
            log_p, labels, weight, ignore_index=self.ignore_index, reduction="none"
        )
        spread = op.Mul(_class_sum(op, log_p, weight, like=scores), self._smoothing_share(op, scores))
        terms: ir.Value = op.Add(op.Mul(of_label, 1 - self.label_smoothing), spread)
        ignored = self._ignored(op, labels)
        # NegativeLogLikelihoodLoss is 0 at an ignored position, unlike the part that is distributed over all classes.
        if ignored is not None:
            terms = op.Where(ignored, 0.0, terms)
        terms.shape = positions
        # PyTorch divides both parts by the sum of the labels' weights, although the second part contains the weights of
        # all classes.
        if self.reduction != "mean" or (ignored is None and weight is None):
            return reduce(op, terms, self.reduction)
        total = op.ReduceSum(terms, keepdims=0)
        counts = self._counts(op, scores, labels)
        loss: ir.Value = op.Div(total, op.ReduceSum(counts, keepdims=0))
        loss.shape = ir.Shape(())
        return loss

    def _counts(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value | None:
        # PyTorch's mean over probabilities divides by the number of positions, regardless of class weights.
        return None if self.probabilities else super()._counts(op, scores, target)

    def _smoothing_share(self, op: Emitter, scores: ir.Value) -> ir.Value:
        """Returns label_smoothing / C as a tensor with one element."""
        classes = (static_dims(scores) or (None, None))[1]
        if classes is not None:
            # Without classes there are no terms: any finite value will do, whereas 1/0 would be an error.
            return op.const(self.label_smoothing / max(classes, 1), like=scores)
        return op.Div(self.label_smoothing, op.Cast(op.dim(scores, 1), to=scores.dtype))


def _other_axis(loss: str, scores: tuple[int | str | None, ...], axis: int) -> str:
    """Returns a hint, for error messages, to set the loss's `axis` to the last axis, or to 1 if `axis` is the last."""
    last = axis != len(scores) - 1
    labels = ir.Shape(scores[:-1] if last else (scores[0], *scores[2:]))
    where = "the last axis, as the vocabulary of a language model" if last else "axis 1"
    setting = words().loss_setting(loss, "axis", -1 if last else 1)
    return f"If they lie along {where}, pass {setting}, with labels of shape {labels}."


# Ops between a linear layer and the scores that do not move axes.
_KEEPING_AXES = frozenset(
    {"Add", "Cast", "Clip", "DequantizeLinear", "Div", "Identity", "Mul", "QuantizeLinear", "Sub", "Tanh"}
)
_OF_WEIGHTS = frozenset({"Cast", "DequantizeLinear", "Identity", "Transpose"})


def _last_axis_product(scores: ir.Value) -> str | None:
    """Describes the linear layer that computes the scores along their last axis, e.g. "MatMul 'lm_head'".

    A bias, a scale or a soft cap may follow the layer. Returns None if no such layer computes the scores.
    """
    node = scores.producer()
    while node is not None and node.op_type in _KEEPING_AXES:
        computed = [value for value in node.inputs if value is not None and value.producer() is not None]
        node = computed[0].producer() if len(computed) == 1 else None
    if node is None:
        return None
    # Products with a weight matrix; MatMulNBits always has one.
    by_weights = node.op_type == "MatMulNBits" or (
        node.op_type in ("MatMul", "FusedMatMul") and _is_weight_matrix(node.inputs[1])
    )
    return f"{node.op_type} {node.name or node.outputs[0].name!r}" if by_weights else None


def _is_weight_matrix(value: ir.Value | None) -> bool:
    """True if a value is an initializer of rank 2, possibly transposed, cast or dequantized."""
    while value is not None and (node := value.producer()) is not None and node.op_type in _OF_WEIGHTS:
        value = node.inputs[0]
    return (
        value is not None and value.is_initializer() and value.shape is not None and value.shape.rank() == 2
    )


def _class_sum(op: Emitter, terms: ir.Value, weight: ir.Value | None, *, like: ir.Value) -> ir.Value:
    """Returns -sum_c weight[c]·terms[:, c, ...], for terms with the shape of `like`."""
    if weight is not None:
        # [C] would broadcast along the last axis; [1, C, 1, ...] broadcasts along the class axis.
        rank = len(static_dims(like) or ())
        terms = op.Mul(terms, op.Reshape(weight, [1, -1] + [1] * (rank - 2)))
    return op.Neg(op.ReduceSum(terms, [1], keepdims=0))
