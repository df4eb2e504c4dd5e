"""What every pipeline does to a graph that has just been differentiated."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.implicit_expand import ImplicitExpandPass
from onnxtrain.passes.tidy.transposed_products import TransposedProductPass
from onnxtrain.passes.tidy.unused import is_read, remove_unread_initializers, remove_unread_nodes


def simplify_gradients(model: ir.Model) -> None:
    """Rewrite what rules of single ops write and one would not write by hand: no transposed product, no repetition.

    For a graph of known shapes. Nodes and initializers that are no longer read are removed; what nothing read before is
    not this function's to remove.
    """
    graph = model.graph
    unread = {node for node in graph if not any(map(is_read, node.outputs))}
    initializers = [value for value in graph.initializers.values() if is_read(value)]
    if TransposedProductPass()(model).modified | ImplicitExpandPass()(model).modified:
        remove_unread_nodes(graph, set(graph) - unread)
        remove_unread_initializers(graph, initializers)
