"""Undoes broadcasting: sums the cotangent of a broadcast input over the axes along which it was repeated."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.errors import DifferentiationError

Dim = int | ir.SymbolicDim


def sum_to_shape_of(op: Emitter, ct: ir.Value, output: ir.Value, primal: ir.Value) -> ir.Value:
    """Sums a cotangent over the axes along which `primal` was broadcast to the shape of `output`.

    Args:
        op: emitter of the graph.
        ct: cotangent of `output`.
        output: output of the op that broadcasts.
        primal: input of that op.

    Returns:
        The sum, with the shape of `primal`. If the static shapes do not determine which axes were broadcast, they are
        found at run time.

    Raises:
        DifferentiationError: `primal` has a higher rank than `output`, so the model is invalid.
    """
    if output.shape is None or primal.shape is None:
        return _sum_at_run_time(op, ct, output, primal)
    lead = output.shape.rank() - primal.shape.rank()
    if lead < 0:
        raise DifferentiationError(
            f"differentiating: {primal.name!r} of shape {primal.shape} cannot be broadcast to "
            f"{output.name!r} of shape {output.shape}; the model is corrupt, or declares a wrong shape"
        )
    axes = list(range(lead))
    for axis, (out_dim, dim) in enumerate(
        zip(list(output.shape)[lead:], primal.shape, strict=True), start=lead
    ):
        # If one axis can only be decided at run time, all of them are.
        repeated = _is_repeated(out_dim, dim)
        if repeated is None:
            return _sum_at_run_time(op, ct, output, primal)
        if repeated:
            axes.append(axis)
    if not axes:
        return ct
    # If only leading axes were added, one reduction removes them. Broadcast axes of size one must be kept, so then a
    # Squeeze removes the leading axes.
    if axes == list(range(lead)):
        result = op.ReduceSum(ct, axes, keepdims=0)
    else:
        result = op.ReduceSum(ct, axes, keepdims=1)
        if lead:
            result = op.Squeeze(result, list(range(lead)))
    result.shape = primal.shape
    return result


def _is_repeated(out_dim: Dim, dim: Dim) -> bool | None:
    """True if an axis of size `dim` was broadcast to size `out_dim`; None if symbolic sizes leave that open."""
    if dim == 1:
        return out_dim != 1
    if isinstance(dim, int) or out_dim == 1:
        return False
    # A symbol may stand for 1, in which case the axis is broadcast, unless the output has the same symbol.
    same = isinstance(out_dim, ir.SymbolicDim) and out_dim.value is not None and out_dim.value == dim.value
    return False if same else None


def _sum_at_run_time(op: Emitter, ct: ir.Value, output: ir.Value, primal: ir.Value) -> ir.Value:
    """Sums a cotangent to the shape of `primal`, over the axes along which `primal` turns out to have size one.

    If `primal` has a lower rank than `output`, its missing leading axes count as axes of size one.
    """
    shape = op.shape_of(primal)
    # NumPy aligns shapes at the last axis: the primal gets leading ones up to the rank of the output.
    missing = op.Sub(op.Shape(op.shape_of(output)), op.Shape(shape))
    padded = op.Concat(op.Expand(op.const([1]), missing), shape, axis=0)
    axes = op.Squeeze(op.NonZero(op.Equal(padded, op.const([1]))), [0])
    # There may be no such axis, and without axes ReduceSum reduces over all by default.
    result: ir.Value = op.Reshape(
        op.ReduceSum(ct, axes, keepdims=1, noop_with_empty_axes=1), shape, allowzero=1
    )
    result.shape = primal.shape
    return result
