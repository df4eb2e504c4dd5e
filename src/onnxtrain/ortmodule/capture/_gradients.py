"""What PyTorch's autograd does in a captured graph: where gradients stop, and which writes it does not see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx

from onnxtrain.ortmodule import _torch
from onnxtrain.ortmodule.capture._fakes import (
    arguments_of,
    changes,
    functions_behind,
    is_plain,
    is_transformed,
    memory_of,
    plain_tensors_in,
    tensors_in,
)
from onnxtrain.ortmodule.capture._flow import GradientFlow, stops
from onnxtrain.ortmodule.capture._rehearsal import rehearsed


@contextlib.contextmanager
def unseen_by_hooks() -> Iterator[None]:
    """Switches the user's `saved_tensors_hooks` off, for computations that these hooks must not see.

    `torch.utils.checkpoint(use_reentrant=False)` counts the tensors that such hooks see, and compares two runs: in the
    first one graphs are compiled. Hooks of our own that do nothing would not do: PyTorch (2.13) does not notice that a
    tensor was written to that a hook has seen.
    """
    before = _torch.defer_saved_tensors_hooks(True)
    try:
        yield
    finally:
        _torch.defer_saved_tensors_hooks(before)


def flow_of(graph_module: fx.GraphModule) -> GradientFlow:
    """Returns what autograd does in a graph of Dynamo's.

    Where nothing with a gradient is written to, Dynamo's fake tensors tell. Else the graph is run once more on fake
    tensors, with autograd, which knows of each write whether it belongs to the gradient.

    Raises:
        NotImplementedError: it takes derivatives itself; PyTorch cannot differentiate it; or memory has two gradients
            (that of a tensor, and that of a detached one that was written to).
    """
    _refuse_derivatives(graph_module)
    output = graph_module.graph.find_nodes(op="output")[0]
    if not torch.is_grad_enabled() and any(
        tensor.requires_grad and not tensor._is_view()  # a view of a parameter requires one anyway
        for node in output.all_input_nodes
        if node.op != "placeholder"
        for tensor in tensors_in(node.meta.get("example_value"))
    ):
        raise NotImplementedError("it enables gradients where its caller has disabled them")
    for node in output.all_input_nodes:
        if any(
            function.name().endswith("::NotImplemented")
            for function in functions_behind(node.meta.get("example_value"))
        ):
            raise NotImplementedError(
                "PyTorch has no derivative of one of its operators, whose result needs one"
            )
    if not _writes_to_gradients(graph_module):
        if _writes_to_factors(graph_module):
            rehearsed(graph_module)  # raises where PyTorch's backward would
        return GradientFlow(_stopped_by_metadata(graph_module))
    if any(is_transformed(node.meta.get("example_value")) for node in graph_module.graph.nodes):
        raise NotImplementedError("it writes to what requires a gradient, within a transform of torch.func")
    return rehearsed(graph_module)


def straight_through(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The value of `after` with the gradient of `before`."""
    nothing = before.detach() - before
    return after.detach() - torch.where(nothing == 0, nothing, 0)


_DERIVATIVES = frozenset({"_grad_increment_nesting", "_jvp_increment_nesting"})


def _refuse_derivatives(graph_module: fx.GraphModule) -> None:
    """Raises where the graph takes derivatives: traced without autograd they would come out wrong."""
    if any(getattr(node.target, "__name__", "") in _DERIVATIVES for node in graph_module.graph.nodes):
        raise NotImplementedError(
            "torch.func.grad, vjp, jvp and what is made of them, as a part of the graph"
        )


def _writes_to_factors(graph_module: fx.GraphModule) -> bool:
    """Returns whether memory without a gradient is written to after it was an argument beside one that has a gradient.

    Backward may need it: a factor of a product, whose gradient PyTorch refuses then.
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
    """Whether memory is written to that ever belongs to a tensor that requires a gradient.

    Or whether it might be written to, under `torch.no_grad`, with what requires one.
    """
    carrying: set[int] = set()
    written: set[int] = set()
    beside: set[int] = (
        set()
    )  # memory of what is an argument under no_grad, beside one that requires a gradient
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
    """The memory of a node's arguments, if any of these requires a gradient."""
    arguments = arguments_of(node)
    if not any(tensor.requires_grad for tensor in arguments):
        return set()
    return {memory_of(t) for t in arguments if is_plain(t)}


def _stopped_by_metadata(graph_module: fx.GraphModule) -> dict[fx.Node, frozenset[int]]:
    """`torch.no_grad` regions leave no trace in an ATen graph, and `detach` is lost among the aliases."""
    enabled = True
    stopped = {}
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if node.target is _torch.set_grad_enabled:
            enabled = bool(node.args[0])
        if node.op in ("placeholder", "output"):
            continue
        if is_transformed(value):
            # What Dynamo says of values inside `torch.vmap` is not true: the causes themselves are looked for.
            if not enabled or node.target in ("detach", "detach_", torch.detach):
                stopped[node] = frozenset(range(len(tensors_in(value))))
        else:
            arguments = arguments_of(node)
            if any(tensor.requires_grad for tensor in arguments):
                stopped[node] = stops(value, arguments, enabled)
    return {node: places for node, places in stopped.items() if places}
