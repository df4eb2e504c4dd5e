"""Computes the shapes of a model at two batch sizes, which :mod:`onnxtrain.passes.shapes.dynamic_batch` compares."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.passes.shapes.infer import infer_shapes

Dims = tuple[int, ...]

TRIAL = 7919
"""Trial batch size: a prime that is unlikely to be another size, so a dimension that contains it depends on the
batch."""

# Substitute for all other symbolic dimensions, at both batch sizes.
_OTHER = 6


def axis_of_batch(before: Dims, after: Dims, result: Dims, batch: int, inside: int) -> tuple[int, int] | None:
    """Finds the axis of a Reshape's output that contains the batch.

    The batch is in the input axis whose size differs between two batch sizes: the exported one and :data:`TRIAL`. A
    Reshape keeps the order of elements, so the output axis follows from the number of elements in the axes before it.

    Args:
        before: dimensions of the input at the exported batch size.
        after: dimensions of the input at batch size `TRIAL`.
        result: dimensions of the output at the exported batch size.
        batch: the exported batch size.
        inside: product of the dimensions merged into the batch axis of the input, in front of the batch, e.g. T if
            [T, batch] has become one axis of T·batch elements; 1 if there are none.

    Returns:
        The axis of the output, and the value of `inside` for this axis; None if no output axis contains the batch, or
        if not exactly one input axis grows in proportion to the batch.
    """
    # A Squeeze without axes removes a batch of 1, but no larger one.
    if len(before) != len(after):
        return None
    # Exactly one axis must have grown, in proportion to the batch.
    grown = [axis for axis, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(grown) != 1 or after[grown[0]] * batch != before[grown[0]] * TRIAL:
        return None
    outer = math.prod(before[: grown[0]]) * inside
    inner = math.prod(before) // (outer * batch)
    fitting = []
    for axis, size in enumerate(result):
        start = math.prod(result[:axis])
        if size % batch == 0 and outer % start == 0 and (start * size) % (outer * batch) == 0:
            # A batch of 1 fits several axes. Preferred is an axis of its own, then one merged with part of the inner
            # axes (heads), then with outer axes (rows of a matrix), and last with all inner axes.
            alone = (start, size) == (outer, batch)
            rank = 0 if alone else 2 if start < outer else 3 if size == batch * inner else 1
            fitting.append((rank, axis, outer // start))
    return min(fitting)[1:] if fitting else None


def concrete_dims(value: ir.Value, batch: int) -> Dims | None:
    """Returns the dimensions of a graph input at batch size `batch`; None if its rank is unknown.

    A symbolic axis 0 gets the size `batch`, other symbolic axes get a fixed size.
    """
    if value.shape is None:
        return None
    first = [batch if axis == 0 and not isinstance(dim, int) else dim for axis, dim in enumerate(value.shape)]
    return tuple(dim if isinstance(dim, int) else _OTHER for dim in first)


def static_dims_at(model: ir.Model, batch: int) -> dict[str, Dims]:
    """Returns the static dimensions, by name, that values of the main graph have at batch size `batch`.

    Other symbolic dimensions of the inputs are replaced with a fixed size. Values whose dimensions onnx cannot infer
    are omitted.
    """
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
