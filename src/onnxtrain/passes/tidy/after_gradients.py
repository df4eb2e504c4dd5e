"""Simplifies a graph after differentiation."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.passes.tidy.einsum_products import EinsumProductsPass
from onnxtrain.passes.tidy.implicit_expand import ImplicitExpandPass
from onnxtrain.passes.tidy.transposed_products import TransposedProductPass
from onnxtrain.passes.tidy.unchanged_shape import UnchangedShapePass
from onnxtrain.passes.tidy.unused import is_read, remove_unread_initializers, remove_unread_nodes


def simplify_gradients(model: ir.Model) -> None:
    """Writes Einsums as products, and removes transposes of products and unnecessary Expands and Reshapes, in place.

    A gradient rule sees a single op and emits such nodes; a gradient derived for the whole graph would have none.
    Expects inferred shapes. Nodes and initializers that are no longer read are removed.
    """
    graph = model.graph
    # Nodes that were unread before are kept, because the caller may still add readers.
    unread = {node for node in graph if not any(map(is_read, node.outputs))}
    initializers = [value for value in graph.initializers.values() if is_read(value)]
    modified = False
    rewritings = EinsumProductsPass(), TransposedProductPass(), ImplicitExpandPass(), UnchangedShapePass()
    for rewriting in rewritings:
        modified |= rewriting(model).modified
    if modified:
        remove_unread_nodes(graph, set(graph) - unread)
        remove_unread_initializers(graph, initializers)
