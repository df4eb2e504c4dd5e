"""Chooses elementwise results of the forward half that the backward half computes again, so that they are not saved.

A chain of elementwise ops takes as long as memory does. Where the chain is one program (`ElementwisePass`), computing
its results again most often takes less time than writing them in forward and reading them in backward.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnxtrain.emitter import static_dims
from onnxtrain.fusion.elementwise import is_elementwise
from onnxtrain.passes import reads

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


def recomputed_nodes(
    forward: Collection[ir.Node],
    residuals: Collection[ir.Value],
    given: Collection[ir.Value],
    functions: Mapping[ir.OperatorIdentifier, ir.Function],
) -> set[ir.Node]:
    """Returns the nodes of the forward half that the backward half runs, too.

    Elementwise nodes that read one another form a region. A region is recomputed if the values that it reads, and that
    backward would not have otherwise, have fewer elements than its results that backward reads, and if computing these
    results takes less time than writing and reading the difference.

    Args:
        forward: the nodes of the forward half that may run in both halves.
        residuals: the values that backward would take from forward.
        given: the values that backward has anyway: inputs that it may read, and outputs of the graph.
        functions: the function table of the model.
    """
    elementwise = {node for node in forward if is_elementwise(node, functions)}
    wanted = [v for v in residuals if v.producer() in elementwise and v not in given]
    kept = {v for v in residuals if v.producer() not in elementwise} | set(given)
    chosen: set[ir.Node] = set()
    for region in _regions(elementwise, wanted, kept):
        results = {v for v in wanted if v.producer() in region}
        sources = {v for node in region for v in reads(node) if v.producer() not in region}
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
    dims = static_dims(value)
    return math.prod(_UNKNOWN if dim is None else dim for dim in dims or ())
