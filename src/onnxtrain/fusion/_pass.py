"""Rewriting what patterns recognise as composite ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import CompositeOp
from onnxtrain.fusion._patterns import Match, NodePattern
from onnxtrain.passes import remove_unread_chains


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A composite op and what it computes, written in standard ops.

    Attributes:
        composite: the op; its inputs and attributes are the names that the pattern binds, `x` among them.
        pattern: how its first output is computed.
        where: what else must hold of the last node and the match.
        statistics: names of the stops of gradients that other nodes may read: they then read the outputs behind the
            first, in this order.
        saved: shape of the output behind those, which the gradient reads, for that of x; None where there is none.
    """

    composite: CompositeOp
    pattern: NodePattern
    where: Callable[[ir.Node, Match], bool]
    statistics: tuple[str, ...] = ()
    saved: Callable[[ir.Shape], ir.Shape] | None = None

    def find(self, node: ir.Node) -> Match | None:
        """Returns what the names of the pattern stand for where a node is the last of such a chain."""
        return next((match for match in self.pattern.found(node) if self.where(node, match)), None)

    def rewrite(self, op: Emitter, last: ir.Node, match: Match) -> None:
        """Turns the last node of a chain into the composite op, and removes what nothing reads any more."""
        x: ir.Value = match["x"]
        assert x.dtype is not None
        assert x.shape is not None
        stops: list[ir.Node] = [match[name] for name in self.statistics]
        loose = [value.producer() for value in (*last.inputs, *(stop.inputs[0] for stop in stops)) if value]
        given = [match[name] for name in self.composite.inputs]
        inputs = [v if isinstance(v, ir.Value) else op.const(v, x.dtype) for v in given]
        last.domain, last.op_type, _ = op.function(self.composite, x.dtype)
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
            stop.replace_input_with(0, output)
        remove_unread_chains(op.graph, loose)


class FusionPass(ir.passes.InPlacePass):
    """Rewrite each chain that one of the fusions recognises, the first of them in this order."""

    def __init__(self, fusions: Sequence[Fusion]) -> None:
        super().__init__()
        self._fusions = fusions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place."""
        op: Emitter | None = None
        for node in tuple(model.graph):
            for fusion in self._fusions:
                match = fusion.find(node) if node.graph is model.graph else None
                if match is not None:
                    op = op or Emitter(model.graph, functions=model.functions)
                    fusion.rewrite(op, node, match)
                    break
        return ir.passes.PassResult(model, op is not None)


def _move_before(node: ir.Node, stops: Sequence[ir.Node]) -> None:
    """Moves a node to where the first of the stops that read it now is computed."""
    sources = [source for stop in stops if (value := stop.inputs[0]) and (source := value.producer())]
    if sources and node.graph is not None:
        graph, places = node.graph, {id(other): place for place, other in enumerate(node.graph)}
        front = min(sources, key=lambda source: places[id(source)])
        graph.remove(node)
        graph.insert_before(front, node)
