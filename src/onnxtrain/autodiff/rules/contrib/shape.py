"""Decomposes com.microsoft ops that move or select elements into standard ops."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff._bodies import defbody
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff.rules.contrib._shared import MS
from onnxtrain.emitter import Emitter


@defbody("Trilu", MS, "X k", "Y", upper=1)
def trilu(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes com.microsoft's Trilu into the standard op."""
    return op.Trilu(n.X, *([n.k] if n.k is not None else []), upper=n.attr("upper"))


@defbody("ExpandDims", MS, "X axis", "Y")
def expand_dims(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes ExpandDims: inserts an axis of size one at `axis`, an int32 scalar."""
    # `n.axis` is a method of NodeView, so this input is accessed by index. Unsqueeze requires an int64 vector.
    return op.Unsqueeze(n.X, op.Reshape(op.Cast(n.inputs[1], to=ir.DataType.INT64), [1]))


@defbody("UnfoldTensor", MS, "input", "output", dim=-1, size=None, step=1)
def unfold_tensor(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes UnfoldTensor: windows of `size` elements along `dim`, `step` apart, stacked along a new last axis."""
    rank, size = n.rank(n.input), n.attr("size")
    axis = n.axis(n.input, n.attr("dim"))
    starts = op.Range(0, op.Sub(op.Squeeze(op.dim(n.input, axis), [0]), size - 1), n.attr("step"))
    places = op.Add(op.Unsqueeze(starts, [1]), list(range(size)))
    windows = op.Gather(n.input, places, axis=axis)
    return op.Transpose(windows, perm=[k for k in range(rank + 1) if k != axis + 1] + [axis + 1])
