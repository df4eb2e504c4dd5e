"""Recomputes activations in the backward pass instead of keeping them from the forward pass.

As in Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), but values are chosen individually, not layer
by layer: results of elementwise ops, normalizations, views and some matrix products are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import onnx_ir as ir

from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.op_facts import ELEMENTWISE, MOVES, PRODUCTS, SHAPE_READERS, VIEWS
from onnxtrain.passes import remove_unread_nodes

# Memory-bound ops, which take about as long as reading their inputs: elementwise ops, moves, and ops that read each row
# once or twice. The names with `_float` are functions of domain `onnxtrain` that fuse such ops.
_CHEAP = ELEMENTWISE | MOVES | {
    *("LayerNormalization", "LogSoftmax", "Pad", "RMSNormalization", "Softmax", "Silu_float", "Hardtanh_float"),
    *("FlooredRMSNormalization_float", "InverseRMSNormalization_float", "LayerNormalizationTraining_float"),
}  # fmt: skip
# Matrix products, a share of which is recomputed, and the functions that replace them.
_PRODUCTS = PRODUCTS | {
    *("MatrixProduct_float", "Linear_float", "LinearRelu_float"),
    *("GemmBfloat16_float", "MatMulBfloat16_float", "MatMulPermutedRightBfloat16_float"),
}  # fmt: skip
_SHARE = 1 / 2
"""Largest share of the forward matrix products, by work, that is recomputed.

A training step has three products per layer (one forward, two for the gradients), so recomputing half of the forward
products adds a sixth of the time.
"""
_LEAST = 64
"""Values with fewer elements are kept: recomputing them saves too little memory. An unknown size counts as 1."""


class RecomputePass(ir.passes.InPlacePass):
    """Saves memory by recomputing activations in the backward pass instead of keeping them from the forward pass.

    No later pass may merge equal nodes, because that would undo the recomputation.

    Args:
        forward: names of the values of the forward pass, e.g. {"h", "logits", "loss"}.
        products: True to also recompute a share of the matrix products; False to recompute only the results of cheap
            ops, which takes hardly any time.
    """

    def __init__(self, forward: Collection[str], *, products: bool = True) -> None:
        super().__init__()
        self._forward = frozenset(forward)
        self._with_products = products

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites a training model in place. Subgraphs, and the values that they read, are not changed."""
        graph = model.graph
        plan = _Plan(graph, self._forward, products=self._with_products)
        writer = _Writer(Emitter(graph, functions=model.functions), plan)
        readers = [node for node in graph if plan.is_gradient(node) and any(map(plan.repeats, node.inputs))]
        for node in readers:
            writer.rewrite(node)
        remove_unread_nodes(graph, plan.forward)
        return ir.passes.PassResult(model, bool(readers))


class _Plan:
    """Decides which values of the forward pass are kept for the gradients, and which are recomputed.

    Attributes:
        forward: nodes of the forward pass, and the views of its results that gradient rules have added.
    """

    def __init__(self, graph: ir.Graph, names: Collection[str], *, products: bool) -> None:
        self.forward: set[ir.Node] = set()
        self._of_weights = products
        for node in graph:
            if any(value.name in names for value in node.outputs) or self._is_copy(node):
                self.forward.add(node)
        forward = [node for node in graph if node in self.forward]
        self._products = set(_products_to_recompute(forward)) if products else set[ir.Node]()
        self._kept: set[ir.Value] = set()
        self._repeated: dict[ir.Value, bool] = {}
        # Subgraphs of control flow are not rewritten, so the values that they read must be kept.
        everywhere = ir.traversal.RecursiveGraphIterator(graph)
        captured = {value for node in everywhere if node.graph is not graph for value in node.inputs}
        for node in graph:
            for value in node.outputs if node in self.forward else ():
                readers = [use.node for use in value.uses() if self.is_gradient(use.node)]
                # Without a signal nothing could delay the recomputation: ONNX Runtime would run it immediately.
                fixed = value.is_graph_output() or value in captured or not all(map(self.signal, readers))
                if fixed or (readers and not self._is_repeatable(value)):
                    self._kept.add(value)

    def repeats(self, value: ir.Value | None) -> bool:
        """True if a value is recomputed for the gradients that read it."""
        return (
            value is not None
            and value not in self._kept
            and value.producer() in self.forward
            and self._is_repeatable(value)
        )

    def is_available(self, value: ir.Value) -> bool:
        """True if a value is in memory anyway, because it is a kept activation, an input or a constant."""
        return value in self._kept or value.producer() is None

    def is_activation(self, value: ir.Value) -> bool:
        """True if a value is a floating-point result of a node, not a parameter, constant or size."""
        return value.producer() is not None and value.dtype is not None and value.dtype.is_floating_point()

    def signal(self, node: ir.Node) -> ir.Value | None:
        """Returns the first input of a gradient node that another gradient node computes, usually a cotangent.

        The gradient node cannot run before this input is computed. Returns None if there is no such input.
        """
        computed = (value for value in node.inputs if value is not None and self.is_activation(value))
        return next((value for value in computed if value.producer() not in self.forward), None)

    def is_gradient(self, node: ir.Node) -> bool:
        """True if a node belongs to the backward pass and reads the elements of its inputs, not only their sizes."""
        # A Shape does not keep an activation in memory: ONNX Runtime runs it as soon as the activation is computed.
        return node not in self.forward and node.op_type not in SHAPE_READERS

    def _is_copy(self, node: ir.Node) -> bool:
        """True if a node is a view of forward results, such as a Reshape that a gradient rule has added."""
        if node.domain != "" or node.op_type not in VIEWS:
            return False
        sources = [value.producer() for value in node.inputs if value is not None]
        return sources[:1] != [None] and all(source is None or source in self.forward for source in sources)

    def _is_repeatable(self, value: ir.Value) -> bool:
        """True if a value can be recomputed from values in memory and recomputing it pays off."""
        # Memoized: a deep network has exponentially many paths back through its values.
        if value not in self._repeated:
            self._repeated[value] = self._is_worth_it(value)
        return self._repeated[value]

    def _is_worth_it(self, value: ir.Value) -> bool:
        """True if recomputing a value saves memory and costs little time.

        The value must be a floating-point result of a cheap op (`_CHEAP`), or of a matrix product that
        `_products_to_recompute` selected. Unless the op is a view, the value must have at least `_LEAST` elements. Each
        input that is an activation must be in memory or recomputable. If the plan recomputes no products, at least one
        input must be an activation.
        """
        node = value.producer()
        if node not in self.forward or (node.op_type not in _CHEAP and node not in self._products):
            return False
        # Integers and masks are small compared with activations, and often sizes or indices that are needed early.
        if value.dtype is None or not value.dtype.is_floating_point():
            return False
        if node.op_type not in VIEWS and _elements(value) < _LEAST:
            return False
        sources = [source for source in node.inputs if source is not None]
        # Values computed from parameters alone, such as concatenated adapters, are small compared with activations.
        if not self._of_weights and not any(map(self.is_activation, sources)):
            return False
        return all(
            self.is_available(source) or not self.is_activation(source) or self._is_repeatable(source)
            for source in sources
        )


class _Writer:
    """Adds the recomputation of each value once, before the first gradient node that reads the value."""

    def __init__(self, op: Emitter, plan: _Plan) -> None:
        self._op, self._plan = op, plan
        self._again: dict[ir.Value, ir.Value] = {}

    def rewrite(self, node: ir.Node) -> None:
        """Makes a gradient node read recomputed values."""
        signal = self._plan.signal(node)
        assert signal is not None
        with self._op.placing(before=node):
            for index, value in enumerate(node.inputs):
                if value is not None and self._plan.repeats(value):
                    node.replace_input_with(index, self._computed_again(value, signal))

    def _computed_again(self, value: ir.Value, signal: ir.Value) -> ir.Value:
        """Returns the value to read in the backward pass in place of `value`.

        An activation is recomputed, or, if it is kept, delayed until `signal` is computed. Other values are returned
        unchanged.
        """
        if value in self._again:
            return self._again[value]
        if self._plan.is_available(value) or not self._plan.is_activation(value):
            large = value.producer() is not None and self._plan.is_activation(value)
            self._again[value] = self._delayed(value, signal) if large else value
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

    def _delayed(self, value: ir.Value, signal: ir.Value) -> ir.Value:
        """Returns a copy of `value` that depends on `signal`: ops that read the copy run after `signal` is computed."""
        # ONNX Runtime runs a node as soon as its inputs are computed. Without the dependency, recomputed values would
        # be in memory as long as kept values.
        result = self._op.reshape_after(value, self._op.shape_of(value), signal)
        result.shape, result.type = value.shape, value.type
        return result


def _products_to_recompute(nodes: list[ir.Node]) -> Iterator[ir.Node]:
    """Yields the matrix products with weights to recompute, up to :data:`_SHARE` of their work.

    The first products of the model are chosen, because their results are kept the longest. Recomputing one element of a
    product over `depth` terms costs `depth` multiplications, so a product only saves enough memory if its result is at
    least as large as its input (width >= depth).
    """
    sizes = {node: size for node in nodes if (size := _row_lengths(node)) is not None}
    # All products are assumed to have the same number of rows, so that depth * width is proportional to the work.
    budget = _SHARE * sum(depth * width for depth, width in sizes.values())
    for node, (depth, width) in sizes.items():
        if width >= depth and depth * width <= budget:
            budget -= depth * width
            yield node


def _row_lengths(node: ir.Node) -> tuple[int, int] | None:
    """Returns the row lengths (depth, width) of the input and the result of a matrix product with a weight.

    Returns None for other nodes, and if a length is symbolic.
    """
    # Products of two activations, as in attention, are not comparable with products with weights.
    if node.op_type not in _PRODUCTS:
        return None
    rows, result = (value and static_dims(value) for value in (node.inputs[0], node.outputs[0]))
    weight = node.inputs[1] and static_dims(node.inputs[1])
    if not rows or not result or not weight or len(weight) != 2 or node.attributes.get_int("transA", 0) != 0:
        return None
    return None if rows[-1] is None or result[-1] is None else (rows[-1], result[-1])


def _elements(value: ir.Value) -> int:
    """Returns the number of elements of a value, counting 1 for each unknown size."""
    return math.prod(1 if size is None else size for size in static_dims(value) or ())
