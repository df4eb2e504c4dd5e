"""Splits a captured graph at custom `torch.autograd.Function`s, which PyTorch runs with their own backward."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.passes.split_module import split_module

from onnxtrain.ortmodule._torch import set_grad_enabled

# Dynamo (PyTorch 2.13) captures a custom function as one node of this higher-order operator.
_CUSTOM = "autograd_function_apply"


def has_custom_function(graph_module: fx.GraphModule) -> bool:
    """True if a graph applies a custom autograd function."""
    return any(_is_custom(node) for node in graph_module.graph.nodes)


def differentiated_outputs(graph_module: fx.GraphModule) -> frozenset[fx.Node]:
    """Returns the nodes at which to split a graph that ends before a call to `torch.autograd.grad`.

    These are the outputs that other nodes also read; for other graphs there are none. Autograd records one node per
    compiled graph, so no output of a graph depends on another output. If the graph is split after `q`, the output
    `y = q.sin()` depends on `q`, and `torch.autograd.grad(y, q)` works as in eager PyTorch.
    """
    # Dynamo (PyTorch 2.13) ends the graph before such a call, and names it in the reason.
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or "torch.autograd.grad" not in reason.reason:
        return frozenset()
    outputs = {
        node
        for node in graph_module.graph.find_nodes(op="output")[0].all_input_nodes
        if node.op not in ("placeholder", "get_attr")
    }
    return frozenset(node for node in outputs if node.users.keys() - {graph_module.graph.output_node()})


def keep_from_global_hooks(graph_module: fx.GraphModule) -> None:
    """Keeps global module hooks from running for a graph and its nested GraphModules, which the user did not create."""
    for part in graph_module.modules():
        if isinstance(part, fx.GraphModule):
            type(part)._call_impl = _call_without_hooks  # type: ignore[method-assign, assignment]


def _call_without_hooks(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def split_graph(
    graph_module: fx.GraphModule,
    compile_part: Callable[[fx.GraphModule], Callable[..., Any]],
    ends: frozenset[fx.Node] = frozenset(),
) -> fx.GraphModule:
    """Splits a graph into a sequence of parts. Each custom function is a separate part, which PyTorch runs.

    Args:
        graph_module: a Dynamo graph.
        compile_part: returns a callable that runs a part without custom functions.
        ends: additional nodes after which a part ends.

    Returns:
        A graph that calls the parts.
    """
    # Parts are numbered: all nodes before a custom function, the custom function, all nodes before the next one, ...
    numbers: dict[fx.Node, int] = {}
    without_grad: dict[int, bool] = {}
    number, ungraded = 0, False
    for node in graph_module.graph.nodes:
        if _is_custom(node):
            number += 1
            numbers[node] = number
            number += 1
        elif node.target is operator.getitem and _is_custom(node.args[0]):
            numbers[node] = numbers[node.args[0]]
        else:
            numbers[node] = number
        without_grad.setdefault(numbers[node], ungraded)
        if node in ends:
            number += 1
        if node.target is set_grad_enabled:
            ungraded = not node.args[0]
    _hide_unbound_sizes(graph_module)
    whole = split_module(graph_module, graph_module, lambda node: numbers[node], keep_original_order=True)
    for part in (graph_module, whole, *whole.children()):
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if _HIDDEN in node.meta:
                node.meta["example_value"] = node.meta.pop(_HIDDEN)
    for name, part in list(whole.named_children()):
        if not isinstance(part, fx.GraphModule) or not name.startswith("submod_"):
            continue
        keep_from_global_hooks(part)
        _return_tuple(part)
        # `split_module` (PyTorch 2.13) may put the node that enters `no_grad` and the node that leaves it into
        # different parts, but each part is traced separately.
        if torch.is_grad_enabled():
            _keep_grad_mode(part, without_grad[int(name.removeprefix("submod_"))])
        if has_custom_function(part):
            _record_backwards(part)
        run = part.forward if has_custom_function(part) else compile_part(part)
        setattr(whole, name, _Part(run, part))
    return whole


def _record_backwards(part: fx.GraphModule) -> None:
    """Lets autograd record the backward of custom functions if it runs with `create_graph=True`, as in eager mode."""
    # Dynamo (PyTorch 2.13) traces a backward inside `no_grad`, and the graph enters and leaves it: second derivatives
    # would miss the backward's own operators.
    for node in part.graph.nodes:
        if not _is_custom(node):
            continue
        backward = (
            getattr(part, str(node.args[1].target)) if isinstance(node.args[1], fx.Node) else node.args[1]
        )
        switches = backward.graph.find_nodes(op="call_function", target=set_grad_enabled)
        # With more switches, e.g. of `once_differentiable`, the inner ones would no longer restore the right mode.
        if [switch.args[0] for switch in switches] == [False, True]:
            for switch in switches:
                backward.graph.erase_node(switch)
            backward.recompile()


_HIDDEN = "hidden example_value"


def _hide_unbound_sizes(graph_module: fx.GraphModule) -> None:
    """Moves the `example_value` of nodes with a data-dependent size, e.g. `x[mask]`, to a different metadata key.

    Nodes are left alone if the size is itself the result of a node. `split_module` (PyTorch 2.13) turns the symbols in
    a value's sizes into inputs of each part that reads the value, and raises KeyError for a symbol without a node
    (pytorch#130534).
    """
    values = {
        node: node.meta["example_value"]
        for node in graph_module.graph.nodes
        if node.meta.get("example_value") is not None
    }
    bound = {value.node.expr for value in values.values() if isinstance(value, torch.SymInt | torch.SymFloat)}
    for node, value in values.items():
        if isinstance(value, torch.Tensor) and not free_symbols(value) <= bound:
            node.meta[_HIDDEN] = node.meta.pop("example_value")


def _is_custom(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.op == "call_function"
        and getattr(node.target, "__name__", "") == _CUSTOM
    )


def _keep_grad_mode(part: fx.GraphModule, ungraded: bool) -> None:
    """Makes a part that begins or ends inside `torch.no_grad` enter and leave `no_grad` itself.

    Args:
        part: the part; changed in place.
        ungraded: True if the part begins inside `torch.no_grad`.
    """
    inner = [node for node in part.graph.nodes if node.op not in ("placeholder", "output")]
    if ungraded and inner:
        with part.graph.inserting_before(inner[0]):
            part.graph.call_function(set_grad_enabled, (False,))
    for node in inner:
        if node.target is set_grad_enabled:
            ungraded = not node.args[0]
    if ungraded and inner:
        with part.graph.inserting_after(inner[-1]):
            part.graph.call_function(set_grad_enabled, (True,))
    part.recompile()


def _return_tuple(part: fx.GraphModule) -> None:
    """Makes a part with a single output return a tuple, as Dynamo's graphs do."""
    output = part.graph.find_nodes(op="output")[0]
    part.meta["single"] = not isinstance(output.args[0], tuple | list)
    if part.meta["single"]:
        output.args = ((output.args[0],),)
        part.recompile()


class _Part(torch.nn.Module):
    """Runs a compiled part in place of the GraphModule that `split_module` created.

    Args:
        run: the compiled part; returns a tuple or list.
        part: the GraphModule, after `_return_tuple`.
    """

    def __init__(self, run: Callable[..., Any], part: fx.GraphModule) -> None:
        super().__init__()
        self._run = run
        self._single = part.meta["single"]

    def forward(self, *args: Any) -> Any:
        result = self._run(*args)
        return result[0] if self._single else tuple(result)

    # Global module hooks must not run for this module.
    _call_impl = forward
    __call__ = forward
