"""Locates the batch size in a captured graph, and replaces its symbols with the sizes of one call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from onnxtrain.ortmodule.capture._nodes import example_values, fake_mode_of, hint_of, is_plain, is_symbolic


@dataclass(frozen=True)
class Batch:
    """The symbols of a graph's batch size, and the arguments from which their values are read.

    Attributes:
        symbols: one symbol for the batch size of each argument. Arguments whose sizes the function requires to be equal
            share a symbol.
        places: for each symbol, where its value is read, e.g. ((0, None), (3, 0)): the index of an argument, and the
            axis of the argument that has this size. The axis is None if the argument is the number itself.
        symbolic: indices of the inputs that are symbols or have symbolic sizes, e.g. {0, 1}.
    """

    symbols: tuple[Any, ...]
    places: tuple[tuple[int, int | None], ...]
    # Determined before the graph is compiled: compiling it for all sizes may replace a symbol with a number.
    symbolic: frozenset[int]

    def value(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Returns the batch size of a call: one number per symbol, e.g. (32,)."""
        return tuple([args[i] if axis is None else args[i].shape[axis] for i, axis in self.places])


def batch_of(graph_module: fx.GraphModule, symbols: frozenset[Any]) -> Batch | None:
    """Locates the batch size of a graph.

    Args:
        graph_module: a Dynamo graph, or a part of one.
        symbols: the symbols of the batch size.

    Returns:
        The location of the batch size. None if the graph's inputs have no symbols, have symbols other than `symbols`,
        or don't determine the values of the symbols.
    """
    values = example_values(graph_module)
    symbolic = frozenset(place for place, value in enumerate(values) if is_symbolic(value))
    # A graph that only computes with sizes has no fake mode.
    if not symbolic or fake_mode_of(graph_module) is None:
        return None
    places: dict[Any, tuple[int, int | None]] = {}
    # Numbers first: they are read faster than the shape of a tensor.
    for place in sorted(symbolic, key=lambda place: isinstance(values[place], torch.Tensor)):
        value = values[place]
        if not free_symbols(value) <= symbols:
            return None
        sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for axis, size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr in symbols:
                places.setdefault(size.node.expr, (place, axis))
    if any(not free_symbols(values[place]) <= places.keys() for place in symbolic):
        return None
    return Batch(tuple(places), tuple(places.values()), symbolic)


@contextlib.contextmanager
def recorded_guards(
    graph_module: fx.GraphModule, batch: Batch
) -> Iterator[Callable[[tuple[int, ...]], bool]]:
    """Context manager that records guards that PyTorch adds on the batch size, e.g. while a graph is lowered.

    Dynamo checks only the guards that are added during a capture, not guards that are added later.

    Args:
        graph_module: a Dynamo graph.
        batch: its batch size.

    Yields:
        A function that returns True if a batch size satisfies all recorded guards. Call it after leaving the context.
    """
    guards = fake_mode_of(graph_module).shape_env.guards
    known = len(guards)
    conditions: list[Any] = []

    @functools.cache
    def holds(size: tuple[int, ...]) -> bool:
        numbers = dict(zip(batch.symbols, size, strict=True))
        results = [condition.subs(numbers) for condition in conditions]
        return all(result.is_Boolean and bool(result) for result in results)

    yield holds
    conditions += [guard.expr for guard in guards[known:]]


def with_batch_size(graph_module: fx.GraphModule, batch: Batch, args: Sequence[Any] | None) -> list[Any]:
    """Returns the example values of a graph's inputs, with the sizes of one call in place of symbols.

    Args:
        graph_module: a Dynamo graph.
        batch: its batch size.
        args: the arguments of the call, or None for the captured call.
    """
    values, fake_mode = specialized_values(graph_module), fake_mode_of(graph_module)
    for place in batch.symbolic:
        values[place] = _specialized(values[place], None if args is None else args[place], fake_mode)
    return values


def specialized_values(graph_module: fx.GraphModule) -> list[Any]:
    """Returns the example values of a graph's inputs, with constants in place of specialized symbols."""
    # If Dynamo (PyTorch 2.13) specializes a size, the fake tensor keeps a symbol that equals a constant. Kernels treat
    # it as symbolic and reject it.
    values, fake_mode = example_values(graph_module), fake_mode_of(graph_module)
    return [_specialized(v, None, fake_mode) if _has_symbol(v) and not is_symbolic(v) else v for v in values]


def _has_symbol(value: Any) -> bool:
    """True if a value is a symbolic integer or has a symbolic size, including symbols specialized to a constant."""
    if isinstance(value, torch.Tensor):
        if not is_plain(value) or value.is_conj() or value.is_neg():
            return False
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, torch.SymInt)


def _specialized(value: Any, arg: Any, fake_mode: Any) -> Any:
    """Returns the example value of one input, with the sizes of `arg`, or of the captured call if `arg` is None."""
    if not isinstance(value, torch.Tensor):
        return hint_of(value) if arg is None else arg
    sizes_of = value if arg is None else arg
    with fake_mode, torch.no_grad():
        result = torch.empty_strided(
            [hint_of(size) for size in sizes_of.shape],
            [hint_of(stride) for stride in sizes_of.stride()],
            dtype=value.dtype,
            device=value.device,
        )
    return result.requires_grad_(value.requires_grad)
