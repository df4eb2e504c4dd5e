"""Draw If, Loop and Scan: their bodies are drawn as graphs are, and read values of the graph around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autodiff.case import UNDER_TEST
from autodiff.fuzz.builder import Builder
from autodiff.fuzz.draw import Draw, Rejected
from autodiff.fuzz.graph import Array, Body, Dims

Drawer = Callable[[Builder, Draw], None]
Within = Callable[[Builder, Draw, int], None]
"""Adds up to a number of nodes to a body."""
DEEPEST = 2
FLOAT, INT, BOOL = np.dtype(np.float64), np.dtype(np.int64), np.dtype(bool)


def drawers(within: Within) -> dict[str, Drawer]:
    """Returns how each op is drawn."""

    def drawer(draw: Callable[[Builder, Draw, Within], None]) -> Drawer:
        def drawn(b: Builder, d: Draw) -> None:
            if b.depth >= DEEPEST:
                raise Rejected("deep enough")
            draw(b, d, within)

        return drawn

    return {"If": drawer(_if), "Loop": drawer(_loop), "Scan": drawer(_scan)}


def _if(b: Builder, d: Draw, within: Within) -> None:
    """By a constant, a run-time input, or what another value is; branches may give other sizes."""
    condition = _condition(b, d)
    shapes = [b.shape(d.choice(b.computed() or [b.tensor()])) for _ in range(d.integer(1, 2))]
    branches = []
    for letter in "te":
        inner = b.within(letter)
        within(inner, d, d.integer(0, 3))
        outputs = []
        for shape in shapes:
            if inner.nodes_here and d.chance(25):
                shape = inner.shape(d.choice(inner.computed()))
            outputs.append(_result(inner, d, shape))
        branches.append((inner, outputs))
    # Ranks may differ if nothing is said of them.
    says = d.chance(60)
    bodies = []
    for inner, outputs in branches:
        told = _told(inner, d, outputs)
        bodies.append(Body([], inner.nodes_here, told if says else [(o, kind, None) for o, kind, _ in told]))
    b.nodes("If", [condition], len(shapes), then_branch=bodies[0], else_branch=bodies[1])


def _condition(b: Builder, d: Draw) -> str:
    """Returns a value that is true or false, of one element."""
    kind = d.choice(["given", "given", "constant", "computed"])
    shape = (1,) if d.chance(20) else ()
    if kind != "computed":
        return b.data(np.full(shape, d.chance(50)), fixed=kind == "constant")
    total = b.node("ReduceSum", [b.tensor()], keepdims=0)
    return b.node("Greater", [total, b.data(np.full(shape, d.integer(-2, 2) + 0.5), fixed=True)])


def _loop(b: Builder, d: Draw, within: Within) -> None:
    """A number of iterations that is known or not, with a condition or without."""
    trips = d.choice([0, 1, 1, 2, 2, 3])
    stop = d.choice(["never", "never", "count", "state"])
    most = "" if stop == "count" and d.chance(50) else b.data(np.full((1,) if d.chance(20) else (), trips))
    keep_going = "" if most and d.chance(60) else b.data(np.array(d.chance(90)))
    states = _states(b, d, least=0 if stop != "state" else 1)
    inner = b.within("b")
    index, flag = (f"{inner.prefix}{what}" for what in ("i", "c"))
    inner.values |= {index: np.array(0), flag: np.array(True)}
    # ONNX Runtime needs the shapes of these two.
    inputs = [(index, INT, []), (flag, BOOL, []), *_given(inner, d, states, "s")]
    names = [name for name, _, _ in inputs[2:]]
    if d.chance(50):
        _read_by_iteration(inner, d, index, trips)
    within(inner, d, d.integer(0, 3))
    after = [_next_state(inner, d, name) for name in names]
    outputs = [*after, *(_result(inner, d, None) for _ in range(d.integer(0 if states else 1, 2)))]
    condition = _condition_of(inner, d, flag, index, stop, trips, after)
    told = [(condition, BOOL, _scalar(d)), *_told(inner, d, outputs)]
    body = Body(inputs, inner.nodes_here, told)
    found = b.nodes("Loop", [most, keep_going, *states], len(outputs), body=body)
    _hide_stacks_of_nothing(b, found[len(states) :])


def _scan(b: Builder, d: Draw, within: Within) -> None:
    """Over one or two values, along any axis, in both directions."""
    first = b.tensor([1, 2, 3, 4])
    axes = [d.integer(0, len(b.shape(first)) - 1)]
    size = b.shape(first)[axes[0]]
    sources = [first]
    if d.chance(40):
        second = b.tensor(
            [1, 2, 3], fits=lambda a: size in a.shape, shape=lambda: d.permutation([size, *b.sizes(1)])
        )
        sources.append(second)
        axes.append(d.choice([k for k, s in enumerate(b.shape(second)) if s == size]))
    states = _states(b, d, least=0)
    inner = b.within("b")
    slices = [f"{inner.prefix}x{k}" for k in range(len(sources))]
    for name, source, axis in zip(slices, sources, axes, strict=True):
        array = b.values[source]
        inner.values[name] = array.take(0, axis) if size else np.ones(np.delete(array.shape, axis))
    inputs = [
        *_given(inner, d, states, "s"),
        *((name, FLOAT, _declared(inner, d, name, inner.shape(name))) for name in slices),
    ]
    within(inner, d, d.integer(0, 3))
    after = [_next_state(inner, d, name) for name, _, _ in inputs[: len(states)]]
    stacked = [_result(inner, d, None) for _ in range(d.integer(0 if states else 1, 2))]
    attrs: dict[str, Any] = {
        "scan_input_axes": _signed(d, axes, [b.values[s].ndim for s in sources]),
        "scan_input_directions": _directions(d, len(sources)),
        "scan_output_directions": _directions(d, len(stacked)),
    }
    ranks = [inner.values[name].ndim + 1 for name in stacked]
    attrs["scan_output_axes"] = (
        _signed(d, [d.integer(0, rank - 1) for rank in ranks], ranks) if stacked else None
    )
    # ONNX Runtime needs the ranks of all of them.
    told = _told(inner, d, [*after, *stacked], always=True)
    found = b.nodes(
        "Scan",
        [*states, *sources],
        len(after) + len(stacked),
        body=Body(inputs, inner.nodes_here, told),
        num_scan_inputs=len(sources),
        **attrs,
    )
    _hide_stacks_of_nothing(b, found[len(states) :], none=size == 0)


def _signed(d: Draw, axes: Sequence[int], ranks: Sequence[int]) -> list[int] | None:
    if not any(axes) and d.chance(50):
        return None
    return [axis - rank if d.chance(20) else axis for axis, rank in zip(axes, ranks, strict=True)]


def _directions(d: Draw, count: int) -> list[int] | None:
    return [d.integer(0, 1) for _ in range(count)] if count and d.chance(50) else None


def _states(b: Builder, d: Draw, least: int) -> list[str]:
    """Returns the first state: floats, and sometimes an integer that counts."""
    states = [b.tensor() for _ in range(d.integer(least, 2))]
    return [*states, b.data(np.array(d.integer(0, 2)))] if d.chance(20) else states


def _given(inner: Builder, d: Draw, sources: Sequence[str], letter: str) -> list[tuple[str, Any, Dims]]:
    """Returns inputs of a body that are, in the first iteration, what these values are."""
    result = []
    for k, source in enumerate(sources):
        name, array = f"{inner.prefix}{letter}{k}", inner.values[source]
        inner.values[name] = array
        result.append((name, array.dtype, _declared(inner, d, name, array.shape)))
        if array.dtype == INT and d.chance(70):
            _times(inner, name)
    return result


def _times(inner: Builder, number: str) -> None:
    """Multiplies a value by an integer."""
    inner.node("Mul", [inner.tensor(), inner.node("Cast", [number], to=UNDER_TEST)])


def _read_by_iteration(inner: Builder, d: Draw, index: str, trips: int) -> None:
    """Reads the row of a value that belongs to the iteration, or multiplies by its number."""
    rows = [
        name for name in inner.computed() if inner.values[name].ndim and inner.shape(name)[0] >= max(trips, 1)
    ]
    if rows and d.chance(60):
        inner.node("Gather", [d.choice(rows), index], axis=0)
    else:
        _times(inner, index)


def _next_state(inner: Builder, d: Draw, name: str) -> str:
    """Returns a value of the state's shape, to be the next state."""
    array = inner.values[name]
    if array.dtype == INT:
        return inner.node("Add", [name, inner.data(np.array(d.integer(1, 2)), fixed=True)])
    if d.chance(8):
        return name  # as it is
    same = [n for n in _own(inner) if inner.shape(n) == array.shape and n != name]
    if same and d.chance(60):
        found = _late(d, same)
        return inner.node("Tanh", [found]) if d.chance(40) else found
    shrunk = inner.node("Mul", [name, inner.data(np.array(0.5), fixed=True)])
    others = [n for n in inner.computed() if inner.values[n].size]
    if not others:
        return shrunk
    mean = inner.node("ReduceMean", [_late(d, others)], keepdims=0)
    return inner.node("Add", [shrunk, mean])


def _late(d: Draw, names: Sequence[str]) -> str:
    """Most often the last one, so that little of what is drawn is for nothing."""
    return names[-1] if d.chance(60) else d.choice(names)


def _own(inner: Builder) -> list[str]:
    """Return the values that nodes of the body itself compute."""
    computed = {output for node in inner.nodes_here for output in node.outputs}
    return [name for name in inner.computed() if name in computed]


def _result(inner: Builder, d: Draw, shape: Sequence[int] | None) -> str:
    """Returns what the body itself computes, of a shape if given."""
    fits = [n for n in _own(inner) if shape is None or inner.shape(n) == tuple(shape)]
    if fits and d.chance(75):
        return _late(d, fits)
    value = inner.tensor() if shape is None else inner.like(shape)
    return inner.node(d.choice(["Identity", "Sin"]), [value])


def _condition_of(
    inner: Builder, d: Draw, flag: str, index: str, stop: str, trips: int, after: Sequence[str]
) -> str:
    if stop == "state":
        floats = [name for name in after if inner.values[name].dtype == FLOAT]
        if floats:
            total = inner.node("ReduceSum", [inner.node("Abs", [d.choice(floats)])], keepdims=0)
            return inner.node("Less", [total, inner.data(np.array(d.integer(1, 20) + 0.5), fixed=True)])
    if stop == "count":
        return inner.node("Less", [index, inner.data(np.array(max(trips - 1, 0)))])
    return inner.node("Identity", [flag])


def _told(
    inner: Builder, d: Draw, names: Sequence[str], *, always: bool = False
) -> list[tuple[str, Any, Dims]]:
    """Outputs of a body: names of their own, each."""
    result, seen = [], set[str]()
    for name in names:
        if name in seen:
            name = inner.node("Identity", [name])
        seen.add(name)
        dims = _declared(inner, d, name, inner.shape(name))
        if always and dims is None:
            dims = [f"{name}_{axis}" for axis in range(len(inner.shape(name)))]
        result.append((name, inner.values[name].dtype, dims))
    return result


def _declared(b: Builder, d: Draw, name: str, shape: Sequence[int]) -> Dims:
    """Return how a body declares a value: not at all, as most exporters do, or as graph inputs are declared."""
    return None if d.chance(30) else b.declared(name, shape)


def _scalar(d: Draw) -> Dims:
    return [] if d.chance(70) else None


def _hide_stacks_of_nothing(b: Builder, names: Sequence[str], *, none: bool = False) -> None:
    """Let only sums of outputs without iterations be read: runtimes give these outputs different shapes."""
    for name in names:
        array: Array = b.values[name]
        if none or array.shape == (0,):
            b.node("ReduceSum", [name], keepdims=0)
            b.unused.add(name)
