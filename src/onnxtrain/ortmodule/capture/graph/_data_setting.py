"""Rewrites `tensor.data = value` in a captured function to a copy: a session cannot replace a tensor's storage."""

from __future__ import annotations

import torch
from torch import fx

from onnxtrain.ortmodule._torch import get_data
from onnxtrain.ortmodule.capture._nodes import memory_of, name_of, node_memory, writes_in_place

_REASSIGNED = "onnxtrain_reassigned"


def is_reassigned(placeholder: fx.Node) -> bool:
    """True if :func:`copy_set_data` has replaced an assignment to the input's `.data` with a copy.

    After a run, the input's `.data` must be set to the new value, not overwritten: tensors that shared the input's
    previous memory, e.g. the base of a view, keep their values.
    """
    return _REASSIGNED in placeholder.meta


def copy_set_data(graph_module: fx.GraphModule) -> None:
    """Replaces `input.data = value` in a graph with `input.data.copy_(value)`, unless the copy would change a result.

    Modifies the graph in place. Replaces all assignments or none: after an assignment that is kept, a copy would
    overwrite a different tensor.
    """
    graph = graph_module.graph
    nodes = [node for node in graph.nodes if _assigns_data(node)]
    if not nodes or not all(_is_equivalent_to_copy(graph, node) for node in nodes):
        return
    for node in nodes:
        target, value = node.args
        target.meta[_REASSIGNED] = True
        fake = target.meta["example_value"].data
        with graph.inserting_before(node):
            data = graph.call_function(get_data, (target,))
            written = graph.call_method("copy_", (data, value))
        # Copying the fake tensor onto itself increments its version counter, by which writes are recognized later.
        data.meta["example_value"] = written.meta["example_value"] = fake.copy_(fake)
        for user in list(node.users):
            # Dynamo decrements the version counter after an assignment.
            graph.erase_node(user)
        graph.erase_node(node)
    graph_module.recompile()


def refuse_set_data(graph_module: fx.GraphModule) -> None:
    """Raises NotImplementedError if a graph assigns to `.data`."""
    if any(_assigns_data(node) for node in graph_module.graph.nodes):
        raise NotImplementedError(
            "the graph makes a tensor use the memory of another one (tensor.data = ..., tensor.set_): use copy_"
        )


def _assigns_data(node: fx.Node) -> bool:
    return node.op != "placeholder" and name_of(node) == "set_"


_HIDDEN_VIEWS = frozenset({"detach", "_get_data_attr"})
"""Functions whose result shares the memory of their argument without being a view to autograd."""


def _is_alias_of_input(node: fx.Node) -> bool:
    """True if a node is an input, or aliases an input solely through `.data`, `detach` and views."""
    while node.op != "placeholder":
        fake = node.meta.get("example_value")
        aliases = isinstance(fake, torch.Tensor) and (fake._is_view() or name_of(node) in _HIDDEN_VIEWS)
        if not aliases or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return True


def _is_equivalent_to_copy(graph: fx.Graph, node: fx.Node) -> bool:
    """True if `input.data = value` can be replaced with a copy without changing any result.

    After the assignment, the input shares memory with `value`, and earlier aliases of the input keep the old memory and
    its values. A copy overwrites the old memory instead. The difference affects results only if `value`, or an alias of
    either tensor, is used after the assignment.
    """
    target, value = node.args[0], node.args[1] if len(node.args) == 2 else None
    if not isinstance(target, fx.Node) or not isinstance(value, fx.Node) or target.op != "placeholder":
        return False
    a, b = target.meta.get("example_value"), value.meta.get("example_value")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if any("lower_version_count" not in name_of(user) for user in node.users):
        return False
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    # An alias of an input. The fake tensors don't tell: assignments have changed the memory of the inputs' fakes.
    if _is_alias_of_input(value):
        return False
    order = {other: place for place, other in enumerate(graph.nodes)}
    now, before = order[node], {target}
    for other in graph.nodes:
        if other is target or other is node:
            continue
        fake = other.meta.get("example_value")
        if order[other] < now and isinstance(fake, torch.Tensor):
            of_target = any(source in before for source in other.all_input_nodes)
            if of_target and (fake._is_view() or name_of(other) in _HIDDEN_VIEWS):
                before.add(other)
        shares = other in before or (isinstance(fake, torch.Tensor) and memory_of(fake) == memory_of(b))
        if not shares or order[other] > now:
            continue
        if other.op == "placeholder" or any(order[user] > now for user in other.users):
            return False
    return True


def refuse_written_attributes(graph_module: fx.GraphModule) -> None:
    """Raises NotImplementedError if a graph writes to a tensor that is not an input, e.g. the state of an optimizer.

    Tracing the graph would write to the real tensor.
    """
    attributes: set[fx.Node] = set()
    memories: set[int | None] = set()
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            attributes.add(node)
            memories.add(node_memory(node))
        if not node.op.startswith("call") or not node.args or not writes_in_place(node):
            continue
        written: list[fx.Node] = []
        fx.node.map_arg(node.args[0], written.append)
        # The memory of a node without a fake tensor is unknown.
        if any(first in attributes or node_memory(first) in memories - {None} for first in written):
            raise NotImplementedError(
                f"the graph writes to a tensor that is not one of its inputs ({name_of(node)}): if an optimizer does, "
                "call optimizer.step() outside of the module"
            )
