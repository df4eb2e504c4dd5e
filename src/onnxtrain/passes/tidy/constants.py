"""Adds initializers, turns Constant nodes into initializers, and distinguishes constants from parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

# Metadata key, preserved by cloning and saving.
_KEY = "onnxtrain.constant"


def is_constant(value: ir.Value) -> bool:
    """True if an initializer is marked as a constant, e.g. because it was a Constant node, so it is not a parameter."""
    return _KEY in value.metadata_props


def is_float_parameter(value: ir.Value) -> bool:
    """True if an initializer may be trained: it is floating point and not marked as a constant."""
    return value.dtype is not None and value.dtype.is_floating_point() and not is_constant(value)


def mark_constant(value: ir.Value) -> None:
    """Marks an initializer, or the output of a Constant node, as a constant."""
    value.metadata_props[_KEY] = "true"


def known_array(value: ir.Value | None) -> np.ndarray | None:
    """Returns the array of a constant or initializer; None for inputs, computed values and None."""
    # The caller may override the value of an initializer that is also an input.
    tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Adds a tensor to the initializers of a graph under the tensor's name, which must not be in use."""
    value = ir.Value(
        name=tensor.name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(tensor.shape.numpy()),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value


def add_constant(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Adds a tensor with :func:`add_initializer`, and marks the initializer as a constant."""
    value = add_initializer(graph, tensor)
    mark_constant(value)
    return value


def sort_initializers(graph: ir.Graph, order: Iterable[str]) -> None:
    """Moves the initializers named in `order` to the front, in this order; ignores names without an initializer."""
    present = dict(graph.initializers)
    graph.initializers.clear()
    for name in dict.fromkeys((*order, *present)):
        if name in present:
            graph.initializers.add(present[name])


@contextmanager
def initializers_set_aside(graph: ir.Graph, values: Mapping[str, ir.Value]) -> Iterator[None]:
    """Context manager that temporarily removes initializers from a graph's table; nodes keep reading them.

    Args:
        graph: the graph. On exit, the initializers are restored in their original order.
        values: the initializers to remove, by name.
    """
    # The order is part of the interface: training inputs and checkpoints list parameters in file order.
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
    """Removes the mark that :func:`mark_constant` has set, so that a floating-point initializer may be trained."""
    value.metadata_props.pop(_KEY, None)


def lift_constants(model: ir.Model, min_elements: int = 0) -> ir.Model:
    """Turns Constant nodes into initializers that are marked as constants, in place; returns `model`.

    Initializers of subgraphs are moved to the main graph, so that all tensors are in one place.

    Args:
        model: any model.
        min_elements: minimum number of elements of a Constant to convert, e.g. 4097 for large ones only.
    """
    # Marked first: onnx_ir's pass copies the metadata of a Constant's output to the initializer.
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "Constant" and node.domain == "":
            mark_constant(node.outputs[0])
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=min_elements)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    return model
