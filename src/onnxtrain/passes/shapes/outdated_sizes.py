"""Removes annotated sizes that a rewrite has made wrong, so that shape inference computes them again.

Ranks are kept, because the rank of a standard op's output does not depend on the values of its inputs. The exceptions
are If and Loop, whose subgraphs may return different ranks. Ranks computed from their outputs are removed as well,
except the ranks of the model's outputs and of reductions to a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

from onnxtrain.op_facts import SHAPE_READERS, SHAPING_INPUTS
from onnxtrain.passes.shapes.implied_ranks import reduces_to_scalar

_CHOOSING = frozenset({"If", "Loop"})
# Ops whose output does not depend on the elements of the input: Shape reads sizes, ConstantOfShape repeats one number.
_SHAPE_ONLY = SHAPE_READERS | {"ConstantOfShape"}


def forget_downstream_sizes(graph: ir.Graph, start: ir.Node, *, ranks: bool = False) -> None:
    """Removes the annotated sizes of a node's outputs and of all values, also in subgraphs, computed from them.

    Args:
        graph: the main graph.
        start: a node that has been rewritten.
        ranks: True to remove the ranks of these values as well, except for graph outputs.
    """
    declared = frozenset(graph.outputs)
    wrong = [value for value in start.outputs if ranks and value not in declared]
    for value in wrong:
        value.shape = None
    _forget(graph, lambda node: node is start and not ranks, dict.fromkeys(wrong, True), declared)


def forget_content_dependent_sizes(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """Removes annotated sizes that depend on the contents of `values`, e.g. the output sizes of a Resize.

    Args:
        graph: the main graph.
        values: inputs of `graph` whose contents were constant when the sizes were inferred, and are now variable, e.g.
            the scales of a Resize.
    """
    dependent = set(values)
    shaped: set[ir.Node] = set()
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if not any(value in dependent for value in node.inputs):
            continue
        if any(value in dependent for value in _shaping_inputs(node)):
            shaped.add(node)
        if node.domain != "" or node.op_type not in _SHAPE_ONLY:
            dependent.update(node.outputs)
    if shaped:
        _forget(graph, lambda node: node in shaped, {}, frozenset(graph.outputs))


def _shaping_inputs(node: ir.Node) -> Iterator[ir.Value | None]:
    """Yields the inputs whose elements determine the shape of an output, e.g. the target shape of a Reshape."""
    positions = SHAPING_INPUTS.get(node.op_type, ()) if node.domain == "" else ()
    yield from (node.inputs[index] for index in positions if index < len(node.inputs))


def _forget(
    graph: ir.Graph,
    starts: Callable[[ir.Node], bool],
    changed: dict[ir.Value, bool],
    declared: frozenset[ir.Value],
) -> bool:
    """Removes the sizes of the outputs of some nodes, and of all values computed from them.

    Args:
        graph: the graph, topologically sorted.
        starts: returns True for the nodes whose output sizes are removed.
        changed: values whose sizes have been removed, with True if their rank has been removed as well. Updated in
            place.
        declared: outputs of the model, whose ranks are kept.

    Returns:
        True if a node of `graph` has lost sizes.
    """
    lost_sizes = False
    for node in graph:
        inside = [_forget(body, starts, changed, declared) for body in _bodies(node)]
        if starts(node) or any(inside) or any(value in changed for value in node.inputs):
            lost_sizes = True
            # A scalar has no sizes to lose.
            if reduces_to_scalar(node):
                continue
            # The chosen graph, or a nonstandard op, may return a different rank.
            may_choose = node.op_type in _CHOOSING or node.domain != ""
            unranked = may_choose or any(value is not None and changed.get(value) for value in node.inputs)
            for value in node.outputs:
                lost = unranked and value not in declared
                value.shape = None if lost or value.shape is None else ir.Shape([None] * len(value.shape))
                changed[value] = unranked
    return lost_sizes


def _bodies(node: ir.Node) -> list[ir.Graph]:
    """Returns the subgraphs of a node."""
    graphs = [attr.as_graph() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPH]
    return graphs + [
        g for a in node.attributes.values() if a.type == ir.AttributeType.GRAPHS for g in a.as_graphs()
    ]
