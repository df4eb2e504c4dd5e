"""What every pipeline does to a graph that has just been differentiated."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.broadcast import ImplicitExpandPass
from onnxtrain.passes.products import TransposedProductPass

__all__ = ["simplify_gradients"]


def simplify_gradients(model: ir.Model) -> None:
    """Rewrite what rules of single ops write and one would not write by hand: no transposed product, no repetition.

    For a graph of known shapes. Nodes and initializers that are no longer read are removed; what nothing read before is
    not this function's to remove.
    """
    graph = model.graph
    unread = {node for node in graph if not any(map(_is_read, node.outputs))}
    constants = {name for name, value in graph.initializers.items() if _is_read(value)}
    if not TransposedProductPass()(model).modified | ImplicitExpandPass()(model).modified:
        return
    for node in reversed(tuple(graph)):
        if node not in unread and not any(map(_is_read, node.outputs)):
            graph.remove(node, safe=True)
    for name in constants:
        value = graph.initializers[name]
        if not _is_read(value) and not value.is_graph_input():
            del graph.initializers[name]


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()
