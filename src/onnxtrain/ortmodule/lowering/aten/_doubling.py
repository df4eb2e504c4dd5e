"""Emits computations whose number of steps is the logarithm of a size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.emitter import Emitter

Step = Callable[[Emitter, ir.Value, Sequence[ir.Value]], list[ir.Value]]


def doubling(op: Emitter, limit: int | ir.Value, step: Step, state: Sequence[ir.Value]) -> list[ir.Value]:
    """Applies `step` with the shifts 1, 2, 4, ... below `limit`, e.g. for a parallel prefix scan or a bisection.

    Args:
        op: emitter.
        limit: exclusive upper bound of the shifts. For an int, the steps are unrolled. For an ONNX value, they run in a
            Loop.
        step: emits one step. Takes an emitter, the shift (int64 [1]) and the state, and returns the next state, with
            the same dtypes and shapes.
        state: the initial state.

    Returns:
        The final state.
    """
    if isinstance(limit, int):
        for power in range(max(limit - 1, 0).bit_length()):
            state = step(op, op.const([1 << power]), state)
        return list(state)
    one = op.const([1])
    first = op.Squeeze(op.Less(one, limit), [0])
    inner = op.subgraph(
        {"iteration": ir.DataType.INT64, "go_on": ir.DataType.BOOL, "shift": ir.DataType.INT64}
        | {f"state{k}": value.dtype for k, value in enumerate(state)}
    )
    iteration, go_on, shift, *before = inner.graph.inputs
    iteration.shape = go_on.shape = ir.Shape(())
    shift.shape = ir.Shape((1,))
    for value, given in zip(before, state, strict=True):
        value.shape = given.shape
    after = step(inner, shift, before)
    twice = inner.Add(shift, shift)
    results = [inner.Squeeze(inner.Less(twice, limit), [0]), twice, *map(inner.Identity, after)]
    for result, value in zip(results, (go_on, shift, *before), strict=True):
        result.type, result.shape = value.type, value.shape
    inner.graph.outputs.extend(results)
    body = ir.AttrGraph("body", inner.graph)
    _, *final = op.emit("Loop", None, first, one, *state, body=body, _outputs=1 + len(state))
    for result, value in zip(final, state, strict=True):
        result.type, result.shape = value.type, value.shape
    return list(final)
