"""Defines the connectionist temporal classification loss (Graves et al., 2006)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter

from ._base import Activation, LabelSequences, TargetSpec
from ._joint import JointLoss

# Logarithm of 0. Infinity would make NaN of differences of two such values.
_ZERO = -1e30
_IMPOSSIBLE = 1e29


@dataclass(frozen=True, kw_only=True)
class CTCLoss(JointLoss):
    """Negative logarithm of the probability of a label sequence, summed over all its alignments with the input.

    The scores are logits or log-probabilities [N, T, C] of the classes at each of T positions; one class is the blank
    between labels. The loss applies a log-softmax, which does not change log-probabilities. The targets are

    - `labels` [N, S], int64: the labels of each sample, without blanks, then any other numbers up to the size S of the
      array;
    - `input_lengths` [N], int64: how many of the T positions count, at most T;
    - `target_lengths` [N], int64: how many labels each sample has, at most S; 0 for none.

    Values and gradients are PyTorch's for the log-softmax of the scores. The reduction "mean" divides the loss of each
    sample by the number of its labels (at least 1) first. Lengths and labels out of range make the loss NaN. `Trainer`
    checks the labels before it trains.

    Attributes:
        activation: "softmax_last", as the classes are along the last axis.
        label_metrics: none.
        blank: index of the blank class, e.g. 0.
        zero_infinity: True for a loss of 0 for samples with too few positions for their labels; it is infinite
            otherwise, and training stops. Repeated labels need a blank between them, which takes a position.
        batch_first: False for scores [T, N, C], as PyTorch's loss takes them.
    """

    activation: ClassVar[Activation | None] = "softmax_last"
    label_metrics: ClassVar[tuple[str, ...]] = ()
    blank: int = 0
    zero_infinity: bool = False
    batch_first: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self, "blank", lambda blank: type(blank) is int and blank >= 0, "the index of a class, e.g. 0"
        )

    def joint_targets(self, scores: Sequence[ir.Value]) -> list[TargetSpec]:
        dims = self._scores_dims(scores[0])
        if len(dims) != 3:
            raise self._error(
                f"scores {scores[0].name!r} have shape {scores[0].shape}; this loss needs [N, T, C]: "
                "scores of C classes at T positions"
            )
        if isinstance(dims[2], int) and self.blank >= dims[2]:
            raise self._error(
                f"blank is {self.blank}, but the scores {scores[0].name!r} have the classes 0 to {dims[2] - 1}"
            )
        batch = dims[0] if self.batch_first else dims[1]
        count = dims[2] if isinstance(dims[2], int) else None
        return [
            TargetSpec(
                "labels",
                ir.DataType.INT64,
                (batch, "labels_per_sample"),
                sequences=LabelSequences("target_lengths", self.blank, count),
            ),
            TargetSpec("input_lengths", ir.DataType.INT64, (batch,)),
            TargetSpec("target_lengths", ir.DataType.INT64, (batch,)),
        ]

    def _joint_terms(self, op: Emitter, scores: Sequence[ir.Value], targets: Sequence[ir.Value]) -> ir.Value:
        labels, input_lengths, target_lengths = (op.Cast(t, to=ir.DataType.INT64) for t in targets)
        # PyTorch takes log-probabilities only. Most exported recognisers return logits, whose loss has no lower bound.
        log_p = op.LogSoftmax(scores[0], axis=2)
        log_p = log_p if self.batch_first else op.Transpose(log_p, perm=[1, 0, 2])
        log_p = op.Where(op.Greater(log_p, _ZERO), log_p, _ZERO)
        classes, count = op.dim(scores[0], 2), op.dim(labels, 1)
        columns = op.Range(0, op.Squeeze(count, [0]), 1)
        used = op.Less(columns, op.Unsqueeze(target_lengths, [1]))  # [N, S]
        known = op.And(op.GreaterOrEqual(labels, 0), op.Less(labels, classes))
        labels = op.Where(op.And(used, known), labels, self.blank)
        # blank, label, blank, label, ..., blank: [N, 2S + 1].
        blanks = op.Sub(op.Mul(labels, 0), -self.blank)
        pairs = op.Concat(op.Unsqueeze(blanks, [2]), op.Unsqueeze(labels, [2]), axis=2)
        samples = op.Shape(target_lengths)
        width = op.Mul(count, 2)
        paths = op.Reshape(pairs, op.Concat(samples, width, axis=0), allowzero=1)
        column = op.Expand(op.const([[self.blank]]), op.Concat(samples, [1], axis=0))
        paths = op.Concat(paths, column, axis=1)
        # A step may skip the blank between two different labels.
        padding = op.Expand(op.const([[self.blank]]), op.Concat(samples, [2], axis=0))
        two_before = op.Slice(op.Concat(padding, paths, axis=1), [0], op.Add(width, 1), [1])
        skips = op.And(op.Not(op.Equal(paths, self.blank)), op.Not(op.Equal(paths, two_before)))
        final = self._final_states(op, log_p, paths, skips, input_lengths)
        # The last label, and the blank after it.
        last = op.Unsqueeze(op.Mul(target_lengths, 2), [1])
        none = op.Equal(target_lengths, 0)
        in_range = op.Min(op.Max(last, 0), width)
        end = op.Squeeze(op.GatherElements(final, in_range, axis=1), [1])
        before = op.Squeeze(op.GatherElements(final, op.Max(op.Sub(in_range, 1), 0), axis=1), [1])
        before = op.Where(none, _ZERO, before)
        loss = op.Neg(_log_sum(op, end, before))
        impossible = op.Greater(loss, _IMPOSSIBLE)
        loss = op.Where(impossible, 0.0 if self.zero_infinity else math.inf, loss)
        unknown = op.ReduceSum(op.Cast(op.And(used, op.Not(known)), to=ir.DataType.INT64), [1], keepdims=0)
        positions = op.dim(scores[0], 1 if self.batch_first else 0)
        wrong = op.Or(
            op.Or(op.Less(target_lengths, 0), op.Greater(target_lengths, count)),
            op.Or(op.Less(input_lengths, 0), op.Greater(input_lengths, positions)),
        )
        terms: ir.Value = op.Where(op.Or(wrong, op.Greater(unknown, 0)), math.nan, loss)
        terms.shape = targets[1].shape
        return terms

    def _averaged(self, op: Emitter, terms: ir.Value, targets: Sequence[ir.Value]) -> ir.Value:
        counts = op.Cast(op.Max(targets[2], op.const(1, targets[2].dtype)), to=terms.dtype)
        shares: ir.Value = op.Div(terms, counts)
        shares.shape = terms.shape
        return shares

    def _final_states(
        self, op: Emitter, log_p: ir.Value, paths: ir.Value, skips: ir.Value, lengths: ir.Value
    ) -> ir.Value:
        """Returns the logarithms of the forward variables after the last position of each sample, [N, 2S + 1].

        Args:
            op: emitter.
            log_p: log-probabilities [N, T, C].
            paths: classes of the states, [N, 2S + 1].
            skips: True for states that may follow the state two before, [N, 2S + 1].
            lengths: number of positions of each sample, [N].
        """
        # At the virtual position before the first one, all paths are in state 0.
        first = op.Slice(paths, [0], [1], [1])
        rest = op.Slice(paths, [1], op.Shape(paths, start=1), [1])
        dtype = log_p.dtype
        start = op.Concat(
            op.Cast(op.Mul(first, 0), to=dtype),
            op.Add(op.Cast(op.Mul(rest, 0), to=dtype), _ZERO),
            axis=1,
        )
        # The log-probability of each state at each position, [T, N, 2S + 1].
        shape = op.Concat(op.Shape(log_p, start=0, end=2), op.Shape(paths, start=1), axis=0)
        emitted = op.Transpose(
            op.GatherElements(log_p, op.Expand(op.Unsqueeze(paths, [1]), shape), axis=2), perm=[1, 0, 2]
        )
        steps = op.Range(0, op.Squeeze(op.Shape(log_p, start=1, end=2), [0]), 1)
        body = op.subgraph({"alpha": dtype, "log_p": dtype, "step": ir.DataType.INT64})
        alpha, at_step, step = body.graph.inputs
        alpha.shape, at_step.shape, step.shape = ir.Shape([None, None]), ir.Shape([None, None]), ir.Shape([])
        column = body.Add(body.Mul(body.Slice(alpha, [0], [1], [1]), 0.0), _ZERO)
        width = body.Shape(alpha, start=1)
        one_back = body.Slice(body.Concat(column, alpha, axis=1), [0], width, [1])
        two_back = body.Slice(body.Concat(column, column, alpha, axis=1), [0], width, [1])
        arrived = _log_sum(body, alpha, one_back, body.Where(skips, two_back, _ZERO))
        counts = body.Less(step, body.Unsqueeze(lengths, [1]))
        # A path that is impossible stays so, whatever comes.
        moved = body.Max(body.Add(arrived, at_step), _ZERO)
        after = body.Where(counts, moved, alpha)
        after.shape = ir.Shape([None, None])
        body.graph.outputs.append(after)
        return op.Scan(start, emitted, steps, body=ir.AttrGraph("body", body.graph), num_scan_inputs=2)


def _log_sum(op: Emitter, first: ir.Value, *others: ir.Value) -> ir.Value:
    """Returns log(exp(first) + exp(second) + ...), elementwise."""
    largest = op.stop_gradient(op.Max(first, *others))
    powers = [op.Exp(op.Sub(value, largest)) for value in (first, *others)]
    return op.Add(op.Log(op.Sum(*powers)), largest)
