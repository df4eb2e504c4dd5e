"""`assert tensor, "message"` in a captured function: Dynamo leaves a node without a result that others use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from onnxtrain.ortmodule._torch import assert_async


def mark_assertions(graph_module: fx.GraphModule) -> None:
    """Makes the graph raise AssertionError, as the user's code does, where Dynamo wrote `torch._assert_async`."""
    for part in graph_module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        nodes = [node for node in part.graph.nodes if node.target is assert_async]
        for node in nodes:
            condition, *message = node.args
            said = message and message[0] != "assertion error"  # which Dynamo makes up
            node.target, node.args = _assert, (condition, message[0] if said else "")
        if nodes:
            part.recompile()


def take_assertions(graph_module: fx.GraphModule) -> list[str]:
    """Makes the conditions of a graph's assertions its last outputs; returns their messages."""
    graph = graph_module.graph
    nodes = [node for node in graph.nodes if node.target is _assert]
    if not nodes:
        return []
    output = graph.find_nodes(op="output")[0]
    output.args = ((*output.args[0], *(node.args[0] for node in nodes)),)
    messages = [node.args[1] for node in nodes]
    for node in nodes:
        graph.erase_node(node)
    graph_module.recompile()
    return messages


def checked(run: Callable[..., Any], messages: list[str]) -> Callable[..., Any]:
    """Returns `run` without its last results, which are the conditions that belong to the messages."""
    if not messages:
        return run

    def run_and_check(*args: Any) -> Any:
        results = run(*args)
        first = len(results) - len(messages)
        for condition, message in zip(results[first:], messages, strict=True):
            _assert(condition, message)
        return results[:first]

    return run_and_check


def _assert(condition: Any, message: str) -> None:
    if not condition:
        raise AssertionError(*([message] if message else []))
