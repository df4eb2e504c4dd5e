"""Cuts a joint graph, i.e. a graph with its gradients, into a forward and a backward half."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.autodiff import reads
from onnxtrain.fusion import recomputed_nodes
from onnxtrain.fusion.elementwise import window_of
from onnxtrain.op_facts import SHAPE_READERS, VIEWS
from onnxtrain.ortmodule.capture.graph._checkpoint import region_of
from onnxtrain.passes import is_training_batch_norm, remove_unread_initializers, remove_unread_nodes


class Halves:
    """The forward and the backward half of a joint graph.

    Args:
        joint: the graph with its gradients. Copies of inputs may be added to it.
        cotangents: the inputs of `joint` that are cotangents.
        gradients: for each input that needs a gradient, the gradient, or None if no gradient reaches the input.
        needs: for each input except the cotangents, True if it needs a gradient, e.g. (True, False).
        unsaved: indices of inputs that the backward half must not read, because the caller may write to them before
            backward.
        recompute: True if backward computes chains of elementwise ops again where this saves memory.

    Attributes:
        joint: the graph with its gradients.
        inputs: the inputs of the graph, without the cotangents.
        outputs: the outputs of the graph.
        present: the gradients that are not None.
        slots: for each input, the index of its gradient in `present`, or None, e.g. (0, None).
        read: the inputs that the backward half reads.
        residuals: the values that the backward half takes from the forward half, outputs first.
        results: the results of the forward half: outputs, then residuals that are not outputs.
        saved: the inputs of the backward half that precede the cotangents: inputs of the graph, then residuals.
    """

    def __init__(
        self,
        joint: ir.Model,
        cotangents: Sequence[ir.Value],
        gradients: Sequence[ir.Value | None],
        needs: Sequence[bool],
        unsaved: Collection[int] = (),
        recompute: bool = False,
    ) -> None:
        self.joint, self._cotangents = joint, cotangents
        self.inputs, self.outputs = list(joint.graph.inputs)[: len(needs)], list(joint.graph.outputs)
        self.present = [gradient for gradient in gradients if gradient is not None]
        self.slots = slots_of(needs, gradients)
        writable = {self.inputs[index] for index in unsaved}
        if recompute:
            _share_copies(joint.graph, [self.inputs[index] for index in unsaved])
        forward, inputs = ancestors(self.outputs), set(self.inputs)
        self.residuals, self.read = _boundary(self.present, forward, inputs, writable)
        if not self.read.isdisjoint(writable):
            _copy_for_backward(joint.graph, [v for v in self.inputs if v in self.read & writable], forward)
            forward = ancestors(self.outputs)
            self.residuals, self.read = _boundary(self.present, forward, inputs, writable)
        outputs = set(self.outputs)
        if recompute:
            again = {node for node in forward if writable.isdisjoint(reads(node))}
            given = (inputs - writable) | outputs
            again = recomputed_nodes(again, self.residuals, given, joint.functions)
            self.residuals, self.read = _boundary(self.present, forward, inputs, writable, again)
        self.residuals.sort(key=lambda value: value not in outputs)
        self.results = [*self.outputs, *(value for value in self.residuals if value not in outputs)]
        self.saved = [*(value for value in self.inputs if value in self.read), *self.residuals]

    def forward(self) -> ir.Model:
        """Returns the forward half, which computes outputs and residuals from the inputs."""
        return cut(self.joint, self.inputs, self.results)

    def backward(self) -> ir.Model:
        """Returns the backward half, which computes the gradients from saved values and cotangents."""
        return cut(self.joint, [*self.saved, *self._cotangents], self.present)


def slots_of(needs: Sequence[bool], gradients: Sequence[ir.Value | None]) -> tuple[int | None, ...]:
    """Numbers the gradients that are not None.

    Args:
        needs: for each input, True if it needs a gradient, e.g. (True, False, True).
        gradients: for each input that needs a gradient, the gradient or None, e.g. [None, gradient].

    Returns:
        For each input, the number of its gradient, or None if it has no gradient, e.g. (None, None, 0).
    """
    present = itertools.count()
    slots = iter([None if gradient is None else next(present) for gradient in gradients])
    return tuple(next(slots) if need else None for need in needs)


def ancestors(values: Sequence[ir.Value]) -> set[ir.Node]:
    """Returns all nodes on which the values depend."""
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
    """Returns the given values and all values that they depend on."""
    dependencies: set[ir.Value] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        node = value.producer()
        if value not in dependencies and node is not None:
            # The output of a training-mode BatchNormalization doesn't depend on its running statistics. The module
            # writes to them in each call: as dependencies they would count as modified before a second derivative.
            normalised = is_training_batch_norm(node) and value is node.outputs[0]
            stack += [v for v in node.inputs[:3] if v is not None] if normalised else reads(node)
        dependencies.add(value)
    return dependencies


# Metadata key of Identity nodes that `_copy_for_backward` has added. The forward half must run these nodes.
_COPY = "onnxtrain.copy_for_backward"

# Forward ops that backward recomputes: this takes so little time that saving the results is not worth the memory. Slice
# and Split are not among them, because backward would have to save their whole input.
_RECOMPUTED = VIEWS | SHAPE_READERS | {"Cast", "Expand", "Gather"}


def _boundary(
    values: Sequence[ir.Value],
    forward: set[ir.Node],
    inputs: set[ir.Value],
    writable: set[ir.Value],
    again: Collection[ir.Node] = (),
) -> tuple[list[ir.Value], set[ir.Value]]:
    """Returns the residuals, and the graph inputs that backward reads.

    Args:
        values: the gradients.
        forward: the forward nodes.
        inputs: the graph inputs, without cotangents.
        writable: inputs that backward must not read, because the caller may write to them. Nodes that read such an
            input are not recomputed in backward; their results are residuals.
        again: forward nodes that are recomputed in backward, apart from cheap ones.
    """
    # A dict instead of a set, because the order of the residuals must be the same in each process.
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
            and (not writable.isdisjoint(reads(node)) or not _is_recomputed(value, node, forward))
            and (node not in again or value.is_graph_output())
        ):
            residuals[value] = None
        elif node is not None:
            stack += reads(node)
    return list(residuals), read


def _share_copies(graph: ir.Graph, values: Sequence[ir.Value]) -> None:
    """Makes all slices of an input read one copy of it, which is saved for backward in place of the slices.

    Args:
        graph: the joint graph.
        values: inputs that backward must not read.
    """
    for value in values:
        readers = [use for use in value.uses() if window_of(use.node) is not None]
        if len(readers) > 1:
            _add_copy(graph, value, f"{value.name}_sliced", readers)


def _copy_for_backward(graph: ir.Graph, values: Sequence[ir.Value], forward: set[ir.Node]) -> None:
    """Adds copies of inputs to a joint graph, and makes all nodes except the forward nodes read the copies.

    Args:
        graph: the joint graph.
        values: the inputs.
        forward: the forward nodes.
    """
    for value in values:
        _add_copy(
            graph, value, f"{value.name}_kept", [use for use in value.uses() if use.node not in forward]
        )


def _add_copy(graph: ir.Graph, value: ir.Value, name: str, readers: Sequence[tuple[ir.Node, int]]) -> None:
    """Adds a copy of an input, for the given readers: nodes, and the indices of their inputs."""
    copy = ir.node("Identity", [value], metadata_props={_COPY: "yes"})
    copy.outputs[0].name = name
    copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
    # Inserted first, because the body of any later node may read the copy.
    graph.insert_before(graph[0], copy)
    for node, index in readers:
        node.replace_input_with(index, copy.outputs[0])


def _is_copy(node: ir.Node, writable: set[ir.Value]) -> bool:
    """True if a node is a copy of an input in `writable`, added by `_copy_for_backward`."""
    return _COPY in node.metadata_props and node.inputs[0] in writable


def _is_recomputed(value: ir.Value, node: ir.Node, forward: set[ir.Node]) -> bool:
    """True if backward recomputes a forward value, because it is cheap or inside a checkpointed region."""
    if _is_cheap(node):
        return True
    # A value that is used outside its `torch.utils.checkpoint` region is available anyway.
    region = region_of(node)
    readers = (usage.node for usage in value.uses())
    return (
        region is not None
        and not value.is_graph_output()
        and all(region_of(reader) == region for reader in readers if reader in forward)
    )


def _is_cheap(node: ir.Node) -> bool:
    """True if recomputing a forward node is cheaper than saving its result."""
    # Gathering sizes from a shape is cheap, gathering rows of an embedding is not.
    if node.op_type == "Gather":
        source = node.inputs[0]
        return source is not None and source.producer() is not None and source.dtype == ir.DataType.INT64
    return node.domain == "" and node.op_type in _RECOMPUTED


def cut(model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Model:
    """Returns the part of a model that computes `outputs` from `inputs`, as a new model.

    Args:
        model: the model; not changed.
        inputs: values of the model that become the inputs of the part.
        outputs: values of the model that become the outputs of the part.
    """
    part = model.clone()
    graph = part.graph
    # The values of the clone are new objects with the same names.
    by_name = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
    by_name |= {str(v.name): v for node in graph for v in node.outputs}
    new_inputs = []
    for original in inputs:
        name = str(original.name)
        value = by_name[name]
        # A residual: its users are disconnected from the node that computes it.
        if value.producer() is not None:
            replacement = ir.Value(name=name, shape=original.shape, type=original.type)
            value.name = f"{name}_cut"
            value.replace_all_uses_with(replacement, replace_graph_outputs=True)
            value = replacement
        new_inputs.append(value)
        by_name[name] = value
    graph.outputs.clear()
    graph.outputs.extend(by_name[str(value.name)] for value in outputs)
    graph.inputs.clear()
    graph.inputs.extend(new_inputs)
    remove_unread_nodes(graph)
    common.RemoveUnusedNodesPass()(part)
    remove_unread_initializers(graph, list(graph.initializers.values()))
    return part
