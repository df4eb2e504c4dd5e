"""Cutting a graph with gradients into a forward and a backward half."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.autodiff import reads
from onnxtrain.op_facts import SHAPE_READERS, VIEWS
from onnxtrain.ortmodule.capture._checkpoint import region_of
from onnxtrain.passes import is_training_batch_norm, remove_unread_initializers, remove_unread_nodes


class Halves:
    """A graph with its gradients, to be cut in two.

    Args:
        joint: the graph with its gradients; copies of inputs may be added to it.
        count: how many inputs the graph has without the cotangents.
        cotangents: inputs of the joint graph.
        gradients: per input that needs one, its gradient, or None.
        unsaved: indices of inputs that backward must not read, as the caller may write to them. Eager PyTorch has
            saved a copy of them, in another dtype for example: the backward half takes it as a residual.

    Attributes:
        inputs: of the graph, without the cotangents.
        outputs: of the graph.
        present: the gradients that there are.
        read: what the backward half reads of the inputs.
        residuals: what it takes from the forward half.
        results: outputs and residuals of the forward half.
        saved: inputs of the backward half, before the cotangents.
    """

    def __init__(
        self,
        joint: ir.Model,
        count: int,
        cotangents: Sequence[ir.Value],
        gradients: Sequence[ir.Value | None],
        unsaved: Collection[int] = (),
    ) -> None:
        self._joint, self._cotangents = joint, cotangents
        self.inputs, self.outputs = list(joint.graph.inputs)[:count], list(joint.graph.outputs)
        self.present = [gradient for gradient in gradients if gradient is not None]
        forward, inputs = ancestors(self.outputs), set(self.inputs)
        writable = {self.inputs[index] for index in unsaved}
        self.residuals, self.read = _boundary(self.present, forward, inputs, writable)
        if not self.read.isdisjoint(writable):
            _copy_for_backward(joint.graph, [v for v in self.inputs if v in self.read & writable], forward)
            self.residuals, self.read = _boundary(self.present, ancestors(self.outputs), inputs, writable)
        self.results = [*self.outputs, *(value for value in self.residuals if value not in self.outputs)]
        self.saved = [*(value for value in self.inputs if value in self.read), *self.residuals]

    def forward(self) -> ir.Model:
        """From the inputs to outputs and residuals."""
        return cut(self._joint, self.inputs, self.results)

    def backward(self) -> ir.Model:
        """From what is saved, and the cotangents, to the gradients."""
        return cut(self._joint, [*self.saved, *self._cotangents], self.present)


def ancestors(values: Sequence[ir.Value]) -> set[ir.Node]:
    """All nodes that the values are computed from."""
    nodes: set[ir.Node] = set()
    stack = [value.producer() for value in values]
    while stack:
        node = stack.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        stack += [value.producer() for value in reads(node)]
    return nodes


def sources(values: Sequence[ir.Value]) -> set[ir.Value]:
    """All values that these depend on, and they themselves."""
    found: set[ir.Value] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        node = value.producer()
        if value not in found and node is not None:
            # A result of BatchNormalization in training does not depend on the running statistics.
            own = is_training_batch_norm(node) and value is node.outputs[0]
            stack += [v for v in node.inputs[:3] if v is not None] if own else reads(node)
        found.add(value)
    return found


_COPY = "onnxtrain.copy_for_backward"

_RECOMPUTED = VIEWS | SHAPE_READERS | {"Cast", "Expand", "Gather"}
"""Forward ops that the backward graph repeats: their results cost more memory than their computation costs time. Slice
and Split are none: the backward graph would keep the whole input for a part of it."""


def _boundary(
    values: Sequence[ir.Value], forward: set[ir.Node], inputs: set[ir.Value], writable: set[ir.Value]
) -> tuple[list[ir.Value], set[ir.Value]]:
    """What the computation of `values` takes from the forward nodes, and which graph inputs it reads."""
    residuals: dict[ir.Value, None] = {}
    read: set[ir.Value] = set()
    seen: set[ir.Value] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if value in inputs:
            read.add(value)
        elif (
            node is not None
            and (node in forward or _is_copy(node, writable))
            and (not writable.isdisjoint(reads(node)) or not _is_repeated(value, node, forward))
        ):
            residuals[value] = None
        elif node is not None:
            stack += reads(node)
    return list(residuals), read


def _copy_for_backward(graph: ir.Graph, values: Sequence[ir.Value], forward: set[ir.Node]) -> None:
    """Makes everything but the forward nodes read copies of these inputs."""
    for value in values:
        readers = [use for use in value.uses() if use.node not in forward]
        copy = ir.node("Identity", [value], metadata_props={_COPY: "yes"})
        copy.outputs[0].name = f"{value.name}_kept"
        copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
        graph.insert_before(graph[0], copy)  # nodes inside of a body may read it
        for node, index in readers:
            node.replace_input_with(index, copy.outputs[0])


def _is_copy(node: ir.Node, writable: set[ir.Value]) -> bool:
    return _COPY in node.metadata_props and node.inputs[0] in writable


def _is_repeated(value: ir.Value, node: ir.Node, forward: set[ir.Node]) -> bool:
    """Whether backward computes a value of the forward graph again: it is cheap, or inside of a checkpointed region."""
    if _is_cheap(node):
        return True
    region = region_of(node)
    readers = (usage.node for usage in value.uses())
    return (
        region is not None
        and not value.is_graph_output()
        and all(region_of(reader) == region for reader in readers if reader in forward)
    )


def _is_cheap(node: ir.Node) -> bool:
    if node.op_type == "Gather":  # of a shape, not of an embedding
        source = node.inputs[0]
        return source is not None and source.producer() is not None and source.dtype == ir.DataType.INT64
    return node.domain == "" and node.op_type in _RECOMPUTED


def cut(model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Model:
    """Returns the part of a model between these values, as a model of its own."""
    names_in = [str(value.name) for value in inputs]
    names_out = [str(value.name) for value in outputs]
    part = model.clone()
    graph = part.graph
    known = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
    known |= {str(v.name): v for node in graph for v in node.outputs}
    new_inputs = []
    for name, original in zip(names_in, inputs, strict=True):
        value = known[name]
        if value.producer() is not None:
            replacement = ir.Value(name=name, shape=original.shape, type=original.type)
            value.name = f"{name}_cut"
            value.replace_all_uses_with(replacement, replace_graph_outputs=True)
            value = replacement
        new_inputs.append(value)
        known[name] = value
    graph.outputs.clear()
    graph.outputs.extend(known[name] for name in names_out)
    graph.inputs.clear()
    graph.inputs.extend(new_inputs)
    remove_unread_nodes(graph)
    common.RemoveUnusedNodesPass()(part)
    remove_unread_initializers(graph, list(graph.initializers.values()))
    return part
