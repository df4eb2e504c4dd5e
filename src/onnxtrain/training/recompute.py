"""Computing values of the forward pass once more for the gradients, instead of keeping them.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). Here it is chosen value by value: what elementwise
ops, normalisations and copies give is computed again, and some products of matrices where that saves most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.op_facts import ELEMENTWISE, MOVES, PRODUCTS, SHAPE_READERS, VIEWS
from onnxtrain.passes import remove_unread_nodes

# Ops whose result is computed again: elementwise ops, moves, and ops that read each row once or twice. The functions of
# domain `onnxtrain` are fusions of such ops.
_CHEAP = ELEMENTWISE | MOVES | {
    *("LayerNormalization", "LogSoftmax", "Pad", "RMSNormalization", "Softmax", "Silu_float", "Hardtanh_float"),
    *("FlooredRMSNormalization_float", "InverseRMSNormalization_float", "LayerNormalizationTraining_float"),
}  # fmt: skip
_PRODUCTS = PRODUCTS | {
    *("MatrixProduct_float", "GemmBfloat16_float", "MatMulBfloat16_float", "MatMulPermutedRightBfloat16_float"),
}  # fmt: skip
_SHARE = 1 / 2
"""Of the work of all forward products, what is done again: a sixth more for a step, which has three of each."""
_LEAST = 64
"""Elements, counted with 1 for sizes that are not known, from which on a value is worth it."""


class RecomputePass(ir.passes.InPlacePass):
    """Rewrite gradients to read values that are computed again, when the gradients have come so far.

    Args:
        forward: names of the values of the forward pass.

    To be run last: nodes that compute the same are no longer to be merged.
    """

    def __init__(self, forward: Collection[str]) -> None:
        super().__init__()
        self._forward = frozenset(forward)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite in place; subgraphs, and what they read, stay."""
        graph = model.graph
        plan = _Plan(graph, self._forward)
        writer = _Writer(Emitter(graph, functions=model.functions), plan)
        readers = [node for node in graph if plan.is_gradient(node) and any(map(plan.repeats, node.inputs))]
        for node in readers:
            writer.rewrite(node)
        remove_unread_nodes(graph, plan.forward)
        return ir.passes.PassResult(model, bool(readers))


class _Plan:
    """Which values of the forward pass are kept for the gradients, and which are computed again.

    Attributes:
        forward: nodes that no gradient comes to: those of the forward pass, and copies of its results.
    """

    def __init__(self, graph: ir.Graph, names: Collection[str]) -> None:
        self.forward: set[ir.Node] = set()
        self._inputs = set(graph.inputs)
        for node in graph:
            if any(value.name in names for value in node.outputs) or self._is_copy(node):
                self.forward.add(node)
        self._products = set(_chosen([node for node in graph if node in self.forward]))
        self._kept: set[ir.Value] = set()
        self._repeated: dict[ir.Value, bool] = {}
        captured = {value for node in graph for value in _captured(node)}
        for node in graph:
            for value in node.outputs if node in self.forward else ():
                readers = [use.node for use in value.uses() if self.is_gradient(use.node)]
                fixed = value.is_graph_output() or value in captured or not all(map(self._signal, readers))
                if fixed or (readers and not self._is_repeatable(value)):
                    self._kept.add(value)

    def repeats(self, value: ir.Value | None) -> bool:
        """Whether gradients read a value that is computed again."""
        return (
            value is not None
            and value not in self._kept
            and value.producer() in self.forward
            and self._is_repeatable(value)
        )

    def is_there(self, value: ir.Value) -> bool:
        """Whether a value is held anyway."""
        return value in self._kept or value.producer() is None

    def is_activation(self, value: ir.Value) -> bool:
        """Whether a value is none of the parameters and constants, and large."""
        return value.producer() is not None and value.dtype is not None and value.dtype.is_floating_point()

    def signal(self, node: ir.Node) -> ir.Value:
        """Returns an input of a node that gradients compute: once it is there they have come so far."""
        signal = self._signal(node)
        assert signal is not None
        return signal

    def _signal(self, node: ir.Node) -> ir.Value | None:
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if value is None or producer is None or producer in self.forward:
                continue
            if value.dtype is not None and value.dtype.is_floating_point():
                return value
        return None

    def is_gradient(self, node: ir.Node) -> bool:
        """Whether a node is behind the forward pass, and reads more than sizes."""
        return node not in self.forward and node.op_type not in SHAPE_READERS

    def _is_copy(self, node: ir.Node) -> bool:
        if node.domain != "" or node.op_type not in VIEWS:
            return False
        sources = [value.producer() for value in node.inputs if value is not None]
        return sources[:1] != [None] and all(source is None or source in self.forward for source in sources)

    def _is_repeatable(self, value: ir.Value) -> bool:
        """Whether a value can be computed from what is held anyway, and should be."""
        if value not in self._repeated:
            node = value.producer()
            self._repeated[value] = node is not None and self._is_worth_it(node, value)
        return self._repeated[value]

    def _is_worth_it(self, node: ir.Node, value: ir.Value) -> bool:
        if node not in self.forward or (node.op_type not in _CHEAP and node not in self._products):
            return False
        if value.dtype is None or not value.dtype.is_floating_point():
            return False
        if node.op_type not in VIEWS and _elements(value) < _LEAST:
            return False
        sources = [source for source in node.inputs if source is not None]
        return all(
            self.is_there(source) or not self.is_activation(source) or self._is_repeatable(source)
            for source in sources
        )


class _Writer:
    """Writes what is computed again, each value once, before the first gradient that reads it."""

    def __init__(self, op: Emitter, plan: _Plan) -> None:
        self._op, self._plan = op, plan
        self._again: dict[ir.Value, ir.Value] = {}
        self._zeros: dict[ir.Value, ir.Value] = {}

    def rewrite(self, node: ir.Node) -> None:
        """Makes a node read what is computed again."""
        graph = self._op.graph
        last = graph[-1]
        signal = self._plan.signal(node)
        for index, value in enumerate(node.inputs):
            if value is not None and self._plan.repeats(value):
                node.replace_input_with(index, self._computed_again(value, signal))
        new = list(_behind(graph, last))
        graph.remove(new)
        graph.insert_before(node, new)

    def _computed_again(self, value: ir.Value, signal: ir.Value) -> ir.Value:
        if value in self._again:
            return self._again[value]
        if self._plan.is_there(value) or not self._plan.is_activation(value):
            large = value.producer() is not None and self._plan.is_activation(value)
            self._again[value] = self._later(value, signal) if large else value
            return self._again[value]
        node = value.producer()
        assert node is not None
        inputs = [None if v is None else self._computed_again(v, signal) for v in node.inputs]
        outputs = [
            ir.Value(
                name=self._op.unique_name(f"{v.name}_again") if v.name else "", type=v.type, shape=v.shape
            )
            for v in node.outputs
        ]
        name = f"{node.name}_again" if node.name else None
        attributes = list(node.attributes.values())
        self._op.graph.append(
            ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, name=name)
        )
        self._again |= dict(zip(node.outputs, outputs, strict=True))
        return self._again[value]

    def _later(self, value: ir.Value, signal: ir.Value) -> ir.Value:
        """Returns a value, which is not there before a signal is: runtimes compute what they can as soon as they can.

        Its shape is known then only: a zero is added that nothing but the signal's numbers give.
        """
        op = self._op
        if signal not in self._zeros:
            first = op.Slice(op.Reshape(signal, [-1]), [0], [1])
            self._zeros[signal] = op.ReduceSum(
                op.Cast(op.Less(first, first), to=ir.DataType.INT64), keepdims=0
            )
        result: ir.Value = op.Reshape(value, op.Add(op.shape_of(value), self._zeros[signal]), allowzero=1)
        result.shape, result.type = value.shape, value.type
        return result


def _behind(graph: ir.Graph, node: ir.Node) -> Iterator[ir.Node]:
    """Yields the nodes that were appended behind another one."""
    found: list[ir.Node] = []
    for other in reversed(graph):
        if other is node:
            break
        found.append(other)
    yield from reversed(found)


def _captured(node: ir.Node) -> Iterator[ir.Value]:
    """Yields what subgraphs of a node read of the graph around them."""
    for attribute in node.attributes.values():
        graphs = {ir.AttributeType.GRAPH: [attribute.value], ir.AttributeType.GRAPHS: attribute.value}
        for graph in graphs.get(attribute.type, ()):
            for inner in ir.traversal.RecursiveGraphIterator(graph):
                yield from (value for value in inner.inputs if value is not None)


def _chosen(nodes: list[ir.Node]) -> Iterator[ir.Node]:
    """Yields products with weights that are done again: the first ones, whose results would be kept the longest.

    What a product with `depth` terms gives costs as many multiplications per number: only those that give at least as
    many numbers as they take are worth it.
    """
    sizes = {node: size for node in nodes if (size := _weight(node)) is not None}
    budget = _SHARE * sum(depth * width for depth, width in sizes.values())
    for node, (depth, width) in sizes.items():
        if width >= depth and depth * width <= budget:
            budget -= depth * width
            yield node


def _weight(node: ir.Node) -> tuple[int, int] | None:
    """Returns how many numbers of each row a product of a tensor with a weight takes and gives."""
    if node.op_type not in _PRODUCTS:
        return None
    given, result = (value and static_dims(value) for value in (node.inputs[0], node.outputs[0]))
    weight = node.inputs[1] and static_dims(node.inputs[1])
    if not given or not result or not weight or len(weight) != 2 or node.attributes.get_int("transA", 0) != 0:
        return None
    return None if given[-1] is None or result[-1] is None else (given[-1], result[-1])


def _elements(value: ir.Value) -> int:
    count = 1
    for size in static_dims(value) or ():
        count *= 1 if size is None else size
    return count
