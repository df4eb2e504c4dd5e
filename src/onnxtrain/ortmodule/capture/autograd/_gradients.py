"""Find out what PyTorch's autograd does in a captured graph: where gradients stop, and which writes it does not see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule.capture._nodes import (
    arguments_of,
    changes,
    functions_behind,
    is_plain,
    is_transformed,
    memory_of,
    plain_tensors_in,
    tensors_in,
)
from onnxtrain.ortmodule.capture.autograd._flow import GradientFlow, stops
from onnxtrain.ortmodule.capture.autograd._rehearsal import rehearsed


@contextlib.contextmanager
def unseen_by_hooks() -> Iterator[None]:
    """Switches the user's `saved_tensors_hooks` off, for computations of ORTModule's own."""
    # `torch.utils.checkpoint(use_reentrant=False)` counts the tensors that its hooks see, in the first run, in which
    # graphs are compiled, and in the second, and raises where the numbers differ. Hooks that do nothing, pushed on top
    # of the user's, are no way out: PyTorch (2.13) does not notice writes to a tensor that a hook has seen.
    before = _torch.defer_saved_tensors_hooks(True)
    try:
        yield
    finally:
        _torch.defer_saved_tensors_hooks(before)


def flow_of(graph_module: fx.GraphModule) -> GradientFlow:
    """Returns where gradients stop in a Dynamo graph, and what its writes do to them.

    If the graph writes to no memory that has a gradient, the fake tensors show it. Otherwise the graph is run once more
    on fake tensors with autograd on.

    Raises:
        NotImplementedError: the graph takes derivatives itself, PyTorch cannot differentiate it, or one memory would
            have two gradients: that of a tensor, and that of a detached alias that was written to.
    """
    _refuse_derivatives(graph_module)
    output = graph_module.graph.find_nodes(op="output")[0]
    if not torch.is_grad_enabled() and any(
        # A view of a parameter requires a gradient under `no_grad`, too.
        tensor.requires_grad and not tensor._is_view()
        for node in output.all_input_nodes
        if node.op != "placeholder"
        for tensor in tensors_in(node.meta.get("example_value"))
    ):
        raise NotImplementedError("the graph enables gradients that its caller has disabled (torch.no_grad)")
    # Backward functions of operators without a derivative are called NotImplemented. ONNX Runtime would differentiate
    # the operator's lowering where PyTorch raises.
    for node in output.all_input_nodes:
        if any(
            function.name().endswith("::NotImplemented")
            for function in functions_behind(node.meta.get("example_value"))
        ):
            raise NotImplementedError(
                "PyTorch has no derivative of an operator of the graph, whose result needs one"
            )
    if not _writes_to_gradients(graph_module):
        if _writes_to_factors(graph_module):
            # Raises where PyTorch's backward would.
            rehearsed(graph_module)
        return GradientFlow(_stopped_by_metadata(graph_module))
    if any(is_transformed(node.meta.get("example_value")) for node in graph_module.graph.nodes):
        raise NotImplementedError(
            "the graph writes, within a transform of torch.func, to a tensor that requires a gradient"
        )
    return rehearsed(graph_module)


def straight_through(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Returns the value of `after` with the gradient of `before`."""
    # Zero with the gradient of `before`, negated. inf - inf is NaN, whence the `where`.
    nothing = before.detach() - before
    return after.detach() - torch.where(nothing == 0, nothing, 0)


_DERIVATIVES = frozenset({"_grad_increment_nesting", "_jvp_increment_nesting"})
"""Functions that Dynamo (PyTorch 2.13) writes into a graph where `torch.func.grad` or `jvp` begins."""


def _refuse_derivatives(graph_module: fx.GraphModule) -> None:
    """Raises where the graph takes derivatives itself: traced without autograd they would be wrong."""
    if any(getattr(node.target, "__name__", "") in _DERIVATIVES for node in graph_module.graph.nodes):
        raise NotImplementedError(
            "the graph takes derivatives itself, by torch.func.grad, vjp, jvp or a function made of them"
        )


def _writes_to_factors(graph_module: fx.GraphModule) -> bool:
    """Returns whether the graph writes to a tensor without a gradient that backward may need.

    In `y = x * mask; mask.zero_()` the gradient of `x` needs `mask` as it was, so PyTorch's backward raises.
    """
    factors: set[int] = set()
    for node in graph_module.graph.nodes:
        arguments = [t for t in arguments_of(node) if is_plain(t)]
        if changes(node) and arguments and memory_of(arguments[0]) in factors:
            return True
        if any(t.requires_grad for t in tensors_in(node.meta.get("example_value"))):
            factors.update(memory_of(t) for t in arguments if not t.requires_grad)
    return False


def _writes_to_gradients(graph_module: fx.GraphModule) -> bool:
    """Returns whether the graph writes to memory that belongs, before or after, to a tensor with a gradient."""
    carrying: set[int] = set()
    written: set[int] = set()
    # Under `no_grad` a write of a value with a gradient, `buffer.add_(loss)`, leaves `buffer` without one: only its
    # place beside such an argument shows that the write must not be followed.
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
    """Returns the memory of a node's arguments if one of these requires a gradient, else nothing."""
    arguments = arguments_of(node)
    if not any(tensor.requires_grad for tensor in arguments):
        return set()
    return {memory_of(t) for t in arguments if is_plain(t)}


def _stopped_by_metadata(graph_module: fx.GraphModule) -> dict[fx.Node, frozenset[int]]:
    """Returns per node the indices of its results that carry no gradient, as the fake tensors show it."""
    # The ATen graph would not show it: `torch.no_grad` leaves no node there, and functionalisation drops `detach` as an
    # alias.
    enabled = True
    stopped = {}
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if node.target is _torch.set_grad_enabled:
            enabled = bool(node.args[0])
        if node.op in ("placeholder", "output"):
            continue
        if is_transformed(value):
            # `requires_grad` of Dynamo's fake tensors inside of `torch.vmap` is wrong (PyTorch 2.13): look for
            # `no_grad` and `detach` themselves.
            if not enabled or node.target in ("detach", "detach_", torch.detach):
                stopped[node] = frozenset(range(len(tensors_in(value))))
        else:
            arguments = arguments_of(node)
            if any(tensor.requires_grad for tensor in arguments):
                stopped[node] = stops(value, arguments, enabled)
    return {node: places for node, places in stopped.items() if places}
