"""Check the `assert` statements of a captured function, which Dynamo (PyTorch 2.13) turns into nodes.

The conditions become outputs of the graph, and are checked when it has run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from onnxtrain.ortmodule._torch import assert_async


def mark_assertions(graph_module: fx.GraphModule) -> None:
    """Makes a graph raise AssertionError, as the user's `assert` does, where Dynamo wrote `torch._assert_async`."""
    # `torch._assert_async` raises RuntimeError, on a GPU at some later time.
    for part in graph_module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        nodes = [node for node in part.graph.nodes if node.target is assert_async]
        for node in nodes:
            condition, *message = node.args
            # Dynamo (PyTorch 2.13) makes this text up for an assertion without a message.
            has_message = message and message[0] != "assertion error"
            node.target, node.args = _assert, (condition, message[0] if has_message else "")
        if nodes:
            part.recompile()


def take_assertions(graph_module: fx.GraphModule) -> list[str]:
    """Makes the conditions of a graph's assertions its last outputs; returns their messages, "" where there is none."""
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
    """Returns `run` with the last results, the conditions that belong to `messages`, checked and left out."""
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
    """Raises AssertionError, with the message if that is not empty, if the condition does not hold."""
    if not condition:
        raise AssertionError(*([message] if message else []))
