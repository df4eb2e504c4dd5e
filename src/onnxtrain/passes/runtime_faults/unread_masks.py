"""Keeps ONNX Runtime from removing Dropout nodes in training mode."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.parameters.training_mode import trains
from onnxtrain.passes.tidy.replace_value import successor, write_before
from onnxtrain.passes.tidy.unique_names import fresh_names


class UnreadMasksPass(ir.passes.InPlacePass):
    """Adds a Where that reads the mask of each training-mode Dropout whose mask is unread.

    A graph optimizer of ONNX Runtime (1.20 to 1.32, level basic) removes a Dropout with an unread mask and ignores its
    input `training_mode`. Gradients read the mask. But a Dropout through which no gradient flows, e.g. between frozen
    layers and a trained head, would drop nothing. ONNX Runtime keeps a Dropout that reads a graph input or computes a
    graph output, so the pass skips these.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Adds the nodes in the main graph and its subgraphs, in place; the names of outputs are kept."""
        nodes = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if _is_removed(node)]
        for node in nodes:
            _read_mask(model, node)
        return ir.passes.PassResult(model, bool(nodes))


def _is_removed(node: ir.Node) -> bool:
    """True if ONNX Runtime would remove a Dropout in training mode."""
    if (node.domain, node.op_type) != ("", "Dropout") or not trains(node):
        return False
    value, result, *masks = node.inputs[0], *node.outputs
    if value is None or value.is_graph_input() or result.is_graph_output():
        return False
    return not any(mask.uses() or mask.is_graph_output() for mask in masks)


def _read_mask(model: ir.Model, node: ir.Node) -> None:
    """Inserts Where(mask, y, 0) after a Dropout with the output y. The result equals y."""
    node.resize_outputs(2)
    y, mask = node.outputs
    kept = successor(y)
    y.name, mask.name = fresh_names(model, [f"{kept.name}_dropped", f"{kept.name}_mask"])
    mask.type, mask.shape = ir.TensorType(ir.DataType.BOOL), y.shape
    dtype = y.dtype or ir.DataType.FLOAT
    zero = write_before(node, "zero", "Constant", value=ir.tensor(np.zeros((), dtype.numpy()), dtype=dtype))
    zero.type, zero.shape = ir.TensorType(dtype), ir.Shape([])
    node.append(ir.node("Where", [mask, y, zero], outputs=[kept]))
