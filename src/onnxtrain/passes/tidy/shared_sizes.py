"""Reads each shape once: values whose sizes have the same names share the nodes that read their shapes."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.op_facts import CASTS, SHAPE_READERS
from onnxtrain.passes.shapes.dims import dims_of


class SharedSizesPass(ir.passes.InPlacePass):
    """Merges Shape and Size nodes of values with provably equal shapes, and then equal Casts of their results.

    Gradients read the shapes of many values of one batch. Expects inferred shapes, with a name for each symbolic size.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place."""
        first: dict[tuple[object, ...], ir.Value] = {}
        sizes: set[ir.Value] = set()
        merged: list[ir.Node] = []
        for node in model.graph:
            key = _key(node, sizes)
            if key is None:
                continue
            output = node.outputs[0]
            sizes.add(output)
            if first.setdefault(key, output) is not output and not output.is_graph_output():
                output.replace_all_uses_with(first[key])
                merged.append(node)
        model.graph.remove(merged, safe=True)
        return ir.passes.PassResult(model, bool(merged))


def _key(node: ir.Node, sizes: set[ir.Value]) -> tuple[object, ...] | None:
    """Returns a key that nodes with equal results share; None if the node is not merged with others.

    Args:
        node: the node.
        sizes: results of nodes that have a key.
    """
    source = node.inputs[0] if node.domain == "" and len(node.inputs) == 1 else None
    if source is None:
        return None
    if node.op_type in SHAPE_READERS and (dims := dims_of(source)) is not None:
        ends = (node.attributes.get_int("start", 0), node.attributes.get_int("end", len(dims)))
        return node.op_type, dims, ends
    if node.op_type in CASTS and "to" in node.attributes and source in sizes:
        return node.op_type, source, node.attributes["to"].as_int()
    return None
