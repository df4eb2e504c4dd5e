"""Extends the pads of a Pad that has axes to all axes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.tidy.constants import known_array
from onnxtrain.passes.tidy.replace_value import write_before
from onnxtrain.passes.tidy.unused import remove_unread_initializers


class PadAxesPass(ir.passes.InPlacePass):
    """Replaces the `axes` of a Pad with explicit pads for all axes; skips nodes of unknown rank.

    The transpose optimizer of ONNX Runtime (1.32, level basic) moves a Transpose past a Pad and permutes the pads as if
    there were a pair for each axis in order. With `axes`, it pads the wrong axes, or reads beyond the end of the pads,
    which fails at run time. Expects inferred ranks.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the model in place, including subgraphs; new constants are Constant nodes."""
        nodes = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if _has_axes(node)]
        for node in nodes:
            replaced = node.inputs[1], node.inputs[3]
            node.replace_input_with(1, _pads_of_all_axes(node))
            node.resize_inputs(3 if node.inputs[2] is not None else 2)
            # ONNX Runtime warns about unread initializers.
            remove_unread_initializers(model.graph, replaced)
        return ir.passes.PassResult(model, bool(nodes))


def _has_axes(node: ir.Node) -> bool:
    """True for a Pad with axes and data of known rank."""
    if (node.domain, node.op_type) != ("", "Pad") or len(node.inputs) < 4 or node.inputs[3] is None:
        return False
    return node.inputs[0] is not None and node.inputs[0].shape is not None


def _pads_of_all_axes(node: ir.Node) -> ir.Value:
    """Returns the pads `[begins of all axes, ends of all axes]`, int64, of a Pad with axes."""
    data, pads, _, axes = node.inputs
    assert data is not None
    assert data.shape is not None
    assert axes is not None
    rank = data.shape.rank()
    known_pads, known_axes = known_array(pads), known_array(axes)
    places = None
    if known_axes is not None:
        along = known_axes.astype(np.int64) % max(rank, 1)
        places = np.concatenate([along, along + rank])
    if places is not None and known_pads is not None:
        of_all_axes = np.zeros(2 * rank, np.int64)
        of_all_axes[places] = known_pads
        return _constant(node, "pads", of_all_axes)
    if places is not None:
        indices = _constant(node, "places", places)
    else:
        # Mod of integers has the sign of the divisor: it counts negative axes from the front.
        axes = write_before(node, "axes", "Cast", axes, to=ir.DataType.INT64)
        size = _constant(node, "rank", np.array(rank))
        begins = write_before(node, "begins", "Mod", axes, size)
        ends = write_before(node, "ends", "Add", begins, size)
        indices = write_before(node, "places", "Concat", begins, ends, axis=0)
    zeros = _constant(node, "zeros", np.zeros(2 * rank, np.int64))
    return write_before(node, "pads", "ScatterElements", zeros, indices, pads, axis=0)


def _constant(node: ir.Node, role: str, array: np.ndarray) -> ir.Value:
    """Inserts an int64 Constant before `node` and returns its output. `role` is part of the output's name."""
    return write_before(node, role, "Constant", value=ir.tensor(array.astype(np.int64)))
