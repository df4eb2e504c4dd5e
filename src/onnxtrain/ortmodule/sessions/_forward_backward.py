"""Cut a graph with gradients into a forward and a backward half."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.autodiff import reads
from onnxtrain.op_facts import SHAPE_READERS, VIEWS
from onnxtrain.ortmodule.capture.graph._checkpoint import region_of
from onnxtrain.passes import is_training_batch_norm, remove_unread_initializers, remove_unread_nodes


class Halves:
    """A graph with its gradients, to be cut in two.

    Args:
        joint: the graph with its gradients. Copies of inputs may be added to it.
        cotangents: the inputs of `joint` for cotangents.
        gradients: per input that needs a gradient, the gradient; None if no gradient reaches the input.
        needs: per input without the cotangents, whether it needs a gradient, e.g. (True, False).
        unsaved: indices of inputs that the backward half must not read, since the caller may write to them before it.

    Attributes:
        joint: the graph with its gradients.
        inputs: the inputs of the graph, without the cotangents.
        outputs: the outputs of the graph.
        present: the gradients that are not None.
        slots: per input, the index of its gradient among `present`, e.g. (0, None).
        read: the inputs that the backward half reads.
        residuals: the values that the backward half takes from the forward half, outputs first.
        results: the results of the forward half: outputs, then residuals that are no outputs.
        saved: the inputs of the backward half before the cotangents: inputs of the graph, then residuals.
    """

    def __init__(
        self,
        joint: ir.Model,
        cotangents: Sequence[ir.Value],
        gradients: Sequence[ir.Value | None],
        needs: Sequence[bool],
        unsaved: Collection[int] = (),
    ) -> None:
        self.joint, self._cotangents = joint, cotangents
        self.inputs, self.outputs = list(joint.graph.inputs)[: len(needs)], list(joint.graph.outputs)
        self.present = [gradient for gradient in gradients if gradient is not None]
        self.slots = slots_of(needs, gradients)
        forward, inputs = ancestors(self.outputs), set(self.inputs)
        writable = {self.inputs[index] for index in unsaved}
        self.residuals, self.read = _boundary(self.present, forward, inputs, writable)
        if not self.read.isdisjoint(writable):
            _copy_for_backward(joint.graph, [v for v in self.inputs if v in self.read & writable], forward)
            self.residuals, self.read = _boundary(self.present, ancestors(self.outputs), inputs, writable)
        outputs = set(self.outputs)
        self.residuals.sort(key=lambda value: value not in outputs)
        self.results = [*self.outputs, *(value for value in self.residuals if value not in outputs)]
        self.saved = [*(value for value in self.inputs if value in self.read), *self.residuals]

    def forward(self) -> ir.Model:
        """Returns the forward half: from the inputs to outputs and residuals."""
        return cut(self.joint, self.inputs, self.results)

    def backward(self) -> ir.Model:
        """Returns the backward half: from saved values and cotangents to the gradients."""
        return cut(self.joint, [*self.saved, *self._cotangents], self.present)


def slots_of(needs: Sequence[bool], gradients: Sequence[ir.Value | None]) -> tuple[int | None, ...]:
    """Returns per input the index of its gradient among those that are not None; None if it has none.

    Args:
        needs: per input, whether it needs a gradient, e.g. (True, False, True).
        gradients: per input that needs a gradient, the gradient or None, e.g. [None, gradient].
    """
    present = itertools.count()
    slots = iter([None if gradient is None else next(present) for gradient in gradients])
    return tuple(next(slots) if need else None for need in needs)


def ancestors(values: Sequence[ir.Value]) -> set[ir.Node]:
    """Returns all nodes from which the values are computed."""
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
    """Returns all values on which these depend, and these values themselves."""
    dependencies: set[ir.Value] = set()
    stack = list(values)
    while stack:
        value = stack.pop()
        node = value.producer()
        if value not in dependencies and node is not None:
            # The output of a training BatchNormalization does not depend on its running statistics, which the module
            # writes to in each call. As a dependency they would count as changed when a second derivative is taken.
            normalised = is_training_batch_norm(node) and value is node.outputs[0]
            stack += [v for v in node.inputs[:3] if v is not None] if normalised else reads(node)
        dependencies.add(value)
    return dependencies


# Marks Identity nodes that `_copy_for_backward` has added: the forward half must run them.
_COPY = "onnxtrain.copy_for_backward"

# Keeping the results of these forward ops until backward would cost more memory than computing them again costs time.
# Slice and Split are not among them: to repeat one, backward would have to keep all of its input.
_RECOMPUTED = VIEWS | SHAPE_READERS | {"Cast", "Expand", "Gather"}


def _boundary(
    values: Sequence[ir.Value], forward: set[ir.Node], inputs: set[ir.Value], writable: set[ir.Value]
) -> tuple[list[ir.Value], set[ir.Value]]:
    """Returns the values that gradients take from forward nodes, and the graph inputs that they read.

    Args:
        values: the gradients.
        forward: the forward nodes.
        inputs: the graph inputs, without cotangents.
        writable: inputs that backward must not read. A node that reads one of them is not repeated in backward.
    """
    # A dict and not a set: the order of the residuals must be the same in each process.
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
    """Adds copies of these inputs, which all nodes but the forward nodes read."""
    for value in values:
        readers = [use for use in value.uses() if use.node not in forward]
        copy = ir.node("Identity", [value], metadata_props={_COPY: "yes"})
        copy.outputs[0].name = f"{value.name}_kept"
        copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
        # At the beginning: a node inside of the body of any later node may read the copy.
        graph.insert_before(graph[0], copy)
        for node, index in readers:
            node.replace_input_with(index, copy.outputs[0])


def _is_copy(node: ir.Node, writable: set[ir.Value]) -> bool:
    """True if `_copy_for_backward` has added a node for one of the inputs `writable`."""
    return _COPY in node.metadata_props and node.inputs[0] in writable


def _is_repeated(value: ir.Value, node: ir.Node, forward: set[ir.Node]) -> bool:
    """True if backward computes a forward value again: it is cheap, or inside of a checkpointed region."""
    if _is_cheap(node):
        return True
    # A value that leaves its region, of `torch.utils.checkpoint`, is there anyway.
    region = region_of(node)
    readers = (usage.node for usage in value.uses())
    return (
        region is not None
        and not value.is_graph_output()
        and all(region_of(reader) == region for reader in readers if reader in forward)
    )


def _is_cheap(node: ir.Node) -> bool:
    """True if a node of the forward half takes less to compute again than to keep."""
    # A Gather of sizes from a shape is cheap, one of rows of an embedding is not.
    if node.op_type == "Gather":
        source = node.inputs[0]
        return source is not None and source.producer() is not None and source.dtype == ir.DataType.INT64
    return node.domain == "" and node.op_type in _RECOMPUTED


def cut(model: ir.Model, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Model:
    """Returns the part of a model between these values as a model of its own.

    Args:
        model: the model, which stays as it is.
        inputs: values of the model that become the inputs of the part.
        outputs: values of the model that become the outputs of the part.
    """
    part = model.clone()
    graph = part.graph
    # The values of the copy are other objects, with the same names.
    by_name = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
    by_name |= {str(v.name): v for node in graph for v in node.outputs}
    new_inputs = []
    for original in inputs:
        name = str(original.name)
        value = by_name[name]
        # A residual: its readers are cut off from the node that computes it.
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
