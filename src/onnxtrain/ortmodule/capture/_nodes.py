"""Reads nodes of a captured graph and their fake tensors: aliases, gradients, in-place writes, symbolic sizes.

Dynamo stores a fake tensor for each node in `node.meta["example_value"]`. A fake tensor has a shape, strides and an
autograd history, but no data.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols

from onnxtrain.ortmodule._torch import (
    SymT,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    pytree,
    symbol_is_type,
)

_IN_PLACE = frozenset(
    function
    for name, function in vars(operator).items()
    if name == "setitem" or (name.startswith("__i") and f"__{name[3:]}" in vars(operator))
)
"""In-place functions of the module `operator`, e.g. `operator.iadd` (`x += y`) and `operator.setitem`."""

CHECKPOINT_REGION = "ac_graph_id"
"""Key of a node's metadata: the number of its activation-checkpointing region. PyTorch's own passes use this key."""


def example_values(graph_module: fx.GraphModule) -> list[Any]:
    """Returns the example value of each input of a graph: a fake tensor or a symbolic integer."""
    return [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]


def fake_mode_of(graph_module: fx.GraphModule) -> Any:
    """Returns the FakeTensorMode of a graph, or None if it has neither tensors nor symbolic integers as inputs."""
    values = example_values(graph_module)
    # If all inputs are symbolic integers, as for `torch.zeros(n)`, only the results have a fake mode. Without a mode
    # PyTorch calls a real kernel: "SymIntArrayRef expected to contain only concrete integers".
    if not any(hasattr(value, "fake_mode") for value in values) and has_symbolic_integer(graph_module):
        values = [node.meta.get("example_value") for node in graph_module.graph.nodes]
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)


def has_symbolic_integer(graph_module: fx.GraphModule) -> bool:
    """True if an input of the graph is a symbolic integer."""
    return any(isinstance(value, torch.SymInt) for value in example_values(graph_module))


def is_symbolic(value: Any) -> bool:
    """True if a value is a symbolic integer, or a tensor with a symbolic size."""
    return isinstance(value, torch.SymInt | torch.Tensor) and bool(free_symbols(value))


def depends_on_data(value: Any) -> bool:
    """True if a number, or the size of a tensor, is data-dependent: the shapes of the inputs don't determine it."""
    numeric = isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    return numeric and bool(free_unbacked_symbols(value))


def has_float_input(value: Any) -> bool:
    """True if a symbolic number is computed from a Python float that is an input of the graph."""
    symbols = value.node.expr.free_symbols if isinstance(value, torch.SymInt | torch.SymFloat) else ()
    return any(symbol_is_type(symbol, SymT.FLOAT) for symbol in symbols)


def hint_of(size: int | torch.SymInt) -> int:
    """Returns the value of a size in the captured call, without adding a guard; None if the size is data-dependent."""
    number: int = size.node.hint if isinstance(size, torch.SymInt) else size
    return number


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a nested value, e.g. both results of `torch.max(x, 1)`."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def plain_tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a nested value, except sparse tensors and tensors inside a `torch.func` transform."""
    return [tensor for tensor in tensors_in(value) if is_plain(tensor)]


def is_plain(tensor: torch.Tensor) -> bool:
    """True if a tensor is strided (not sparse) and not wrapped by a `torch.func` transform, e.g. `torch.vmap`."""
    return tensor.layout == torch.strided and not is_functorch_wrapped_tensor(tensor)


def arguments_of(node: fx.Node) -> list[torch.Tensor]:
    """Returns the fake tensors among the arguments of a node, e.g. `x` and `w` of `F.linear(x, w)`."""
    return [t for source in node.all_input_nodes for t in tensors_in(source.meta.get("example_value"))]


def map_tensors(function: Callable[[int, torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Replaces each tensor in a nested value with `function(index, tensor)`; `index` counts the tensors from 0."""
    numbers: Iterable[int] = iter(range(len(tensors_in(value))))
    return pytree.tree_map_only(torch.Tensor, lambda t: function(next(numbers), t), value)  # type: ignore[call-overload]


def is_transformed(value: Any) -> bool:
    """True if a value is a tensor inside a `torch.func` transform, e.g. `torch.vmap`."""
    return isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value)


def is_float(tensor: torch.Tensor) -> bool:
    """True if a tensor has a differentiable dtype: floating-point or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def memory_of(tensor: torch.Tensor) -> int:
    """Returns an identifier of a tensor's storage, equal for a tensor and its views.

    Also works for fake tensors, and inside `torch.func` transforms.
    """
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    # A fake tensor has no `data_ptr()`.
    memory: int = tensor.untyped_storage()._cdata
    return memory


def node_memory(node: fx.Node) -> int | None:
    """Returns the storage identifier of a node's result; None if the result is not a plain tensor."""
    value = node.meta.get("example_value")
    return memory_of(value) if isinstance(value, torch.Tensor) and is_plain(value) else None


def backward_functions(value: Any) -> set[Any]:
    """Returns all nodes of a tensor's autograd graph: its `grad_fn` and everything reachable from it."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad or is_transformed(value):
        return set()
    stack, seen = [value.grad_fn], set()
    while stack:
        current = stack.pop()
        if current is not None and current not in seen:
            seen.add(current)
            stack += [following for following, _ in current.next_functions]
    return seen


def saved_tensors_of(function: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that a backward function has saved, e.g. `_saved_result` of ExpBackward0."""
    for name in dir(function):
        if name.startswith("_saved_"):
            # Reading a saved tensor raises if it was modified in place after it was saved.
            with contextlib.suppress(RuntimeError):
                yield from tensors_in(getattr(function, name))


def writes_in_place(node: fx.Node) -> bool:
    """True if a node writes to its first argument in place, e.g. `mul_` or `operator.setitem`, or writes to `out=`."""
    if node.op == "call_function" and node.target in _IN_PLACE:
        return True
    if node.kwargs.get("inplace") is True or "out" in node.kwargs:
        return True
    # By PyTorch's convention the names of in-place functions end with "_".
    name = name_of(node)
    return name.endswith("_") and not name.endswith("__")


def name_of(node: fx.Node) -> str:
    """Returns the name of the function or method that a node calls, e.g. "add_" or "iadd"; "" if it has none."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


# Dynamo (PyTorch 2.13) names a parameter by its path: "L['self']._modules['0']._parameters['weight']".
_MODULE_ATTRIBUTE = re.compile(r"\.(?:_modules|_parameters|_buffers)\[")


def argument_name(node: fx.Node) -> str:
    """Returns the name of an input, e.g. "0.weight", or the placeholder's own name if Dynamo records no source."""
    argument = node.meta.get("grapharg")
    source = str(getattr(getattr(argument, "source", None), "name", ""))
    keys = re.findall(r"\['?([^'\]]+)'?\]|\.(\w+)", source)
    path = [key or attribute for key, attribute in keys]
    if _MODULE_ATTRIBUTE.search(source):
        path = [part for part in path[1:] if part not in ("_modules", "_parameters", "_buffers")]
    return ".".join(path) or node.name


def ignoring_new_symbols(fake_mode: Any) -> contextlib.AbstractContextManager[Any]:
    """Context manager that lets operators with data-dependent result sizes run on fake tensors outside a trace."""
    # In a trace PyTorch (2.13) expects each new unbacked symbol in the next result, and raises if it is missing.
    shapes = getattr(fake_mode, "shape_env", None)
    return contextlib.nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()


def without_tracebacks() -> contextlib.AbstractContextManager[None]:
    """Suppresses the traceback that PyTorch logs when an operator fails on fake tensors. The error is still raised."""
    return without_messages("torch._subclasses.fake_tensor", "failed while attempting to run meta")


@contextlib.contextmanager
def without_messages(logger_name: str, beginning: str) -> Iterator[None]:
    """Suppresses the messages of a logger that start with a given text."""

    def is_another(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(beginning)

    logger = logging.getLogger(logger_name)
    logger.addFilter(is_another)
    try:
        yield
    finally:
        logger.removeFilter(is_another)
