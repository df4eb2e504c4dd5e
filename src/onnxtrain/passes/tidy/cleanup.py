"""Remove what a graph does not need, and nothing that training does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.passes.parameters.stop_gradient import is_stop_gradient
from onnxtrain.passes.runtime_faults.absent_inputs import restore_places
from onnxtrain.passes.tidy.constants import is_float_parameter
from onnxtrain.passes.tidy.unused import remove_unread_nodes

_RemoveUnusedFunctions: Callable[[], ir.passes.PassBase] = common.RemoveUnusedFunctionsPass  # untyped there
_SMALL = 1024  # elements; larger constants are not worth comparing


class CleanupPass(ir.passes.InPlacePass):
    """Eliminate identities, duplicate constants, common subexpressions, dead nodes and unused initializers.

    Composed of onnx_ir's passes, with these guarantees on top, which the pass checks: the names of graph
    outputs and inputs stay, and so do the initializers in `keep`, even unused ones or equal ones.
    Random ops are never merged, and an Identity that stops gradients stays.
    """

    def __init__(self, keep: Collection[str] | None = None) -> None:
        """Choose the initializers to leave alone.

        Args:
            keep: Names of initializers; None means all floating-point ones that were no Constant node.
        """
        super().__init__()
        self._keep = None if keep is None else frozenset(keep)
        self._before: tuple[list[str | None], list[str | None], list[str]] = ([], [], [])

    def requires(self, model: ir.Model) -> None:
        """Note the names that must stay."""
        self._before = (*_interface(model), list(self._kept(model)))

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Clean up in place."""
        kept = self._kept(model)
        with _nodes_hidden(_needed_identities(model)):
            modified = common.IdentityEliminationPass()(model).modified
        with _initializers_set_aside(model, kept):
            modified |= common.DeduplicateInitializersPass(size_limit=_SMALL)(model).modified
        with _nodes_hidden(_unmergeable(model)):
            modified |= common.CommonSubexpressionEliminationPass(size_limit=_SMALL)(model).modified
        modified |= remove_unread_nodes(
            model.graph
        )  # onnx_ir's leaves what the bodies of those gone have read
        with _initializers_set_aside(model, kept):
            modified |= common.RemoveUnusedNodesPass()(model).modified
        restore_places(model)
        rest = ir.passes.Sequential(_RemoveUnusedFunctions(), common.RemoveUnusedOpsetsPass())
        modified |= rest(model).modified
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        """Check that the names that must stay are there."""
        inputs, outputs, kept = self._before
        if (inputs, outputs) != _interface(model):
            raise ir.passes.PostconditionError(
                f"cleanup changed the graph's interface from {(inputs, outputs)} to {_interface(model)}"
            )
        lost = [name for name in kept if name not in model.graph.initializers]
        if lost:
            raise ir.passes.PostconditionError(f"cleanup lost the initializers {lost}")

    def _kept(self, model: ir.Model) -> dict[str, ir.Value]:
        return {
            name: value
            for name, value in model.graph.initializers.items()
            if (name in self._keep if self._keep is not None else is_float_parameter(value))
        }


def _interface(model: ir.Model) -> tuple[list[str | None], list[str | None]]:
    return [value.name for value in model.graph.inputs], [value.name for value in model.graph.outputs]


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the nodes of a model, those in subgraphs and in functions included."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield from ir.traversal.RecursiveGraphIterator(graph)


def _needed_identities(model: ir.Model) -> list[ir.Node]:
    """Return identities whose elimination would rename another graph output, or lose a stop of gradients."""
    needed = []
    taken: set[ir.Value] = set()
    for node in _all_nodes(model):
        if node.op_type != "Identity" or node.domain != "":
            continue
        source, result = _origin(node.inputs[0]), node.outputs[0]
        renames = result.is_graph_output() and (
            source is None
            or source.is_graph_output()
            or source.graph is not node.graph  # the output of a subgraph must be produced in it
            or source in taken
        )
        if renames or is_stop_gradient(node):
            needed.append(node)
        elif result.is_graph_output() and source is not None:
            taken.add(source)
    return needed


def _origin(value: ir.Value | None) -> ir.Value | None:
    """Return what a value is once the identities before it are gone."""
    node = value.producer() if value is not None else None
    while (
        node is not None and node.op_type == "Identity" and node.domain == "" and not is_stop_gradient(node)
    ):
        if value is None or value.is_graph_output():
            break
        value = node.inputs[0]
        node = value.producer() if value is not None else None
    return value


def _unmergeable(model: ir.Model) -> list[ir.Node]:
    return [
        node
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        if _is_random(model, node)
        or is_stop_gradient(node)
        # Merging onto a node that lacks an output would connect its consumers to nothing.
        or not all(output.name for output in node.outputs)
    ]


def _is_random(model: ir.Model, node: ir.Node) -> bool:
    if node.domain == "":
        return node.op_type in RANDOM_OPS
    function = model.functions.get(node.op_identifier())
    if function is None:
        return True  # unknown, so it may be
    return any(_is_random(model, inner) for inner in function.all_nodes())


@contextmanager
def _nodes_hidden(nodes: list[ir.Node]) -> Iterator[None]:
    """Give each node a domain of its own, which makes the standard passes leave it alone."""
    domains = [node.domain for node in nodes]
    for index, node in enumerate(nodes):
        node.domain = f"onnxtrain.hidden.{index}"
    try:
        yield
    finally:
        for node, domain in zip(nodes, domains, strict=True):
            node.domain = domain


@contextmanager
def _initializers_set_aside(model: ir.Model, kept: dict[str, ir.Value]) -> Iterator[None]:
    """Take initializers out of the graph's table, though not out of the graph, and put them back in order."""
    order = list(model.graph.initializers)
    for name in kept:
        model.graph.initializers.pop(name)
    try:
        yield
    finally:
        rest = dict(model.graph.initializers)
        model.graph.initializers.clear()
        for name in (*order, *(name for name in rest if name not in order)):
            value = kept.get(name) or rest.get(name)
            if value is not None:
                model.graph.initializers.add(value)
