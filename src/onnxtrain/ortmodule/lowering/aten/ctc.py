"""Lowers the loss of connectionist temporal classification (CTC)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.ortmodule.lowering._table import Lowering, lower
from onnxtrain.ortmodule.lowering.aten.shape import arange

INT64 = ir.DataType.INT64

_NEVER = -1e30
"""Logarithm of the probability of an impossible state.

It is finite, because the difference of two infinities is NaN.
"""


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
    """Lowers to the forward variables of each time step (Graves et al., ICML 2006, equations 6 and 7).

    The gradient is PyTorch's, which holds for a `log_probs` that log_softmax returned.

    log_probs: [time, batch, classes], with a number of time steps that is known when the graph is built.
    """
    if low.uses_result(1):
        raise low.unsupported("readers of the forward variables")
    op = low.op
    time = low.fake(0).shape[0]
    # Each time step is a piece of the graph: another number of steps captures another graph.
    time = int(time)
    if low.fake(0).dim() != 3:
        raise low.unsupported("an input without batch axis")
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
        targets = _padded(low, targets, target_lengths)
    classes = op.dim(log_probs, 2)
    # PyTorch does not read the padding behind a target, which may hold any number.
    targets = op.Min(op.Max(targets, op.const(0)), op.Sub(classes, [1]))
    scores = op.Transpose(
        op.Max(log_probs, op.const(_NEVER, low.dtype)), perm=[1, 0, 2]
    )  # [batch, time, classes]
    labels = _with_blanks(low, targets, blank)  # [batch, 2 S + 1]
    places = op.Expand(op.Unsqueeze(labels, [1]), op.Concat([1, time, 1], axis=0))
    emitted = (
        op.Split(op.GatherElements(scores, places, axis=2), axis=1, num_outputs=time, _outputs=time)
        if time > 1
        else [op.GatherElements(scores, places, axis=2)]
    )
    state = _last_state(
        low, [op.Squeeze(step, [1]) for step in emitted], labels, input_lengths, target_lengths, blank
    )
    loss = op.Neg(_log_of_sum(low, [_ends(low, state, target_lengths, back) for back in (0, 1)]))
    # A loss near -_NEVER means that no path gives the target: PyTorch returns infinity.
    loss = op.Where(op.Greater(loss, op.const(-_NEVER / 10, low.dtype)), op.const(np.inf, low.dtype), loss)
    # PyTorch's gradient of the loss is exp(log_probs) minus the posterior. The forward variables give the posterior;
    # these terms, whose value is zero, give the rest.
    shares = op.Exp(scores)
    counted = op.Less(op.Unsqueeze(op.const(np.arange(time)), [1]), op.Unsqueeze(input_lengths, [1, 2]))
    shares = op.Where(counted, shares, op.const(0.0, low.dtype))
    shares = op.ReduceSum(op.Sub(shares, low.op.stop_gradient(shares)), [1, 2], keepdims=0)
    return op.Add(loss, shares), None


def _lengths(low: Lowering, lengths: Any) -> ir.Value:
    return low.tensor(lengths, INT64) if isinstance(lengths, ir.Value) else low.ints(list(lengths))


def _padded(low: Lowering, joined: ir.Value, lengths: ir.Value) -> ir.Value:
    """Returns concatenated targets as rows [batch, sum of all lengths]; any labels follow the end of a target."""
    op = low.op
    starts = op.Sub(op.CumSum(lengths, op.const(0)), lengths)
    count = op.Shape(joined)
    places = op.Add(op.Unsqueeze(starts, [1]), arange(low, count))
    return op.Gather(joined, op.Min(places, op.Sub(count, [1])))


def _with_blanks(low: Lowering, targets: ir.Value, blank: int) -> ir.Value:
    """Returns the labels with a blank before each one and a blank at the end: [batch, 2 S + 1]."""
    op = low.op
    column = op.Unsqueeze(targets, [2])
    blanks = op.Expand(op.const(blank), op.Shape(column))
    pairs = op.Reshape(op.Concat(blanks, column, axis=2), op.Mul(op.Shape(targets), [1, 2]))
    last = op.Expand(op.const(blank), op.Concat(op.Shape(targets, start=0, end=1), [1], axis=0))
    return op.Concat(pairs, last, axis=1)


def _log_of_sum(low: Lowering, terms: list[ir.Value]) -> ir.Value:
    """Returns log(sum(exp(terms))) of finite terms."""
    op = low.op
    # Subtracting the largest term keeps exp from overflowing. The result does not depend on what is subtracted.
    largest = low.op.stop_gradient(op.Max(*terms))
    total = op.Sum(*(op.Exp(op.Sub(term, largest)) for term in terms))
    return op.Add(op.Log(total), largest)


def _last_state(
    low: Lowering,
    emitted: list[ir.Value],
    labels: ir.Value,
    input_lengths: ir.Value,
    target_lengths: ir.Value,
    blank: int,
) -> ir.Value:
    """Returns the forward variables [batch, 2 S + 1] after the last time step of each sample."""
    op = low.op
    never = op.const(_NEVER, low.dtype)
    column = op.Expand(never, op.Concat(op.Shape(labels, start=0, end=1), [1], axis=0))
    place = arange(low, op.dim(labels, 1))
    two_before = op.Concat(
        op.Mul(op.Slice(labels, [0], [2], [1]), [-1]), op.Slice(labels, [0], [-2], [1]), axis=1
    )
    # A path may leave out the blank between two different labels.
    jump = op.And(op.Not(op.Equal(labels, op.const(blank))), op.Not(op.Equal(labels, two_before)))
    jump = op.And(jump, op.Greater(place, op.const(1)))
    begins = op.LessOrEqual(place, op.Unsqueeze(op.Min(target_lengths, [1]), [1]))
    state = op.Where(begins, emitted[0], never)
    for number, scores in enumerate(emitted[1:], 1):
        one = op.Concat(column, op.Slice(state, [0], [-1], [1]), axis=1)
        two = op.Concat(column, op.Slice(one, [0], [-1], [1]), axis=1)
        after = op.Add(_log_of_sum(low, [state, one, op.Where(jump, two, never)]), scores)
        # A sample whose input has ended keeps its state.
        running = op.Unsqueeze(op.Greater(input_lengths, op.const(number)), [1])
        state = op.Where(running, after, state)
    return state


def _ends(low: Lowering, state: ir.Value, target_lengths: ir.Value, back: int) -> ir.Value:
    """Returns the forward variable of the last blank (`back` = 0) or of the last label (1) of each target."""
    op = low.op
    place = op.Sub(op.Mul(target_lengths, [2]), [back])
    there = op.GatherElements(state, op.Unsqueeze(op.Max(place, [0]), [1]), axis=1)
    result = op.Squeeze(there, [1])
    # An empty target has no last label.
    return op.Where(op.Less(place, op.const(0)), op.const(_NEVER, low.dtype), result)
