"""Read what Dynamo's fake tensors tell of a captured graph: memory, sizes, gradients, and which nodes write."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._torch import is_functorch_wrapped_tensor, pytree

_IN_PLACE = frozenset(
    function
    for name, function in vars(operator).items()
    if name == "setitem" or (name.startswith("__i") and f"__{name[3:]}" in vars(operator))
)
"""`operator.iadd`, `operator.setitem` and the like."""


def example_values(graph_module: fx.GraphModule) -> list[Any]:
    """Returns what Dynamo knows of each input: a fake tensor or a symbolic integer."""
    return [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]


def fake_mode_of(graph_module: fx.GraphModule) -> Any:
    """Returns the mode of Dynamo's fake tensors; None for a graph of no tensor and no symbolic integer.

    A graph whose inputs are symbolic integers alone makes tensors of these sizes, which needs the mode of its results:
    without it PyTorch's kernels are called ("SymIntArrayRef expected to contain only concrete integers").
    """
    values = example_values(graph_module)
    if not any(hasattr(value, "fake_mode") for value in values) and is_symbolic(graph_module):
        values = [node.meta.get("example_value") for node in graph_module.graph.nodes]
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)


def is_symbolic(graph_module: fx.GraphModule) -> bool:
    """Returns whether a graph has a symbolic integer among its inputs."""
    return any(isinstance(value, torch.SymInt) for value in example_values(graph_module))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a value, e.g. the results of a node with several."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def plain_tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a value whose memory can be told from that of others."""
    return [tensor for tensor in tensors_in(value) if is_plain(tensor)]


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether the memory of a tensor can be told from that of others: sparse and batched ones hide it."""
    return tensor.layout == torch.strided and not is_functorch_wrapped_tensor(tensor)


def arguments_of(node: fx.Node) -> list[torch.Tensor]:
    """Returns the fake tensors among the arguments of a node."""
    return [t for source in node.all_input_nodes for t in tensors_in(source.meta.get("example_value"))]


def map_tensors(function: Callable[[int, torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns the value with `function` of each tensor in it and its number among these."""
    numbers: Iterable[int] = iter(range(len(tensors_in(value))))
    return pytree.tree_map_only(torch.Tensor, lambda t: function(next(numbers), t), value)  # type: ignore[call-overload]


def is_transformed(value: Any) -> bool:
    """Returns whether a value is a tensor inside of a transform of torch.func, e.g. `torch.vmap`."""
    return isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value)


def is_float(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def memory_of(tensor: torch.Tensor) -> int:
    """Returns what tells the memory of a tensor, fake ones among them, from that of others."""
    memory: int = tensor.untyped_storage()._cdata
    return memory


def node_memory(node: fx.Node) -> int | None:
    """Returns what tells the memory of a node's result from that of others; None if it is no such tensor."""
    value = node.meta.get("example_value")
    return memory_of(value) if isinstance(value, torch.Tensor) and is_plain(value) else None


def functions_behind(value: Any) -> set[Any]:
    """Returns the functions of autograd's graph behind a tensor."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad or is_transformed(value):
        return set()
    stack, seen = [value.grad_fn], set()
    while stack:
        current = stack.pop()
        if current is not None and current not in seen:
            seen.add(current)
            stack += [following for following, _ in current.next_functions]
    return seen


def saved_by(function: Any) -> Iterator[torch.Tensor]:
    """The tensors that a function of autograd has kept for backward."""
    for name in dir(function):
        if name.startswith("_saved_"):
            with contextlib.suppress(RuntimeError):  # it has been changed, which backward will say
                yield from tensors_in(getattr(function, name))


def changes(node: fx.Node) -> bool:
    """Returns whether a node changes its first argument, as `mul_` and `operator.setitem` do."""
    if node.op == "call_function" and node.target in _IN_PLACE:
        return True
    if node.kwargs.get("inplace") is True or "out" in node.kwargs:
        return True
    name = name_of(node)
    return name.endswith("_") and not name.endswith("__")


def name_of(node: fx.Node) -> str:
    """Returns the name of what a node calls: "add_" of a method, "iadd" of `operator.iadd`."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
