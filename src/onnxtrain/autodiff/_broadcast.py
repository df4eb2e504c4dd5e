"""Undoes numpy-style broadcasting: sums the cotangent of a broadcast input over the axes it was repeated on."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.errors import DifferentiationError

Dim = int | ir.SymbolicDim


def sum_to_shape_of(op: Emitter, ct: ir.Value, output: ir.Value, primal: ir.Value) -> ir.Value:
    """Sums a cotangent over the axes along which `primal` was repeated to the shape of `output`.

    Args:
        op: writes into the graph.
        ct: the cotangent, of the shape of `output`.
        output: result of the op that broadcast.
        primal: its input.

    Returns:
        The sum, of the shape of `primal`. If shapes leave it open which axes were repeated, nodes find them at run
        time.

    Raises:
        DifferentiationError: `primal` has more axes than `output`, so the file is damaged.
    """
    if output.shape is None or primal.shape is None:
        return _sum_at_run_time(op, ct, output, primal)
    lead = output.shape.rank() - primal.shape.rank()
    if lead < 0:
        raise DifferentiationError(
            f"differentiating: {primal.name!r} of shape {primal.shape} cannot be broadcast to {output.name!r} of shape "
            f"{output.shape}; the file is damaged, or declares a wrong shape"
        )
    axes = list(range(lead))
    for axis, (out_dim, dim) in enumerate(
        zip(list(output.shape)[lead:], primal.shape, strict=True), start=lead
    ):
        # One axis that only the run can decide about makes all of them wait for the run.
        repeated = _is_repeated(out_dim, dim)
        if repeated is None:
            return _sum_at_run_time(op, ct, output, primal)
        if repeated:
            axes.append(axis)
    if not axes:
        return ct
    # Only leading axes are gone: one reduction drops them. A repeated axis of size one has to stay, so the leading ones
    # are dropped by a Squeeze after it.
    if axes == list(range(lead)):
        result = op.ReduceSum(ct, axes, keepdims=0)
    else:
        result = op.ReduceSum(ct, axes, keepdims=1)
        if lead:
            result = op.Squeeze(result, list(range(lead)))
    result.shape = primal.shape
    return result


def _is_repeated(out_dim: Dim, dim: Dim) -> bool | None:
    """Says if an axis of size `dim` was repeated to size `out_dim`; None if symbolic sizes leave it open."""
    if dim == 1:
        return out_dim != 1
    if isinstance(dim, int) or out_dim == 1:
        return False
    # A symbol may stand for 1, and then the axis is repeated, unless the output has the same symbol.
    same = isinstance(out_dim, ir.SymbolicDim) and out_dim.value is not None and out_dim.value == dim.value
    return False if same else None


def _sum_at_run_time(op: Emitter, ct: ir.Value, output: ir.Value, primal: ir.Value) -> ir.Value:
    """Sums over every axis on which the primal, padded with leading ones, has size one."""
    shape = op.shape_of(primal)
    # Numpy aligns shapes at the end: the primal gets leading ones up to the rank of the output.
    missing = op.Sub(op.Shape(op.shape_of(output)), op.Shape(shape))
    padded = op.Concat(op.Expand(op.const([1]), missing), shape, axis=0)
    axes = op.Squeeze(op.NonZero(op.Equal(padded, op.const([1]))), [0])
    # There may be no such axis, and the default of ReduceSum for no axes is to reduce over all.
    result: ir.Value = op.Reshape(
        op.ReduceSum(ct, axes, keepdims=1, noop_with_empty_axes=1), shape, allowzero=1
    )
    result.shape = primal.shape
    return result
