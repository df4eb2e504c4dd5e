"""Recomputes chains of elementwise ops for the gradients, where that takes less time than keeping their results.

The time of a chain of elementwise ops is that of its memory accesses. If the chain is one program (`ElementwisePass`),
recomputing its results is usually faster than writing them in the forward pass and reading them in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.fusion._instructions import bool_source
from onnxtrain.fusion.elementwise import is_elementwise
from onnxtrain.op_facts import SHAPE_READERS
from onnxtrain.passes import reads, remove_unread_chains

_UNKNOWN = 64
"""Stands for a symbolic size when numbers of elements are compared."""

_COSTS = {
    "Slice": 0,
    "Pad": 1,
    "Div": 3,
    "Reciprocal": 3,
    "Sqrt": 4,
    "Sin": 20,
    "Cos": 20,
    "Softplus": 20,
} | dict.fromkeys(("Exp", "Log", "Sigmoid", "Tanh", "Erf", "Gelu"), 8)
"""Time of an op per element, in additions; 1 for other ops."""
_COST_OF_MEMORY = 20
"""Time to write an element and to read it, in additions within a program."""


class RecomputedChainsPass(ir.passes.InPlacePass):
    """Makes gradients read copies of elementwise chains of the forward pass, if that saves time.

    Only results that no other op of the forward pass reads are recomputed: the others are in memory in any case.

    Run this pass right before `ElementwisePass`, which joins the copies with the gradients that read them. No later
    pass may merge equal nodes.

    Args:
        outputs: names of the outputs of the forward pass, e.g. {"loss"}; names of other values are ignored.
    """

    def __init__(self, outputs: Collection[str]) -> None:
        super().__init__()
        self._outputs = frozenset(outputs)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites a training model in place; subgraphs are not modified."""
        graph = model.graph
        forward = self._forward(graph)
        readers = [node for node in graph if node not in forward and node.op_type not in SHAPE_READERS]
        residuals = dict.fromkeys(v for node in readers for v in reads(node) if v.producer() in forward)
        again = recomputed_nodes(
            forward,
            residuals,
            {v for v in residuals if self._is_written(v, forward, model.functions)}
            | {*graph.inputs, *graph.initializers.values()},
            model.functions,
        )
        readers = [node for node in readers if any(v.producer() in again for v in reads(node))]
        if readers:
            self._copy([node for node in graph if node in again], readers, Emitter(graph))
            remove_unread_chains(graph, again)
            graph.sort()
        return ir.passes.PassResult(model, bool(readers))

    def _forward(self, graph: ir.Graph) -> set[ir.Node]:
        """Returns the nodes that the outputs of the forward pass depend on."""
        needed = {value for value in graph.outputs if value.name in self._outputs}
        nodes = set()
        for node in reversed(graph):
            if not needed.isdisjoint(node.outputs):
                nodes.add(node)
                needed.update(reads(node))
        return nodes

    @staticmethod
    def _is_written(
        value: ir.Value, forward: Collection[ir.Node], functions: Mapping[ir.OperatorIdentifier, ir.Function]
    ) -> bool:
        """True if a value is in memory in any case: an output, or read by a subgraph or by another kind of op."""
        return value.is_graph_output() or any(
            use.node.graph is not value.graph
            or (use.node in forward and not is_elementwise(use.node, functions))
            for use in value.uses()
        )

    @staticmethod
    def _copy(nodes: Collection[ir.Node], readers: Collection[ir.Node], op: Emitter) -> None:
        """Makes the readers read copies of the nodes, which are given in the order of the graph."""
        copies: dict[ir.Value, ir.Value] = {}
        for node in nodes:
            inputs = [copies.get(v, v) if v is not None else None for v in node.inputs]
            outputs = [
                ir.Value(name=op.unique_name(f"{v.name}_again"), type=v.type, shape=v.shape)
                for v in node.outputs
            ]
            copies |= dict(zip(node.outputs, outputs, strict=True))
            copy = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                node.attributes.values(),
                overload=node.overload,
                outputs=outputs,
                name=f"{node.name}_again" if node.name else None,
            )
            op.graph.insert_before(next(iter(readers)), copy)
        for reader in readers:
            for index, value in enumerate(reader.inputs):
                if value in copies:
                    reader.replace_input_with(index, copies[value])


def recomputed_nodes(
    forward: Collection[ir.Node],
    residuals: Collection[ir.Value],
    given: Collection[ir.Value],
    functions: Mapping[ir.OperatorIdentifier, ir.Function],
) -> set[ir.Node]:
    """Returns the forward nodes to run again for the gradients.

    Connected elementwise nodes form a region. A region is recomputed if the values that it reads, except those in
    memory in any case, have fewer elements than those of its results that the gradients read, and if computing these
    results takes less time than writing and reading the difference.

    Args:
        forward: the forward nodes that may run twice.
        residuals: the values of the forward pass that the gradients read.
        given: the values that are in memory in any case, e.g. inputs and outputs of the graph.
        functions: the function table of the model.
    """
    elementwise = {node for node in forward if is_elementwise(node, functions)}
    wanted = [v for v in residuals if v.producer() in elementwise and v not in given]
    kept = {v for v in residuals if v.producer() not in elementwise} | set(given)
    chosen: set[ir.Node] = set()
    for region in _regions(elementwise, wanted, kept):
        results = {v for v in wanted if v.producer() in region}
        # Programs read the bool value in place of its Cast.
        sources = {bool_source(v) or v for node in region for v in reads(node) if v.producer() not in region}
        saved = sum(map(_elements, results)) - sum(map(_elements, sources - kept))
        if saved > 0 and sum(_cost(node, functions) for node in region) <= saved * _COST_OF_MEMORY:
            chosen |= region
            kept |= sources
    return chosen


def _regions(
    elementwise: Collection[ir.Node], wanted: Collection[ir.Value], kept: Collection[ir.Value]
) -> list[set[ir.Node]]:
    """Groups the elementwise nodes that the wanted values depend on; nodes that read one another are in one group.

    Args:
        elementwise: all elementwise nodes.
        wanted: results of elementwise nodes.
        kept: values that need not be recomputed.
    """
    regions: list[set[ir.Node]] = []
    for value in wanted:
        nodes: set[ir.Node] = set()
        stack = [value.producer()]
        while stack:
            node = stack.pop()
            if node is None or node in nodes or node not in elementwise:
                continue
            nodes.add(node)
            stack += [value.producer() for value in reads(node) if value not in kept]
        apart = [region for region in regions if region.isdisjoint(nodes)]
        regions = [*apart, nodes.union(*(region for region in regions if region not in apart))]
    return regions


def _cost(node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> int:
    """Returns the time of a node in additions."""
    body = functions.get(node.op_identifier(), (node,))
    return _elements(node.outputs[0]) * sum(_COSTS.get(step.op_type, 1) for step in body)


def _elements(value: ir.Value) -> int:
    """Returns the size of a value in floats."""
    dims = static_dims(value)
    elements = math.prod(_UNKNOWN if dim is None else dim for dim in dims or ())
    return -(-elements // 4) if value.dtype == ir.DataType.BOOL else elements
