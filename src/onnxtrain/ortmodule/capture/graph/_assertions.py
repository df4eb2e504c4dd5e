"""Checks the `assert` statements and `torch._check` calls of a captured function after its graph has run.

Dynamo (PyTorch 2.13) turns them into nodes; here their conditions become outputs of the graph. An `assert` about a
number that was read from a tensor is executed by Python, between two graphs
(`capture/dynamo/patches/_asserted_numbers.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._torch import assert_async, assert_scalar, torch_check
from onnxtrain.ortmodule.capture.graph._python_numbers import check_numbers, evaluate

Check = tuple[Callable[[Any, str], None], str]
"""A function that raises if a condition, its first argument, does not hold; and the message, its second."""


def mark_assertions(graph_module: fx.GraphModule) -> None:
    """Makes a graph raise what the user's code does: AssertionError by `assert`, RuntimeError by `torch._check`."""
    for part in graph_module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        nodes = [node for node in part.graph.nodes if node.target in (assert_async, assert_scalar)]
        for node in nodes:
            if node.target is assert_scalar and not _is_check(node):
                _erase(node)
                continue
            condition, *rest = node.args
            message = rest[0] if rest and not str(rest[0]).startswith(_MADE_UP) else ""
            # `torch._assert_async` raises RuntimeError, on a GPU at some later time.
            node.target = _assert if node.target is assert_async else _check
            node.args = (condition, message)
        if check_numbers(part.graph) or nodes:
            part.recompile()


# Dynamo (PyTorch 2.13) writes these texts where the user gave none.
_MADE_UP = ("assertion error", "Runtime assertion failed for expression")


def _is_check(node: fx.Node) -> bool:
    """Returns whether a node is a call of `torch._check`, and not what Dynamo itself concludes about sizes."""
    # What it concludes, e.g. that two sizes are equal where eager PyTorch may broadcast, need not hold. Where sizes do
    # not fit, the operator itself raises, with a text for the user.
    return bool(node.meta.get("_fx_runtime_assert_preserve"))


def _erase(node: fx.Node) -> None:
    """Removes a node, and the conditions and numbers that only it has read."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for source in inputs:
        value = source.meta.get("example_value")
        is_number = isinstance(value, torch.SymBool | torch.SymInt | torch.SymFloat)
        if source.op == "call_function" and is_number and not source.users:
            _erase(source)


def take_assertions(graph_module: fx.GraphModule) -> list[Check]:
    """Makes the conditions of a graph's assertions its last outputs; returns how each is checked."""
    graph = graph_module.graph
    nodes = [node for node in graph.nodes if node.target in (_assert, _check, evaluate)]
    if not nodes:
        return []
    output = graph.find_nodes(op="output")[0]
    output.args = ((*output.args[0], *(node.args[0] for node in nodes)),)
    checks = [(node.target, node.args[1]) for node in nodes]
    for node in nodes:
        graph.erase_node(node)
    graph_module.recompile()
    return checks


def checked(run: Callable[..., Any], checks: list[Check]) -> Callable[..., Any]:
    """Returns `run` with the last results, the conditions that belong to `checks`, checked and left out."""
    if not checks:
        return run

    def run_and_check(*args: Any) -> Any:
        results = run(*args)
        first = len(results) - len(checks)
        for condition, (check, message) in zip(results[first:], checks, strict=True):
            check(condition, message)
        return results[:first]

    return run_and_check


def _assert(condition: Any, message: str) -> None:
    """Raises AssertionError, with the message if that is not empty, if the condition does not hold."""
    if not condition:
        raise AssertionError(*([message] if message else []))


def _check(condition: Any, message: str) -> None:
    """Raises the RuntimeError of `torch._check` if the condition does not hold."""
    torch_check(bool(condition), (lambda: message) if message else None)  # type: ignore[no-untyped-call]
