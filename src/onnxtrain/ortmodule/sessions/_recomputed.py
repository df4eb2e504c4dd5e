"""Chooses elementwise results of the forward half that the backward half computes again, so that they are not saved.

A chain of elementwise ops takes as long as memory does. Where the chain is one program (`ElementwisePass`), computing
its results again takes less time than writing them in forward and reading them in backward.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnxtrain.emitter import static_dims
from onnxtrain.fusion.elementwise import program_leaves

_UNKNOWN = 64
"""Stands for a symbolic size when numbers of elements are compared."""


def recomputed_nodes(
    forward: Collection[ir.Node],
    residuals: Collection[ir.Value],
    given: Collection[ir.Value],
    functions: Mapping[ir.OperatorIdentifier, ir.Function],
) -> set[ir.Node]:
    """Returns the nodes of the forward half that the backward half runs, too.

    Elementwise nodes that read one another form a region. A region is recomputed if the values that it reads, and that
    backward would not have otherwise, have fewer elements than its results that backward reads.

    Args:
        forward: the nodes of the forward half that may run in both halves.
        residuals: the values that backward would take from forward.
        given: the values that backward has anyway: inputs that it may read, and outputs of the graph.
        functions: the function table of the model.
    """
    leaves = {node: found for node in forward if (found := program_leaves(node, functions)) is not None}
    wanted = [v for v in residuals if v.producer() in leaves and v not in given]
    kept = {v for v in residuals if v.producer() not in leaves} | set(given)
    chosen: set[ir.Node] = set()
    for region in _regions(leaves, wanted, kept):
        results = {v for v in wanted if v.producer() in region}
        sources = {leaf for node in region for leaf in leaves[node] if leaf.producer() not in region}
        if sum(map(_elements, sources - kept)) < sum(map(_elements, results)):
            chosen |= region
            kept |= sources
    return chosen


def _regions(
    leaves: Mapping[ir.Node, list[ir.Value]], wanted: Collection[ir.Value], kept: Collection[ir.Value]
) -> list[set[ir.Node]]:
    """Groups the elementwise nodes that the wanted values depend on; nodes that read one another are in one group.

    Args:
        leaves: for each elementwise node, the values that it reads.
        wanted: results of elementwise nodes.
        kept: values that need not be recomputed.
    """
    regions: list[set[ir.Node]] = []
    for value in wanted:
        nodes: set[ir.Node] = set()
        stack = [value.producer()]
        while stack:
            node = stack.pop()
            if node is None or node in nodes or node not in leaves:
                continue
            nodes.add(node)
            stack += [leaf.producer() for leaf in leaves[node] if leaf not in kept]
        apart = [region for region in regions if region.isdisjoint(nodes)]
        regions = [*apart, nodes.union(*(region for region in regions if region not in apart))]
    return regions


def _elements(value: ir.Value) -> int:
    dims = static_dims(value)
    return math.prod(_UNKNOWN if dim is None else dim for dim in dims or ())
