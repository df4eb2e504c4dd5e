"""Lowers the CTC loss (connectionist temporal classification)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ortmodule.lowering._table import Lowering, lower
from onnxtrain.ortmodule.lowering.aten.shape import arange

INT64 = ir.DataType.INT64

_LOG_ZERO = -1e30
"""Log-probability of an impossible state. It is finite, because the difference of two infinities is NaN."""


@lower("aten._ctc_loss.default", "aten._ctc_loss.Tensor")
def ctc_loss(
    low: Lowering,
    log_probs: ir.Value,
    targets: ir.Value,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[ir.Value, None]:
    """Lowers ctc_loss by unrolling the forward algorithm (Graves et al., ICML 2006, equations 6 and 7).

    As in PyTorch, the gradient is correct only if `log_probs` is the output of log_softmax.

    log_probs: [time, batch, classes]. The number of time steps is specialized.
    """
    if low.uses_result(1):
        raise low.unsupported("uses of the second result, the forward variables")
    op = low.op
    time = low.fake(0).shape[0]
    # The loop over time steps is unrolled, so their number is specialized.
    time = int(time)
    if low.fake(0).dim() != 3:
        raise low.unsupported("an input without a batch axis")
    input_lengths, target_lengths = (_lengths(low, lengths) for lengths in (input_lengths, target_lengths))
    targets = low.tensor(targets, INT64)
    fits = op.And(op.GreaterOrEqual(input_lengths, 0), op.LessOrEqual(input_lengths, time))
    low.check(fits, f"Expected input_lengths to have value between 0 and {time}")
    low.check(op.GreaterOrEqual(target_lengths, 0), "Expected target_lengths to have value at least 0")
    if low.fake(1).dim() == 1:
        fits = op.Equal(op.ReduceSum(target_lengths, keepdims=1), op.Shape(targets))
    else:
        fits = op.LessOrEqual(target_lengths, op.Shape(targets, start=1))
    low.check(fits, "Expected targets to have as many labels as target_lengths says")
    if low.fake(1).dim() == 1:
        targets = _pad_targets(low, targets, target_lengths)
    classes = op.dim(log_probs, 2)
    # Padding after a target may be out of range; it has no effect on the loss.
    targets = op.Min(op.Max(targets, op.const(0)), op.Sub(classes, [1]))
    scores = op.Transpose(
        op.Max(log_probs, op.const(_LOG_ZERO, low.dtype)), perm=[1, 0, 2]
    )  # [batch, time, classes]
    labels = _with_blanks(low, targets, blank)  # [batch, 2 S + 1]
    positions = op.Expand(op.Unsqueeze(labels, [1]), op.Concat([1, time, 1], axis=0))
    emitted = (
        op.Split(op.GatherElements(scores, positions, axis=2), axis=1, num_outputs=time, _outputs=time)
        if time > 1
        else [op.GatherElements(scores, positions, axis=2)]
    )
    state = _final_state(
        low, [op.Squeeze(step, [1]) for step in emitted], labels, input_lengths, target_lengths, blank
    )
    loss = op.Neg(_logsumexp(low, [_final(low, state, target_lengths, offset) for offset in (0, 1)]))
    # If no path yields the target, the loss is near -_LOG_ZERO, and PyTorch returns infinity.
    loss = op.Where(op.Greater(loss, op.const(-_LOG_ZERO / 10, low.dtype)), op.const(np.inf, low.dtype), loss)
    # PyTorch's gradient of the loss is exp(log_probs) minus the posterior. Differentiating the forward algorithm gives
    # minus the posterior. The terms p - stop_gradient(p) with p = exp(log_probs) are zero and have the gradient p.
    probs = op.Exp(scores)
    within_input = op.Less(op.Unsqueeze(op.const(np.arange(time)), [1]), op.Unsqueeze(input_lengths, [1, 2]))
    probs = op.Where(within_input, probs, op.const(0.0, low.dtype))
    zeros = op.ReduceSum(op.Sub(probs, low.op.stop_gradient(probs)), [1, 2], keepdims=0)
    return op.Add(loss, zeros), None


def _lengths(low: Lowering, lengths: Any) -> ir.Value:
    """Converts `lengths`, a tensor or a list of numbers, to int64 [batch]."""
    return low.tensor(lengths, INT64) if isinstance(lengths, ir.Value) else low.ints(list(lengths))


def _pad_targets(low: Lowering, concatenated: ir.Value, lengths: ir.Value) -> ir.Value:
    """Splits concatenated targets into rows, [batch, sum of lengths], padded with arbitrary labels."""
    op = low.op
    starts = op.Sub(op.CumSum(lengths, op.const(0)), lengths)
    count = op.Shape(concatenated)
    positions = op.Add(op.Unsqueeze(starts, [1]), arange(low, count))
    return op.Gather(concatenated, op.Min(positions, op.Sub(count, [1])))


def _with_blanks(low: Lowering, targets: ir.Value, blank: int) -> ir.Value:
    """Returns the targets, [batch, S], with a blank before each label and at the end: [batch, 2 S + 1]."""
    op = low.op
    column = op.Unsqueeze(targets, [2])
    blanks = op.Expand(op.const(blank), op.Shape(column))
    pairs = op.Reshape(op.Concat(blanks, column, axis=2), op.Mul(op.Shape(targets), [1, 2]))
    last = op.Expand(op.const(blank), op.Concat(op.Shape(targets, start=0, end=1), [1], axis=0))
    return op.Concat(pairs, last, axis=1)


def _logsumexp(low: Lowering, terms: list[ir.Value]) -> ir.Value:
    """Returns the elementwise log(sum(exp(terms))) of finite terms, computed in a numerically stable way."""
    op = low.op
    largest = low.op.stop_gradient(op.Max(*terms))
    total = op.Sum(*(op.Exp(op.Sub(term, largest)) for term in terms))
    return op.Add(op.Log(total), largest)


def _final_state(
    low: Lowering,
    emitted: list[ir.Value],
    labels: ir.Value,
    input_lengths: ir.Value,
    target_lengths: ir.Value,
    blank: int,
) -> ir.Value:
    """Returns the forward variables after the last time step of each sample.

    Args:
        low: the lowering.
        emitted: for each time step, the log-probabilities of `labels`, [batch, 2 S + 1].
        labels: the targets, padded to length S, with a blank before each label and at the end: [batch, 2 S + 1].
        input_lengths: number of time steps of each sample, [batch].
        target_lengths: number of labels of each target, [batch].
        blank: the blank label, e.g. 0.

    Returns:
        Log-probabilities [batch, 2 S + 1]: element s sums over all paths that end at position s of `labels`.
    """
    op = low.op
    impossible = op.const(_LOG_ZERO, low.dtype)
    column = op.Expand(impossible, op.Concat(op.Shape(labels, start=0, end=1), [1], axis=0))
    position = arange(low, op.dim(labels, 1))
    two_before = op.Concat(
        op.Mul(op.Slice(labels, [0], [2], [1]), [-1]), op.Slice(labels, [0], [-2], [1]), axis=1
    )
    # A path may skip the blank between two different labels.
    jump = op.And(op.Not(op.Equal(labels, op.const(blank))), op.Not(op.Equal(labels, two_before)))
    jump = op.And(jump, op.Greater(position, op.const(1)))
    can_start = op.LessOrEqual(position, op.Unsqueeze(op.Min(target_lengths, [1]), [1]))
    state = op.Where(can_start, emitted[0], impossible)
    for step, scores in enumerate(emitted[1:], 1):
        from_previous = op.Concat(column, op.Slice(state, [0], [-1], [1]), axis=1)
        from_second = op.Concat(column, op.Slice(from_previous, [0], [-1], [1]), axis=1)
        terms = [state, from_previous, op.Where(jump, from_second, impossible)]
        after = op.Add(_logsumexp(low, terms), scores)
        # The state of a sample is final at the end of its input.
        running = op.Unsqueeze(op.Greater(input_lengths, op.const(step)), [1])
        state = op.Where(running, after, state)
    return state


def _final(low: Lowering, state: ir.Value, target_lengths: ir.Value, offset: int) -> ir.Value:
    """Returns the forward variable of the last blank (`offset=0`) or the last label (`offset=1`) of each target."""
    op = low.op
    position = op.Sub(op.Mul(target_lengths, [2]), [offset])
    column = op.GatherElements(state, op.Unsqueeze(op.Max(position, [0]), [1]), axis=1)
    result = op.Squeeze(column, [1])
    # An empty target has no last label.
    return op.Where(op.Less(position, op.const(0)), op.const(_LOG_ZERO, low.dtype), result)
