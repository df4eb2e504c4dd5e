"""Compute the shapes of a model at two batch sizes, for :mod:`onnxtrain.passes.shapes.dynamic_batch` to compare."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.passes.shapes.infer import infer_shapes

Dims = tuple[int, ...]

TRIAL = 7919
"""Trial batch size, a prime that no other dimension has: dimensions in which it turns up depend on the batch."""

# Number that stands in for other symbolic dimensions; they are the same at both batch sizes.
_OTHER = 6


def axis_of_batch(before: Dims, after: Dims, result: Dims, batch: int, inside: int) -> tuple[int, int] | None:
    """Find the axis of a Reshape's result that holds the batch; None if there is none.

    A Reshape keeps the order of elements, so the batch is in the axis with the right number of elements outside of it.

    Args:
        before: dimensions of the input at the exported batch size.
        after: dimensions of the input at the trial batch size.
        result: dimensions of the output at the exported batch size.
        batch: exported batch size.
        inside: T if the batch axis of the input is T·batch with T outermost, else 1.

    Returns:
        The axis of the output, and `inside` for it.
    """
    # A Squeeze without axes removes a batch of 1, but no other.
    if len(before) != len(after):
        return None
    # Exactly one axis must have grown, by the factor of the batch.
    grown = [axis for axis, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(grown) != 1 or after[grown[0]] * batch != before[grown[0]] * TRIAL:
        return None
    outer = math.prod(before[: grown[0]]) * inside
    inner = math.prod(before) // (outer * batch)
    fitting = []
    for axis, size in enumerate(result):
        start = math.prod(result[:axis])
        if size % batch == 0 and outer % start == 0 and (start * size) % (outer * batch) == 0:
            # A batch of 1 fits in several places. Best alone, then with a part of what is inside of it (heads), then
            # with what is outside of it (the rows of a matrix), and last with all of what is inside.
            alone = (start, size) == (outer, batch)
            rank = 0 if alone else 2 if start < outer else 3 if size == batch * inner else 1
            fitting.append((rank, axis, outer // start))
    return min(fitting)[1:] if fitting else None


def concrete_dims(value: ir.Value, batch: int) -> Dims | None:
    """Return the dimensions of a graph input at batch size `batch`; None if its rank is unknown."""
    if value.shape is None:
        return None
    first = [batch if axis == 0 and not isinstance(dim, int) else dim for axis, dim in enumerate(value.shape)]
    return tuple(dim if isinstance(dim, int) else _OTHER for dim in first)


def static_dims_at(model: ir.Model, batch: int) -> dict[str, Dims]:
    """Return the dimensions of all values at batch size `batch` by name, without those that onnx cannot infer."""
    clone = model.clone()
    for value in clone.graph.inputs:
        dims = concrete_dims(value, batch)
        value.shape = None if dims is None else ir.Shape(dims)
    infer_shapes(clone)
    static_dims = {}
    for value in (*clone.graph.inputs, *(output for node in clone.graph for output in node.outputs)):
        sizes = [dim for dim in value.shape or () if isinstance(dim, int)]
        if value.shape is not None and len(sizes) == len(value.shape):
            static_dims[str(value.name)] = tuple(sizes)
    return static_dims
