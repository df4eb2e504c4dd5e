"""Ask the fake tensors of a captured graph: which values share memory, which require a gradient, which nodes write.

Dynamo keeps one for each node, as `node.meta["example_value"]`: a tensor with shape, strides and history, without data.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from onnxtrain.ortmodule._torch import SymT, is_functorch_wrapped_tensor, pytree, symbol_is_type

_IN_PLACE = frozenset(
    function
    for name, function in vars(operator).items()
    if name == "setitem" or (name.startswith("__i") and f"__{name[3:]}" in vars(operator))
)
"""In-place functions of the module `operator`, e.g. `operator.iadd` (`x += y`) and `operator.setitem`."""


def example_values(graph_module: fx.GraphModule) -> list[Any]:
    """Returns the example value of each input: a fake tensor or a symbolic integer."""
    return [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]


def fake_mode_of(graph_module: fx.GraphModule) -> Any:
    """Returns the FakeTensorMode of a graph, or None if it has neither tensors nor symbolic integers as inputs."""
    values = example_values(graph_module)
    # With symbolic integers as its only inputs, `torch.zeros(n)`, the graph has a mode at its results alone. Without a
    # mode PyTorch calls a real kernel: "SymIntArrayRef expected to contain only concrete integers".
    if not any(hasattr(value, "fake_mode") for value in values) and is_symbolic(graph_module):
        values = [node.meta.get("example_value") for node in graph_module.graph.nodes]
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)


def is_symbolic(graph_module: fx.GraphModule) -> bool:
    """Returns whether a graph has a symbolic integer among its inputs."""
    return any(isinstance(value, torch.SymInt) for value in example_values(graph_module))


def depends_on_data(value: Any) -> bool:
    """Returns whether a value is a number of the data, or a tensor of a size that only the data tell."""
    numeric = isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    return numeric and bool(free_unbacked_symbols(value))


def has_float_input(value: Any) -> bool:
    """Returns whether a value is a number computed from a float that the graph has as an input, since it changes."""
    symbols = value.node.expr.free_symbols if isinstance(value, torch.SymInt | torch.SymFloat) else ()
    return any(symbol_is_type(symbol, SymT.FLOAT) for symbol in symbols)


def of_the_capture(size: int | torch.SymInt) -> int:
    """Returns the number that a size has in the call that is captured, without a guard on it."""
    number: int = size.node.hint if isinstance(size, torch.SymInt) else size
    return number


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a nested value, e.g. both results of `torch.max(x, 1)`."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def plain_tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a nested value that :func:`memory_of` can tell apart."""
    return [tensor for tensor in tensors_in(value) if is_plain(tensor)]


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has one storage: sparse tensors, and those inside of `torch.vmap`, do not show one."""
    return tensor.layout == torch.strided and not is_functorch_wrapped_tensor(tensor)


def arguments_of(node: fx.Node) -> list[torch.Tensor]:
    """Returns the fake tensors among the arguments of a node, e.g. `x` and `w` of `F.linear(x, w)`."""
    return [t for source in node.all_input_nodes for t in tensors_in(source.meta.get("example_value"))]


def map_tensors(function: Callable[[int, torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Replaces each tensor in a nested value by `function(index, tensor)`, where the index counts the tensors."""
    numbers: Iterable[int] = iter(range(len(tensors_in(value))))
    return pytree.tree_map_only(torch.Tensor, lambda t: function(next(numbers), t), value)  # type: ignore[call-overload]


def is_transformed(value: Any) -> bool:
    """Returns whether a value is a tensor inside of a transform of torch.func, e.g. `torch.vmap`."""
    return isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value)


def is_float(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has a dtype that can have a gradient: a floating-point or complex one."""
    return tensor.is_floating_point() or tensor.is_complex()


def memory_of(tensor: torch.Tensor) -> int:
    """Returns the identity of a tensor's storage: equal for a tensor and its views, and known for fake tensors, too."""
    # A fake tensor has no `data_ptr()`.
    memory: int = tensor.untyped_storage()._cdata
    return memory


def node_memory(node: fx.Node) -> int | None:
    """Returns :func:`memory_of` a node's result, or None if that is not a plain tensor."""
    value = node.meta.get("example_value")
    return memory_of(value) if isinstance(value, torch.Tensor) and is_plain(value) else None


def functions_behind(value: Any) -> set[Any]:
    """Returns the backward functions that autograd would run for a tensor: its `grad_fn` and all behind it."""
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
    """Yields the tensors that a backward function has saved, e.g. `_saved_result` of ExpBackward0."""
    for name in dir(function):
        if name.startswith("_saved_"):
            # PyTorch refuses to show a saved tensor that was changed since; its backward raises for it.
            with contextlib.suppress(RuntimeError):
                yield from tensors_in(getattr(function, name))


def changes(node: fx.Node) -> bool:
    """Returns whether a node writes to its first argument, as `mul_`, `operator.setitem` and `out=` do."""
    if node.op == "call_function" and node.target in _IN_PLACE:
        return True
    if node.kwargs.get("inplace") is True or "out" in node.kwargs:
        return True
    # PyTorch's convention for in-place functions and methods; `__len__` and its like are none.
    name = name_of(node)
    return name.endswith("_") and not name.endswith("__")


def name_of(node: fx.Node) -> str:
    """Returns the name of the function or method that a node calls, e.g. "add_" or "iadd"; "" if it has none."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
