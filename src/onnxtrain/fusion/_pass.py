"""Finds chains of nodes that match a pattern, and replaces each with a composite op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import CompositeOp
from onnxtrain.fusion._patterns import Match, NodePattern
from onnxtrain.passes import remove_unread_chains


class KeepingPass(ir.passes.InPlacePass):
    """Base class for passes that skip nodes by name, so that ONNX Runtime's own kernels compute them."""

    def __init__(self, kept: Collection[str] = ()) -> None:
        """Creates the pass.

        Args:
            kept: names of the first outputs of nodes that must not be rewritten, e.g. the nodes of the forward graph.
        """
        super().__init__()
        self._kept = frozenset(kept)

    def keeps(self, node: ir.Node) -> bool:
        """True if a node must not be rewritten."""
        return node.outputs[0].name in self._kept


def become(
    op: Emitter, node: ir.Node, composite: CompositeOp, attributes: Mapping[str, int | float | list[int]]
) -> None:
    """Turns a node into a call to a composite op in float32; the node keeps its inputs and outputs."""
    node.domain, node.op_type, _ = op.function(composite, ir.DataType.FLOAT)
    node.attributes.clear()
    for name, value in attributes.items():
        node.attributes.add(ir.convenience.convert_attribute(name, value))


def set_inputs(node: ir.Node, inputs: Sequence[ir.Value | None]) -> None:
    """Makes `inputs` the inputs of a node, however many it had."""
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def sole_transpose(node: ir.Node) -> ir.Node | None:
    """Returns the Transpose in the same graph that alone reads the result of a node; None if there is no such node."""
    uses = node.outputs[0].uses()
    if node.outputs[0].is_graph_output() or len(uses) != 1:
        return None
    reader = next(iter(uses)).node
    same = reader.graph is node.graph and (reader.op_type, reader.domain) == ("Transpose", "")
    return reader if same else None


def take_over(value: ir.Value, last: ir.Node) -> None:
    """Removes `last`, the last node of a chain, and transfers its output's name and readers to `value`."""
    result = last.outputs[0]
    value.name, result.name = result.name, None
    value.shape, value.type = result.shape, result.type
    result.replace_all_uses_with(value, replace_graph_outputs=True)
    assert last.graph is not None
    last.graph.remove(last, safe=True)


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A composite op, and the chain of standard ops that it replaces.

    Attributes:
        composite: the composite op. The pattern binds the names of its inputs, one of which is `x`, and attributes.
        pattern: the computation of the op's first output.
        where: additional condition on the last node of the chain and the match.
        statistics: names that the pattern binds to stop-gradient nodes, e.g. ("mean", "stdev"). Nodes outside the chain
            may read these statistics. The fusion connects the stop-gradient nodes to outputs 1, 2, ... of the op.
        saved: function that computes the shape of an additional last output from the shape of x; only the backward pass
            reads this output. None if the op has no such output.
    """

    composite: CompositeOp
    pattern: NodePattern
    where: Callable[[ir.Node, Match], bool]
    statistics: tuple[str, ...] = ()
    saved: Callable[[ir.Shape], ir.Shape] | None = None

    def find(self, node: ir.Node) -> Match | None:
        """Returns the match if the pattern matches a chain of nodes that ends with `node`, else None."""
        return next((match for match in self.pattern.found(node) if self.where(node, match)), None)

    def rewrite(self, op: Emitter, last: ir.Node, match: Match) -> None:
        """Turns the last node of a chain into the composite op, and removes nodes whose outputs are no longer used."""
        x: ir.Value = match["x"]
        assert x.dtype is not None
        assert x.shape is not None
        # The last node itself is modified, so that its output keeps its name and readers.
        stops: list[ir.Node] = [match[name] for name in self.statistics]
        # Nodes that may become dead, collected before the inputs change.
        maybe_dead = [
            value.producer() for value in (*last.inputs, *(stop.inputs[0] for stop in stops)) if value
        ]
        operands = [match[name] for name in self.composite.inputs]
        inputs = [v if isinstance(v, ir.Value) else op.const(v, x.dtype) for v in operands]
        last.domain, last.op_type, _ = op.function(self.composite, x.dtype)
        # The standard op's attributes don't apply to the composite op.
        last.attributes.clear()
        for name in self.composite.attributes:
            last.attributes.add(ir.convenience.convert_attribute(name, match[name]))
        set_inputs(last, inputs)
        shapes = [stop.outputs[0].shape for stop in stops] + ([self.saved(x.shape)] if self.saved else [])
        last.resize_outputs(1 + len(shapes))
        for output, name, shape in zip(last.outputs[1:], (*self.statistics, "saved"), shapes, strict=False):
            output.name = op.unique_name(f"{last.outputs[0].name}_{name}")
            output.shape, output.type = shape, x.type
        _move_before(last, stops)
        for stop, output in zip(stops, last.outputs[1:], strict=False):
            # The stop-gradient node remains, so that no gradient flows through a statistic that another node reads.
            stop.replace_input_with(0, output)
        remove_unread_chains(op.graph, maybe_dead)


class FusionPass(ir.passes.InPlacePass):
    """Rewrites each chain of nodes that one of the fusions recognizes; the first matching fusion is applied."""

    def __init__(self, fusions: Sequence[Fusion]) -> None:
        super().__init__()
        self._fusions = fusions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place."""
        op, modified = Emitter(model.graph, functions=model.functions), False
        for node in tuple(model.graph):
            for fusion in self._fusions:
                # An earlier rewrite may have removed the node.
                match = fusion.find(node) if node.graph is model.graph else None
                if match is not None:
                    fusion.rewrite(op, node, match)
                    modified = True
                    break
        return ir.passes.PassResult(model, modified)


def _move_before(node: ir.Node, stops: Sequence[ir.Node]) -> None:
    """Moves a fused node up in the graph, before the stop-gradient nodes `stops`, which will read its outputs.

    The node is inserted before the first of the nodes that compute the inputs of `stops`.
    """
    # Readers of the statistics may precede the last node of the chain, whose outputs they now read.
    sources = [source for stop in stops if (value := stop.inputs[0]) and (source := value.producer())]
    if sources and node.graph is not None:
        graph, places = node.graph, {id(other): place for place, other in enumerate(node.graph)}
        front = min(sources, key=lambda source: places[id(source)])
        graph.remove(node)
        graph.insert_before(front, node)
