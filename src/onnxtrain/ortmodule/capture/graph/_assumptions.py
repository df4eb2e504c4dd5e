"""Keeps what Dynamo assumes of data-dependent sizes as conditions that ONNX Runtime computes.

For `x[mask] + torch.ones(57)` Dynamo (PyTorch 2.13) assumes that `x[mask]` has 57 rows: it inserts an assertion, and
replaces the size with 57 everywhere, also in the assertion. The conditions here are computed from tensors, whose sizes
are read at run time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule.capture._nodes import depends_on_data, fake_mode_of

_LIBRARY = torch.library.Library("onnxtrain", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("size(Tensor x, int dim) -> Tensor")  # type: ignore[no-untyped-call]


@torch.library.register_fake("onnxtrain::size")  # type: ignore[untyped-decorator]
def _fake_size(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.new_empty((), dtype=torch.int64)


@torch.library.impl("onnxtrain::size", "CompositeExplicitAutograd")
def _size(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.tensor(x.shape[dim], device=x.device)


_SAME_FOR_TENSORS = (
    operator.add, operator.sub, operator.mul, operator.mod, operator.floordiv, operator.eq, operator.ne,
    operator.ge, operator.gt, operator.le, operator.lt, operator.and_, operator.or_,
)  # fmt: skip
_FOR_TENSORS: dict[Any, Callable[..., Any]] = {
    **{function: function for function in _SAME_FOR_TENSORS},
    torch.sym_sum: lambda terms: reduce(operator.add, terms),
    torch.sym_not: torch.logical_not,
    torch.sym_int: torch.trunc,
}
"""Functions of symbolic numbers, with the same functions of tensors."""


OF_ASSUMPTION = "onnxtrain.assumption"
"""Key in the metadata of the nodes of an assumption, which a graph that PyTorch runs does not need."""


def computed_from_tensors(condition: Any) -> fx.Node | None:
    """Returns a node that evaluates a condition on symbolic numbers at run time, as a boolean scalar tensor.

    Sizes are read from tensors when the node runs. The node, and the nodes that it needs, are inserted before
    `condition`.

    Args:
        condition: an argument of an assertion.

    Returns:
        The new node; None if the condition always holds, or contains functions other than those in `_FOR_TENSORS`.
    """
    if not isinstance(condition, fx.Node) or not _is_computable(condition):
        return None
    # Sizes are never negative.
    if condition.target is operator.ge and condition.args[1] == 0:
        return None
    return _inserted(condition, lambda: _tensor_of(condition))


def index_in_range(node: fx.Node) -> fx.Node | None:
    """Returns a node that computes whether the index of an unused `x.select(dim, index)` is in range.

    If the index is out of range, eager PyTorch raises IndexError, but Dynamo and functional graphs drop unused nodes.

    Returns:
        The new node, a boolean scalar. None if `node` is not an unused select, or neither the size nor the index is
        data-dependent, or the index cannot be computed from tensors.
    """
    if node.users or node.target not in (torch.select, "select") or len(node.args) != 3:
        return None
    args: tuple[Any, ...] = node.args
    x, dim, index = args
    tensor = x.meta.get("example_value") if isinstance(x, fx.Node) else None
    if not isinstance(tensor, torch.Tensor):
        return None
    size = tensor.shape[dim]
    number = index.meta["example_value"] if isinstance(index, fx.Node) else index
    if not depends_on_data(size) and not depends_on_data(number):
        return None
    if isinstance(index, fx.Node) and not _is_computable(index):
        return None

    def in_range() -> fx.Proxy:
        count = fx.Proxy(node.graph.call_function(torch.ops.onnxtrain.size.default, (x, dim)))
        position = _tensor_of(index)
        in_range: fx.Proxy = (count > position) & (count >= -position)
        return in_range

    return _inserted(node, in_range)


def _inserted(before: fx.Node, make: Callable[[], fx.Proxy]) -> fx.Node:
    """Inserts nodes into the graph of `before`, and sets their example values.

    The nodes are marked with `OF_ASSUMPTION`.

    Args:
        before: the node before which they are inserted.
        make: creates the nodes and returns a proxy of the last one.

    Returns:
        The last node.
    """
    graph = before.graph
    known = set(graph.nodes)
    with graph.inserting_before(before):
        last = make().node
    assert graph.owning_module is not None
    mode = fake_mode_of(graph.owning_module)
    with mode:
        for node in graph.nodes:
            if node not in known:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["example_value"])
                node.meta |= {"example_value": node.target(*args, **kwargs), OF_ASSUMPTION: True}
    return last


def _is_computable(node: fx.Node) -> bool:
    """True if `_tensor_of` supports a node."""
    if node.target in _FOR_TENSORS:
        return all(map(_is_computable, node.all_input_nodes))
    return node.op == "placeholder" or node.target == "item" or _is_size(node)


def _is_size(node: fx.Node) -> bool:
    """True if a node reads one size of a tensor."""
    return len(node.args) == 2 and node.target in (torch.ops.aten.sym_size.int, "size")


def _tensor_of(value: Any) -> Any:
    """Returns a proxy of a node that computes a symbolic number as a tensor. Other values are returned unchanged."""
    if isinstance(value, list | tuple):
        return [_tensor_of(item) for item in value]
    if not isinstance(value, fx.Node):
        return value
    if value.target in _FOR_TENSORS:
        return _FOR_TENSORS[value.target](*map(_tensor_of, value.args))
    if value.target == "item":
        (tensor,) = value.all_input_nodes
        return fx.Proxy(tensor)
    if _is_size(value):
        return fx.Proxy(value.graph.call_function(torch.ops.onnxtrain.size.default, value.args))
    return fx.Proxy(value.graph.call_function(torch.scalar_tensor, (value,), {"dtype": torch.int64}))
