"""Counts the layers between each trained parameter and the loss, for layer-wise learning rate decay."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.op_facts import ELEMENTWISE, MOVES
from onnxtrain.selection import is_generated_name, layer_names

# Ops whose parameters belong to a layer next to them, also if they have two or more axes: scales, shifts, position
# embeddings.
_MINOR = (ELEMENTWISE | MOVES) - {"Gather", "GatherElements", "GatherND"} | {
    "BatchNormalization",
    "Expand",
    "GroupNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "PRelu",
    "RMSNormalization",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "Where",
}

_Layer = str | ir.Node
"""A layer: the name of a block, e.g. "encoder.layer.3", or a node that belongs to no block."""


def layers_behind(
    model: ir.Model, trained: Sequence[str], inputs: Collection[str] | None = None
) -> dict[str, int]:
    """Counts for each trained parameter the layers that come after its own on the longest path to the loss.

    A layer is a node that computes with a trained parameter of two or more axes, such as MatMul, Conv or Gather. Nodes
    whose names, or the names of their parameters, agree up to the first number are one layer: the block
    `encoder.layer.3`. Biases, norms and other parameters that are added or multiplied elementwise belong to the block
    in their name, or to the nearest layer before them. A parameter of several layers counts for the first one.

    Args:
        model: a canonical model, of which the trained parameters are initializers or inputs.
        trained: names of the trained parameters.
        inputs: names of the inputs that are not parameters; None if all inputs are data.

    Returns:
        The number of layers by name of parameter: 0 for the head of a classifier.
    """
    values = {value.name: value for value in model.graph.inputs} | dict(model.graph.initializers)
    parameters = {values[name]: name for name in trained if name in values}
    data = [value for value in model.graph.inputs if inputs is None or value.name in inputs]
    walk = _Walk(model.graph, data, parameters, _Blocks(trained))
    behind = walk.behind()
    most = max(behind.values(), default=0)
    result: dict[str, int] = {}
    for name in parameters.values():
        layers = walk.own[name] or walk.before[name]
        if not walk.own[name] and (block := walk.blocks.of_name(name)) in behind:
            layers = [block]
        # Before all layers: with the first one.
        counts = [behind[layer] for layer in layers] or [most]
        result[name] = max(counts) if walk.own[name] else min(counts)
    return result


class _Blocks:
    """Finds the block of a node or a parameter from its name, e.g. "encoder.layer.3" for "encoder.layer.3.fc.weight".

    Args:
        trained: names of the trained parameters.
    """

    def __init__(self, trained: Collection[str]) -> None:
        numbered = [parts for name in trained if any(map(str.isdigit, parts := _parts(name)))]
        # A number that all names share, e.g. that of "0.encoder.layer.3" in sentence-transformers, names no block.
        columns = zip(*numbered, strict=False) if len(numbered) > 1 else iter(())
        self._shared = len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))

    def of_name(self, name: str) -> str | None:
        """Returns the block in the name of a parameter, module or node; None if there is none."""
        parts = _parts(name)
        if is_generated_name(name) and not name.startswith("/"):
            return None
        last = next((i for i, part in enumerate(parts) if part.isdigit() and i >= self._shared), None)
        return None if last is None else ".".join(parts[: last + 1])

    def of_node(self, node: ir.Node, parameters: Sequence[str]) -> str | None:
        """Returns the block of a node that reads `parameters`; None if neither these nor its own names have one."""
        names = [*parameters, *layer_names(node)]
        return next((block for name in names if (block := self.of_name(name)) is not None), None)


def _parts(name: str) -> list[str]:
    """Splits the name of a parameter or node into the names of its modules.

    >>> _parts("layer1.0.conv1.weight"), _parts("/layer1/layer1.0/conv1/Conv")
    (['layer1', '0', 'conv1', 'weight'], ['layer1', '0', 'conv1', 'Conv'])
    """
    if "/" in name:
        # The TorchScript exporter writes the path of nn.Sequential's module 0 as "layer1/layer1.0".
        name = re.sub(r"(^|/)([^/]+)/(?=\2\.\d)", r"\1", name.lstrip("/")).replace("/", ".")
    return name.split(".")


class _Walk:
    """Follows the values of a graph from its inputs to the loss, and notes the order of its layers.

    Args:
        graph: graph of the model.
        data: inputs of the graph that are not parameters.
        parameters: names of the trained parameters, by value.
        blocks: the blocks of the model.

    Attributes:
        own: for each parameter, the layers that compute with it; [] for biases and norms.
        before: for each parameter, the nearest layers before the nodes that read it.
    """

    def __init__(
        self,
        graph: ir.Graph,
        data: Sequence[ir.Value],
        parameters: Mapping[ir.Value, str],
        blocks: _Blocks,
    ) -> None:
        self.blocks = blocks
        self.own: dict[str, list[_Layer]] = {name: [] for name in parameters.values()}
        self.before: dict[str, list[_Layer]] = {name: [] for name in parameters.values()}
        # The layers in the order of their first nodes, with the layers that read their results.
        self._next: dict[_Layer, set[_Layer]] = {}
        self._places: dict[_Layer, int] = {}
        # The nearest layers before a value that depends on the inputs of the model.
        sources: dict[ir.Value, set[_Layer]] = {value: set() for value in data}
        # The parameters from which other values are computed, e.g. by Transpose or Cast.
        made: dict[ir.Value, list[str]] = {value: [name] for value, name in parameters.items()}
        self._matrices = {
            name for value, name in parameters.items() if value.shape is None or value.shape.rank() > 1
        }
        for node in graph:
            read = list(_read(node))
            names = list(dict.fromkeys(name for value in read for name in made.get(value, ())))
            if not any(value in sources for value in read):
                made |= dict.fromkeys(node.outputs, names)
                continue
            before = set().union(*(sources[value] for value in read if value in sources))
            after = self._visit(node, names, before)
            sources |= dict.fromkeys(node.outputs, after)

    def _visit(self, node: ir.Node, names: Sequence[str], before: set[_Layer]) -> set[_Layer]:
        """Notes a node that reads the parameters `names`; returns the nearest layers before the node's results."""
        matrices = [name for name in names if name in self._matrices and node.op_type not in _MINOR]
        if not matrices:
            for name in names:
                self.before[name] += before
            return before
        layer: _Layer = self.blocks.of_node(node, matrices) or node
        self._next.setdefault(layer, set())
        place = self._places.setdefault(layer, len(self._places))
        for name in names:
            self.own[name].append(layer)
        for earlier in before - {layer}:
            self._next[earlier].add(layer)
        # A layer that is applied again lets those through that are first applied in between.
        return {layer, *(earlier for earlier in before if self._places[earlier] > place)}

    def behind(self) -> dict[_Layer, int]:
        """Returns for each layer the number of layers after it on the longest path."""
        behind: dict[_Layer, int] = {}
        for layer in reversed(self._next):
            # Layers that are applied several times feed each other; their order is that of the first application.
            later = [
                behind[other] for other in self._next[layer] if self._places[other] > self._places[layer]
            ]
            behind[layer] = 1 + max(later, default=-1)
        return behind


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """Yields the values that a node reads, also in its subgraphs."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        graphs = (
            [attribute.as_graph()]
            if attribute.type == ir.AttributeType.GRAPH
            else attribute.as_graphs()
            if attribute.type == ir.AttributeType.GRAPHS
            else []
        )
        for graph in graphs:
            for inner in graph:
                yield from _read(inner)
