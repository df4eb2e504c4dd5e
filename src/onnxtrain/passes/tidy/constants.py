"""Add initializers, turn Constant nodes into initializers, and tell constants from parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

# Metadata of a value, which survives cloning and saving.
_KEY = "onnxtrain.constant"


def is_constant(value: ir.Value) -> bool:
    """Return whether an initializer is marked as a constant, e.g. because it was a Constant node: no parameter."""
    return _KEY in value.metadata_props


def is_float_parameter(value: ir.Value) -> bool:
    """Return whether an initializer may be trained: it is floating point and not marked as a constant."""
    return value.dtype is not None and value.dtype.is_floating_point() and not is_constant(value)


def mark_constant(value: ir.Value) -> None:
    """Mark an initializer, or the output of a Constant node, as no parameter."""
    value.metadata_props[_KEY] = "true"


def known_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the array of a constant or an initializer; None for inputs, computed values and absent ones."""
    # The caller may feed another array to an initializer that is an input, too.
    tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add a tensor to the initializers of a graph under its own name, which must be free."""
    value = ir.Value(
        name=tensor.name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(tensor.shape.numpy()),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value


def add_constant(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add a tensor as :func:`add_initializer` does, marked as no parameter."""
    value = add_initializer(graph, tensor)
    mark_constant(value)
    return value


def sort_initializers(graph: ir.Graph, order: Iterable[str]) -> None:
    """Put the initializers of a graph in the order of these names, and all others behind; ignore unknown names."""
    present = dict(graph.initializers)
    graph.initializers.clear()
    for name in dict.fromkeys((*order, *present)):
        if name in present:
            graph.initializers.add(present[name])


@contextmanager
def initializers_set_aside(graph: ir.Graph, values: Mapping[str, ir.Value]) -> Iterator[None]:
    """Take initializers out of the graph's table for the length of a `with` block, but keep their readers.

    Args:
        graph: The graph; it has its initializers in their old order afterwards.
        values: The initializers by name.
    """
    # The order is part of the interface: training inputs and checkpoints list parameters in the order of the file.
    order = list(graph.initializers)
    for name in values:
        graph.initializers.pop(name)
    try:
        yield
    finally:
        for value in values.values():
            graph.initializers.add(value)
        sort_initializers(graph, order)


def unmark_constant(value: ir.Value) -> None:
    """Make an initializer that was a Constant node a parameter."""
    value.metadata_props.pop(_KEY, None)


def lift_constants(model: ir.Model, min_elements: int = 0) -> ir.Model:
    """Turn Constant nodes into initializers marked as constants, in place; return `model`.

    Initializers of subgraphs move to the main graph, so that all tensors are found in one place.

    Args:
        model: Any model.
        min_elements: Least number of elements of a Constant to turn, e.g. 4097 for big ones only.
    """
    # Marked before the pass of onnx_ir, which copies the metadata of a Constant's output to the initializer.
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "Constant" and node.domain == "":
            mark_constant(node.outputs[0])
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=min_elements)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    return model
