"""Determines where gradients stop in a captured graph, and which in-place writes autograd doesn't record."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule.capture._nodes import (
    arguments_of,
    backward_functions,
    is_plain,
    is_transformed,
    memory_of,
    name_of,
    plain_tensors_in,
    tensors_in,
    writes_in_place,
)
from onnxtrain.ortmodule.capture.autograd._flow import GradientFlow, results_without_gradient
from onnxtrain.ortmodule.capture.autograd._rehearsal import rehearsed


@contextlib.contextmanager
def unseen_by_hooks() -> Iterator[None]:
    """Context manager that disables the user's `saved_tensors_hooks` for ORTModule's own computations."""
    # `torch.utils.checkpoint(use_reentrant=False)` counts the tensors that its hooks receive in the first run, when
    # graphs are compiled, and in the second run, and raises if the counts differ. Pushing no-op hooks instead would not
    # do: PyTorch (2.13) doesn't detect in-place writes to a tensor that a hook has received.
    before = _torch.defer_saved_tensors_hooks(True)
    try:
        yield
    finally:
        _torch.defer_saved_tensors_hooks(before)


def flow_of(graph_module: fx.GraphModule) -> GradientFlow:
    """Determines how the gradients of a Dynamo graph in eager PyTorch differ from those of its nodes' formulas.

    Raises:
        NotImplementedError: the graph calls `torch.func.grad`, `vjp` or `jvp`, enables gradients that its caller has
            disabled, or needs the derivative of an operator without one; or ONNX Runtime cannot reproduce the gradients
            of its in-place writes, e.g. if a tensor and its detached alias would have different gradients.
    """
    flow = _recorded_flow(graph_module)
    statistics = _read_statistics(graph_module)
    if not statistics:
        return flow
    ended = {n: (*flow.ended.get(n, ()), *bases) for n, bases in statistics.items()}
    return dataclasses.replace(flow, ended={**flow.ended, **ended})


_NORMS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
"""Functions that update running statistics: arguments 1 and 2 in `torch.nn.functional`, 3 and 4 otherwise."""


def _read_statistics(graph_module: fx.GraphModule) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Finds training-mode normalizations whose updated running statistics are read by a later node.

    The gradient of a statistic ends at the normalization: PyTorch updates it without a gradient, and (in 2.13) without
    incrementing its version counter.

    Returns:
        For each of these normalizations, the nodes that allocated the memory of the statistics.
    """
    first: dict[int, fx.Node] = {}
    last: dict[int, int] = {}
    updates: list[tuple[int, fx.Node, list[int]]] = []
    for place, node in enumerate(graph_module.graph.nodes):
        for tensor in arguments_of(node):
            if is_plain(tensor):
                last[memory_of(tensor)] = place
        for tensor in plain_tensors_in(node.meta.get("example_value")):
            first.setdefault(memory_of(tensor), node)
        index = 1 if node.target in (functional.batch_norm, functional.instance_norm) else 3
        if name_of(node) in _NORMS and _argument(node, 5, "training", "use_input_stats"):
            running = [
                _argument(node, index + i, name) for i, name in enumerate(("running_mean", "running_var"))
            ]
            values = [source.meta.get("example_value") for source in running if isinstance(source, fx.Node)]
            updates.append((place, node, [memory_of(t) for value in values for t in plain_tensors_in(value)]))
    found = {n: tuple(first[m] for m in memories if last[m] > place) for place, n, memories in updates}
    return {node: bases for node, bases in found.items() if bases}


def _argument(node: fx.Node, index: int, *names: str) -> Any:
    """Returns an argument of a node, passed by position or by one of its names; None if it was not passed."""
    if index < len(node.args):
        return node.args[index]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def _recorded_flow(graph_module: fx.GraphModule) -> GradientFlow:
    """Determines the gradient flow of a Dynamo graph, ignoring in-place updates of running statistics.

    :func:`flow_of` adds the effect of these updates. If no in-place operation affects gradients, the flow is read from
    `requires_grad` of the fake tensors. Otherwise, the graph is run again on fake tensors, with autograd.

    A graph that overwrites a value that backward may need is also run again, to raise where PyTorch's backward would.

    Raises:
        NotImplementedError: for the reasons listed in :func:`flow_of`.
    """
    _refuse_derivatives(graph_module)
    output = graph_module.graph.find_nodes(op="output")[0]
    if not torch.is_grad_enabled() and any(
        # A view of a parameter requires a gradient even under `no_grad`.
        tensor.requires_grad and not tensor._is_view()
        for node in output.all_input_nodes
        if node.op != "placeholder"
        for tensor in tensors_in(node.meta.get("example_value"))
    ):
        raise NotImplementedError("the graph enables gradients that its caller has disabled (torch.no_grad)")
    # The backward function of an operator without a derivative is named NotImplemented. PyTorch raises there, but ONNX
    # Runtime would differentiate the operator's lowering.
    for node in output.all_input_nodes:
        if any(
            function.name().endswith("::NotImplemented")
            for function in backward_functions(node.meta.get("example_value"))
        ):
            raise NotImplementedError(
                "the graph needs the derivative of an operator for which PyTorch has none"
            )
    if not _writes_to_gradients(graph_module):
        if _writes_to_factors(graph_module):
            # Raises if PyTorch's backward would raise.
            rehearsed(graph_module)
        return GradientFlow(_stopped_by_metadata(graph_module))
    if any(is_transformed(node.meta.get("example_value")) for node in graph_module.graph.nodes):
        raise NotImplementedError(
            "inside a torch.func transform, the graph writes to a tensor that requires a gradient"
        )
    return rehearsed(graph_module)


def straight_through(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Returns the value of `after` with the gradient of `before`."""
    # Zero, with the negated gradient of `before`. The `where` replaces NaN, which is inf - inf.
    nothing = before.detach() - before
    return after.detach() - torch.where(nothing == 0, nothing, 0)


_DERIVATIVES = frozenset({"_grad_increment_nesting", "_jvp_increment_nesting"})
"""Functions that Dynamo (PyTorch 2.13) inserts into a graph where `torch.func.grad` or `jvp` begins."""


def _refuse_derivatives(graph_module: fx.GraphModule) -> None:
    """Raises NotImplementedError if the graph calls `torch.func.grad`, `vjp` or `jvp`, which need autograd."""
    if any(getattr(node.target, "__name__", "") in _DERIVATIVES for node in graph_module.graph.nodes):
        raise NotImplementedError(
            "the graph computes derivatives itself, with torch.func.grad, vjp, jvp or a function built on them"
        )


def _writes_to_factors(graph_module: fx.GraphModule) -> bool:
    """True if the graph writes to a tensor that doesn't require a gradient but that backward may need.

    In `y = x * mask; mask.zero_()`, the gradient of `x` needs the old value of `mask`, so PyTorch's backward raises.
    """
    factors: set[int] = set()
    for node in graph_module.graph.nodes:
        arguments = [t for t in arguments_of(node) if is_plain(t)]
        if writes_in_place(node) and arguments and memory_of(arguments[0]) in factors:
            return True
        if any(t.requires_grad for t in tensors_in(node.meta.get("example_value"))):
            factors.update(memory_of(t) for t in arguments if not t.requires_grad)
    return False


def _writes_to_gradients(graph_module: fx.GraphModule) -> bool:
    """True if in-place operations may affect the gradients of a graph, so that it must be run again with autograd.

    These are `detach_`, `requires_grad_`, writes to the memory of a tensor that requires a gradient before or after the
    write, and, under `no_grad`, writes of a value that requires a gradient to a tensor that doesn't.
    """
    carrying: set[int] = set()
    written: set[int] = set()
    # Under `no_grad`, writing a value that requires a gradient (`buffer.add_(loss)`) doesn't make `buffer` require one.
    # The other argument alone shows that the gradient must not follow the write.
    beside: set[int] = set()
    enabled = True
    for node in graph_module.graph.nodes:
        if node.target in ("detach_", torch.detach_, "requires_grad_"):
            return True
        if node.target is _torch.set_grad_enabled:
            enabled = bool(node.args[0])
        if not enabled:
            beside.update(_beside_gradients(node))
        for tensor in plain_tensors_in(node.meta.get("example_value")):
            if tensor.requires_grad:
                carrying.add(memory_of(tensor))
            if not tensor.is_inference() and tensor._version > 0:
                written.add(memory_of(tensor))
    return bool((carrying | beside) & written)


def _beside_gradients(node: fx.Node) -> set[int]:
    """Returns the storage identifiers of tensors that a node uses together with a tensor that requires a gradient.

    If the node runs under `no_grad` and writes to one of them, the gradient ends there.

    Returns:
        The identifiers (`memory_of`) of the node's arguments; an empty set if no argument requires a gradient.
    """
    arguments = arguments_of(node)
    if not any(tensor.requires_grad for tensor in arguments):
        return set()
    return {memory_of(t) for t in arguments if is_plain(t)}


def _stopped_by_metadata(graph_module: fx.GraphModule) -> dict[fx.Node, frozenset[int]]:
    """Finds where `no_grad` and `detach` stop gradients, from `requires_grad` of the fake tensors in node metadata.

    Returns:
        For each node that stops gradients, the indices of its results that don't require a gradient.
    """
    # The ATen graph doesn't show where gradients stop: `torch.no_grad` leaves no node in it, and functionalization
    # removes `detach` as an alias.
    enabled = True
    stopped = {}
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if node.target is _torch.set_grad_enabled:
            enabled = bool(node.args[0])
        if node.op in ("placeholder", "output"):
            continue
        if is_transformed(value):
            # `requires_grad` of Dynamo's fake tensors inside `torch.vmap` is wrong (PyTorch 2.13), so `no_grad` and
            # `detach` are detected instead.
            if not enabled or node.target in ("detach", "detach_", torch.detach):
                stopped[node] = frozenset(range(len(tensors_in(value))))
        else:
            arguments = arguments_of(node)
            if any(tensor.requires_grad for tensor in arguments):
                stopped[node] = results_without_gradient(value, arguments, enabled)
    return {node: places for node, places in stopped.items() if places}
