"""Have Dynamo capture a function for all sizes of the batch at once, and give a graph the sizes of one call."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from onnxtrain.ortmodule._torch import DYNAMIC_AXES, MARKED_AXES, ShortenTraceback, pytree
from onnxtrain.ortmodule.capture._nodes import example_values, fake_mode_of, is_plain, of_the_capture


class _Marked(threading.local):
    """The ids of the tensors whose batch axis is marked in this thread."""

    ids: frozenset[int] = frozenset()


_marked = _Marked()


class SymbolRefused(ShortenTraceback):
    """A graph of a symbolic batch does not run in ONNX Runtime; one of a number may."""

    # Dynamo (PyTorch 2.13) passes on this base class as it is raised, and wraps all other exceptions of a backend.

    def __init__(self) -> None:
        super().__init__("the size of the batch must be a number", first_useful_frame=None)


def has_marked_axis(graph_module: fx.GraphModule) -> bool:
    """Returns whether a graph that is being captured has symbols because `batch_axis_as_symbol` is open."""
    return bool(_marked.ids) and any(map(_is_symbolic, example_values(graph_module)))


@contextlib.contextmanager
def batch_axis_as_symbol(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Has captures treat the size of the batch as a symbol while the context is open.

    The size of the batch is the most frequent size, above 1, of the first axes of the tensors among the arguments. If
    the function needs the number itself, as `range(len(x))` does, Dynamo captures it for this number alone.

    Args:
        arguments: the local variables of the function that is captured, by name, before it runs.
    """
    tensors = {id(leaf): leaf for leaf in pytree.tree_leaves(dict(arguments)) if _may_have_batch(leaf)}
    sizes = Counter(tensor.shape[0] for tensor in tensors.values())
    batch = sizes.most_common(1)[0][0] if sizes else None
    # With the marks of the user a graph is compiled for all sizes at once.
    marked = [
        t for t in tensors.values() if t.shape[0] == batch and not any(hasattr(t, a) for a in MARKED_AXES)
    ]
    for tensor in marked:
        setattr(tensor, DYNAMIC_AXES, {0})
    before = _marked.ids
    _marked.ids = frozenset(map(id, marked))
    try:
        yield
    finally:
        _marked.ids = before
        for tensor in marked:
            vars(tensor).pop(DYNAMIC_AXES, None)


def _may_have_batch(value: Any) -> bool:
    """Returns whether a value is a plain tensor with a first axis of more than one element."""
    # A size of 1 decides how a tensor is broadcast: Dynamo captures it as a number.
    return type(value) is torch.Tensor and _can_be_made(value) and value.dim() > 0 and value.shape[0] > 1


def _can_be_made(tensor: torch.Tensor) -> bool:
    """Returns whether sizes, strides and dtype say all of a tensor but its data."""
    return is_plain(tensor) and not tensor.is_conj() and not tensor.is_neg()


@dataclass(frozen=True)
class Batch:
    """The size of the batch in a graph that has no other symbol.

    Attributes:
        symbols: one for the batch of each argument, but where the function needs two sizes to be equal.
        places: per symbol, the index of the argument that tells it, and the axis that has this size; None in place of
            the axis if the argument is the number itself, e.g. ((0, None), (3, 0)).
        symbolic: indices of the inputs that are symbols, or whose shapes have one, e.g. {0, 1}.
    """

    symbols: tuple[Any, ...]
    places: tuple[tuple[int, int | None], ...]
    # Noted before anything is compiled: what is compiled for all sizes may replace a symbol by a number.
    symbolic: frozenset[int]

    def value(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Returns the size of the batch of a call, per symbol."""
        return tuple([args[i] if axis is None else args[i].shape[axis] for i, axis in self.places])


def batch_symbols(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> frozenset[Any]:
    """Returns the symbols of the size of the batch; none if there are others too.

    Args:
        graph_module: a Dynamo graph.
        inputs: the inputs that Dynamo passes to its backend.
    """
    marked = _marked.ids
    symbols: set[Any] = set()
    numbers: set[Any] = set()
    for value, given in zip(example_values(graph_module), inputs, strict=False):
        if not _is_symbolic(value):
            continue
        # Dynamo itself makes an axis symbolic whose size has changed: such a graph will see many sizes.
        if isinstance(value, torch.Tensor) and (
            id(given) not in marked or any(map(_is_symbolic, value.shape[1:]))
        ):
            return frozenset()
        (symbols if isinstance(value, torch.Tensor) else numbers).update(free_symbols(value))
    return frozenset(symbols) if numbers <= symbols else frozenset()


def batch_of(graph_module: fx.GraphModule, symbols: frozenset[Any]) -> Batch | None:
    """Returns where the size of the batch is in a graph; None if the inputs do not tell it, or have other symbols.

    Args:
        graph_module: a Dynamo graph, or a part of one.
        symbols: of the size.
    """
    values = example_values(graph_module)
    symbolic = frozenset(place for place, value in enumerate(values) if _is_symbolic(value))
    # A graph of sizes alone, `torch.zeros(n)`, has no mode.
    if not symbolic or fake_mode_of(graph_module) is None:
        return None
    places: dict[Any, tuple[int, int | None]] = {}
    # Numbers first, which take less time to read.
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
def noted_guards(graph_module: fx.GraphModule, batch: Batch) -> Iterator[Callable[[tuple[int, ...]], bool]]:
    """Notes what the work on a graph, while the context is open, takes for granted of the size of the batch.

    Dynamo makes guards of what is taken for granted during a capture. After that nobody would notice.

    Args:
        graph_module: a Dynamo graph.
        batch: the size of its batch.

    Yields:
        Returns whether all that was taken for granted is true of a size.
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


def of_one_size(graph_module: fx.GraphModule, batch: Batch, args: Sequence[Any] | None) -> list[Any]:
    """Returns example values of the inputs of a graph in which the sizes of one call stand for symbols.

    Args:
        graph_module: a Dynamo graph.
        batch: the size of its batch.
        args: the arguments of the call; None for the call that is captured.
    """
    values, fake_mode = settled(graph_module), fake_mode_of(graph_module)
    for place in batch.symbolic:
        values[place] = _of_one_size(values[place], None if args is None else args[place], fake_mode)
    return values


def settled(graph_module: fx.GraphModule) -> list[Any]:
    """Returns example values of the inputs of a graph, with numbers for symbols that turned out to be numbers."""
    # Of such a size (PyTorch 2.13) a fake tensor has a symbol that equals a number: kernels refuse it as a symbol.
    values, fake_mode = example_values(graph_module), fake_mode_of(graph_module)
    return [_of_one_size(v, None, fake_mode) if _has_symbol(v) and not _is_symbolic(v) else v for v in values]


def _has_symbol(value: Any) -> bool:
    """Returns whether a value is or has a symbol, be it one that equals a number."""
    if isinstance(value, torch.Tensor):
        return _can_be_made(value) and any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, torch.SymInt)


def _of_one_size(value: Any, arg: Any, fake_mode: Any) -> Any:
    """Returns the example value of one input, with the sizes of `arg`."""
    if not isinstance(value, torch.Tensor):
        return of_the_capture(value) if arg is None else arg
    sizes_of = value if arg is None else arg
    with fake_mode, torch.no_grad():
        result = torch.empty_strided(
            [of_the_capture(size) for size in sizes_of.shape],
            [of_the_capture(stride) for stride in sizes_of.stride()],
            dtype=value.dtype,
            device=value.device,
        )
    return result.requires_grad_(value.requires_grad)


def _is_symbolic(value: Any) -> bool:
    """Returns whether a value is a symbolic number, or a tensor with a symbolic size."""
    return isinstance(value, torch.SymInt | torch.Tensor) and bool(free_symbols(value))
