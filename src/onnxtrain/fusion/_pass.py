"""Rewrites the chains that patterns recognise as composite ops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import CompositeOp
from onnxtrain.fusion._patterns import Match, NodePattern
from onnxtrain.passes import remove_unread_chains


class KeepingPass(ir.passes.InPlacePass):
    """Base of passes that leave some nodes to ONNX Runtime's own kernels."""

    def __init__(self, kept: Collection[str] = ()) -> None:
        """Makes the pass.

        Args:
            kept: names of the first outputs of nodes that stay as they are, e.g. those of the forward graph.
        """
        super().__init__()
        self._kept = frozenset(kept)

    def keeps(self, node: ir.Node) -> bool:
        """Tells whether a node stays as it is."""
        return node.outputs[0].name in self._kept


def become(
    op: Emitter, node: ir.Node, composite: CompositeOp, attributes: Mapping[str, int | float | list[int]]
) -> None:
    """Makes a node a call of a composite op in float32, with the inputs and outputs that it has."""
    node.domain, node.op_type, _ = op.function(composite, ir.DataType.FLOAT)
    node.attributes.clear()
    for name, value in attributes.items():
        node.attributes.add(ir.convenience.convert_attribute(name, value))


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A composite op, and the computation in standard ops that it replaces.

    Attributes:
        composite: the op. The pattern binds the names of its inputs and attributes, `x` among them.
        pattern: the computation of its first output.
        where: further condition on the last node of the chain and the match.
        statistics: names of nodes that stop gradients, behind which other nodes may read statistics, e.g. ("mean",
            "stdev"). They then read the op's outputs after the first, in this order.
        saved: shape of a last output that only the gradient reads, from the shape of x; None if there is none.
    """

    composite: CompositeOp
    pattern: NodePattern
    where: Callable[[ir.Node, Match], bool]
    statistics: tuple[str, ...] = ()
    saved: Callable[[ir.Shape], ir.Shape] | None = None

    def find(self, node: ir.Node) -> Match | None:
        """Returns the match of the pattern if `node` is the last one of such a chain, else None."""
        return next((match for match in self.pattern.found(node) if self.where(node, match)), None)

    def rewrite(self, op: Emitter, last: ir.Node, match: Match) -> None:
        """Turns the last node of a chain into the composite op, and removes nodes that nothing reads any more."""
        x: ir.Value = match["x"]
        assert x.dtype is not None
        assert x.shape is not None
        # The last node itself is changed, so that its output keeps its name and its readers.
        stops: list[ir.Node] = [match[name] for name in self.statistics]
        # Nodes that only the chain read. They are collected before the inputs change.
        loose = [value.producer() for value in (*last.inputs, *(stop.inputs[0] for stop in stops)) if value]
        operands = [match[name] for name in self.composite.inputs]
        inputs = [v if isinstance(v, ir.Value) else op.const(v, x.dtype) for v in operands]
        last.domain, last.op_type, _ = op.function(self.composite, x.dtype)
        # The attributes of the standard op mean nothing to the composite one.
        last.attributes.clear()
        for name in self.composite.attributes:
            last.attributes.add(ir.convenience.convert_attribute(name, match[name]))
        last.resize_inputs(len(inputs))
        for index, value in enumerate(inputs):
            last.replace_input_with(index, value)
        shapes = [stop.outputs[0].shape for stop in stops] + ([self.saved(x.shape)] if self.saved else [])
        last.resize_outputs(1 + len(shapes))
        for output, name, shape in zip(last.outputs[1:], (*self.statistics, "saved"), shapes, strict=False):
            output.name = op.unique_name(f"{last.outputs[0].name}_{name}")
            output.shape, output.type = shape, x.type
        _move_before(last, stops)
        for stop, output in zip(stops, last.outputs[1:], strict=False):
            # The stop stays: no gradient may flow through a statistic that another node reads.
            stop.replace_input_with(0, output)
        remove_unread_chains(op.graph, loose)


class FusionPass(ir.passes.InPlacePass):
    """Rewrite each chain that one of the fusions recognises; the first fusion that matches wins."""

    def __init__(self, fusions: Sequence[Fusion]) -> None:
        super().__init__()
        self._fusions = fusions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        op: Emitter | None = None
        for node in tuple(model.graph):
            for fusion in self._fusions:
                # An earlier rewrite may have removed the node.
                match = fusion.find(node) if node.graph is model.graph else None
                if match is not None:
                    # Made on demand: an Emitter reads all names of the graph.
                    op = op or Emitter(model.graph, functions=model.functions)
                    fusion.rewrite(op, node, match)
                    break
        return ir.passes.PassResult(model, op is not None)


def _move_before(node: ir.Node, stops: Sequence[ir.Node]) -> None:
    """Moves a node to where the first of the statistics that `stops` read is computed."""
    # Readers of the statistics may stand before the last node of the chain, and now read its outputs.
    sources = [source for stop in stops if (value := stop.inputs[0]) and (source := value.producer())]
    if sources and node.graph is not None:
        graph, places = node.graph, {id(other): place for place, other in enumerate(node.graph)}
        front = min(sources, key=lambda source: places[id(source)])
        graph.remove(node)
        graph.insert_before(front, node)
