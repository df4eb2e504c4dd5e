"""Defines the loss of language models for next-token prediction."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter, static_dims

from ._base import Activation, ClassLabels, Loss, TargetSpec
from ._classes import CrossEntropyLoss

_POSITIONS = "loss_positions"
"""Symbolic size for the number of tokens in a batch, batch times sequence."""


@dataclass(frozen=True, kw_only=True)
class CausalLMLoss(Loss):
    """Next-token cross-entropy -log softmax(scores)[next token], as in transformers.

    Scores are logits [batch, sequence, vocabulary]; labels are int64 [batch, sequence], usually the input tokens. The
    logits at position t are compared with the label at t + 1, so the caller must not shift the labels. The mean is over
    all labels except the first label of each sequence and labels equal to `ignore_index`.

    Attributes:
        activation: "softmax", along the vocabulary axis.
        label_metrics: "perplexity".
        ignore_index: label of ignored tokens, e.g. -100 for padding and for the text of a prompt.
    """

    activation: ClassVar[Activation | None] = "softmax"
    label_metrics: ClassVar[tuple[str, ...]] = ("perplexity",)
    ignore_index: int = -100

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self,
            "ignore_index",
            lambda index: isinstance(index, int) and not isinstance(index, bool),
            "an integer, e.g. -100",
        )

    def targets(self, scores: ir.Value) -> list[TargetSpec]:
        dims = self._scores_dims(scores)
        if len(dims) != 3:
            raise self._error(
                f"scores {scores.name!r} have shape {scores.shape}; causal_lm needs [batch, sequence, "
                "vocabulary]. For one class per sample choose cross_entropy"
            )
        count = dims[2] if isinstance(dims[2], int) else None
        labels = ClassLabels(count, self.ignore_index, axis=2, scores=dims, shift=1)
        return [TargetSpec("labels", ir.DataType.INT64, dims[:2], labels)]

    def build(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        spec = self.targets(scores)[0]
        self._check_target(spec, target)
        # The labels are shifted, not the logits, which have 1,000 times as many elements. The logits become a matrix:
        # ONNX Runtime reshapes without a copy, and its cross-entropy reads each row contiguously.
        vocabulary = static_dims(scores)[2]  # type: ignore[index]  # `targets` checked the rank
        size = op.const([vocabulary]) if vocabulary is not None else op.Shape(scores, start=2)
        rows: ir.Value = op.Reshape(scores, op.Concat([-1], size, axis=0))
        # The same name for both sizes, so that the gradient reuses the memory of the logits: ONNX Runtime overwrites an
        # input only if both have equal sizes according to the model.
        rows.shape = ir.Shape([_POSITIONS, vocabulary])
        labels: ir.Value = op.Reshape(self._next_tokens(op, target), [-1])
        labels.shape = ir.Shape([_POSITIONS])
        cross_entropy = CrossEntropyLoss(ignore_index=self.ignore_index, reduction=self.reduction)
        loss = cross_entropy.build(op, rows, labels)
        if self.reduction == "none":
            loss = op.Reshape(loss, op.Shape(target))
            loss.shape = ir.Shape(spec.shape)
        return loss

    def _next_tokens(self, op: Emitter, labels: ir.Value) -> ir.Value:
        """Shifts labels [batch, sequence] left by one, and fills the last position with `ignore_index`."""
        rest = op.Slice(labels, [1], [sys.maxsize], [1])
        shifted: ir.Value = op.Pad(rest, [0, 0, 0, 1], op.const(self.ignore_index, labels.dtype))
        shifted.shape = labels.shape
        return shifted

    def _counts(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value | None:
        ignored = op.Equal(self._next_tokens(op, target), op.const(self.ignore_index, target.dtype))
        counts: ir.Value = op.Cast(op.Not(ignored), to=scores.dtype)
        counts.shape = target.shape
        return counts

    def mean_over(self, labels: str | None) -> dict[str, Any] | None:
        mean = super().mean_over(labels)
        if mean is None or labels is None:
            return mean
        return {"labels": labels, "ignore_index": self.ignore_index, "weight": None, "shift": 1}

    def _shape_advice(self, spec: TargetSpec) -> str:
        return "pass one label per token, usually the tokens themselves: the loss shifts them"
