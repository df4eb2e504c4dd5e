"""Turns `assert` statements and `torch._check` calls of a captured function into extra outputs, checked after a run.

Dynamo (PyTorch 2.13) turns them into nodes; here their conditions become outputs of the graph. An `assert` about a
number that was read from a tensor is executed by Python, between two graphs
(`capture/dynamo/patches/_asserted_numbers.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._torch import assert_async, assert_scalar, torch_check
from onnxtrain.ortmodule.capture.graph._assumptions import (
    OF_ASSUMPTION,
    computed_from_tensors,
    index_in_range,
)
from onnxtrain.ortmodule.capture.graph._python_numbers import check_numbers, evaluate

Check = tuple[Callable[[Any, str], None], str]
"""A function `check(condition, message)` that raises if the condition is false, and the message to call it with."""


def mark_assertions(graph_module: fx.GraphModule) -> None:
    """Makes assertions raise as in eager PyTorch: AssertionError for `assert`, RuntimeError for `torch._check`.

    Also adds checks for Python arithmetic that may raise, see `check_numbers`, and turns the assertions that Dynamo
    derived from sizes into assumptions. Modifies the graph and nested graphs in place.
    """
    for part in graph_module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        graph = part.graph
        nodes = [node for node in graph.nodes if node.target in (assert_async, assert_scalar)]
        derived = [node for node in nodes if node.target is assert_scalar and not _is_check(node)]
        equalities = [node.args[0].args for node in derived if node.args[0].target is operator.eq]
        for node in nodes:
            condition, *rest = node.args
            if node in derived:
                # Dynamo inserts u0 >= 57 and u0 <= 57 before u0 == 57.
                if condition.target not in (operator.ge, operator.le) or condition.args not in equalities:
                    # E.g. "Runtime assertion failed for expression u0 >= 57 on node 'ge'".
                    assumed = str(rest[0]).removeprefix(_GENERATED_MESSAGES[1]).partition(" on node ")[0]
                    _insert_assumption(node, computed_from_tensors(condition), assumed.strip())
                _erase_with_unused_inputs(node)
                continue
            message = rest[0] if rest and not str(rest[0]).startswith(_GENERATED_MESSAGES) else ""
            # `torch._assert_async` would raise RuntimeError, and on a GPU asynchronously.
            node.target = _assert if node.target is assert_async else _check
            node.args = (condition, message)
        for node in list(graph.nodes):
            _insert_assumption(node, index_in_range(node), "index < size")
        graph_changed = check_numbers(graph)
        if graph_changed or nodes or any(node.target is _assume for node in graph.nodes):
            part.recompile()


def _insert_assumption(node: fx.Node, condition: fx.Node | None, text: str) -> None:
    """Inserts an assumption before a node, unless its condition is None."""
    if condition is not None:
        with node.graph.inserting_before(node):
            assumption = node.graph.call_function(_assume, (condition, f"expected {text}"))
        assumption.meta[OF_ASSUMPTION] = True


# Dynamo (PyTorch 2.13) inserts these messages if the user gave none.
_GENERATED_MESSAGES = ("assertion error", "Runtime assertion failed for expression")


def _is_check(node: fx.Node) -> bool:
    """True if a node is a call to `torch._check`, not an assertion that Dynamo derived from sizes."""
    return bool(node.meta.get("_fx_runtime_assert_preserve"))


def _erase_with_unused_inputs(node: fx.Node) -> None:
    """Removes a node, and the symbolic numbers and conditions that only this node used, directly or indirectly."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for source in inputs:
        value = source.meta.get("example_value")
        is_number = isinstance(value, torch.SymBool | torch.SymInt | torch.SymFloat)
        if source.op == "call_function" and is_number and not source.users:
            _erase_with_unused_inputs(source)


def assertions_to_outputs(graph_module: fx.GraphModule) -> list[Check]:
    """Replaces the assertions of a graph with additional outputs to be checked after a run, in place.

    The output is the asserted condition or, for a check of Python arithmetic (`evaluate`), the number to check. Nested
    graphs are not modified.

    Args:
        graph_module: the graph, after `mark_assertions`.

    Returns:
        For each additional output, the function that checks its value, and the second argument of the function: the
        error message or, for `evaluate`, the name of the Python function.
    """
    graph = graph_module.graph
    nodes = [node for node in graph.nodes if node.target in (_assert, _check, _assume, evaluate)]
    if not nodes:
        return []
    output = graph.find_nodes(op="output")[0]
    output.args = ((*output.args[0], *(node.args[0] for node in nodes)),)
    checks = [(_require if node.target is _assume else node.target, node.args[1]) for node in nodes]
    for node in nodes:
        graph.erase_node(node)
    graph_module.recompile()
    return checks


def _assert(condition: Any, message: str) -> None:
    """Raises AssertionError if the condition is false. An empty message is omitted."""
    if not condition:
        raise AssertionError(*([message] if message else []))


def without_assumptions(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Removes from a graph, in place, the checks of Dynamo's assumptions about data-dependent sizes.

    If PyTorch runs the graph, its operators check the sizes themselves.

    Returns:
        The same graph.
    """
    nodes = [node for node in graph_module.graph.nodes if OF_ASSUMPTION in node.meta]
    for node in reversed(nodes):
        graph_module.graph.erase_node(node)
    if nodes:
        graph_module.recompile()
    return graph_module


class AssumptionError(RuntimeError):
    """Dynamo's assumption about a data-dependent size does not hold, so the captured graph is not valid for the call.

    The call may be valid: e.g. where Dynamo assumes that two sizes are equal, eager PyTorch may broadcast.
    """


def _assume(condition: Any, message: str) -> None:
    """Marks an assumption about data-dependent sizes in a graph; does nothing when called.

    `assertions_to_outputs` replaces it with an output that `_require` checks.
    """


def _require(condition: Any, message: str) -> None:
    """Raises AssumptionError if the condition is false."""
    if not condition:
        raise AssumptionError(message)


def _check(condition: Any, message: str) -> None:
    """Raises the RuntimeError of `torch._check` if the condition is false."""
    torch_check(bool(condition), (lambda: message) if message else None)  # type: ignore[no-untyped-call]
