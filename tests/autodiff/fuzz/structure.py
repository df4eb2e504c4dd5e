"""Draw ops that move, repeat, drop, read or write elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autodiff.fuzz.builder import Builder
from autodiff.fuzz.draw import Draw, Rejected
from autodiff.fuzz.elementwise import axes_of

Drawer = Callable[[Builder, Draw], None]
MAX, MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min


def _i64(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def _axis(b: Builder, d: Draw, name: str) -> int:
    rank = len(b.shape(name))
    return d.integer(-rank, rank - 1)


def _shape_of(b: Builder, d: Draw, sizes: Sequence[int]) -> str:
    """Returns a shape as a constant, as run-time data, or computed from the shape of a value of that shape."""
    twins = [n for n in b.computed() if b.shape(n) == tuple(sizes)]
    if twins and b.graph.opset >= 15 and d.chance(40):
        return b.node("Shape", [d.choice(twins)])
    return b.data(_i64(sizes))


def reshape(b: Builder, d: Draw) -> None:
    """To a shape with 0 (as it was), -1 (the rest), or one that is computed."""
    x = b.tensor()
    sizes = list(b.shape(x))
    kind = d.choice(["merge", "split", "same", "rest", "flat"])
    if kind == "merge" and len(sizes) > 1:
        i = d.integer(0, len(sizes) - 2)
        target = [*sizes[:i], sizes[i] * sizes[i + 1], *sizes[i + 2 :]]
    elif kind == "split" and len(sizes) < 4:
        i = d.integer(0, len(sizes))
        target = [*sizes[:i], 1, *sizes[i:]]
    elif kind == "flat":
        target = [int(np.prod(sizes))]
    else:
        target = d.permutation(sizes)
    allow = 1 if b.graph.opset >= 14 and 0 in target else None
    if kind == "rest" and target and 0 not in sizes:
        i = d.integer(0, len(target) - 1)
        target = [-1 if j == i else s for j, s in enumerate(target)]
        target = [
            0 if s != -1 and j < len(sizes) and s == sizes[j] and d.chance(40) else s
            for j, s in enumerate(target)
        ]
        b.node("Reshape", [x, b.data(_i64(target))])
        return
    b.node("Reshape", [x, _shape_of(b, d, target)], allowzero=allow)


def flatten(b: Builder, d: Draw) -> None:
    """At any axis."""
    x = b.tensor()
    rank = len(b.shape(x))
    b.node("Flatten", [x], axis=d.choice([None, *range(-rank, rank + 1)]) if rank else 0)


def transpose(b: Builder, d: Draw) -> None:
    """By any permutation."""
    x = b.tensor()
    rank = len(b.shape(x))
    b.node("Transpose", [x], perm=d.permutation(range(rank)) if rank and d.chance(75) else None)


def squeeze(b: Builder, d: Draw) -> None:
    """Of all axes of size one, or of some."""
    x = b.tensor(fits=lambda a: 1 in a.shape, shape=lambda: d.permutation([1, *b.sizes(d.integer(0, 3))]))
    ones = [i for i, size in enumerate(b.shape(x)) if size == 1]
    if d.chance(30):
        b.node("Squeeze", [x])
        return
    rank = len(b.shape(x))
    b.node("Squeeze", [x, b.data(_i64([a - rank if d.chance(30) else a for a in d.subset(ones, 1)]))])


def unsqueeze(b: Builder, d: Draw) -> None:
    """Axes of the result in any order, some counted from the end."""
    x = b.tensor(range(4))
    rank = len(b.shape(x)) + d.integer(1, 2)
    axes = d.permutation(range(rank))[: rank - len(b.shape(x))]
    b.node("Unsqueeze", [x, b.data(_i64([a - rank if d.chance(30) else a for a in axes]))])


def concat(b: Builder, d: Draw) -> None:
    """One to three values, one of them more than once at times."""
    x = b.tensor(range(1, 5))
    axis = _axis(b, d, x)
    values = [x]
    for _ in range(d.integer(0, 2)):
        sizes = list(b.shape(x))
        if d.chance(60):
            sizes[axis] = b.sizes(1)[0]
        values.append(b.like(sizes))
    b.node("Concat", d.permutation(values), axis=axis)


def split(b: Builder, d: Draw) -> None:
    """Into parts of given sizes or equal ones; some are not read."""
    x = b.tensor(range(1, 5))
    axis = _axis(b, d, x)
    size = b.shape(x)[axis]
    count = d.integer(1, 3)
    if d.chance(50):
        cuts = sorted(d.integer(0, size) for _ in range(count - 1))
        sizes = np.diff([0, *cuts, size])
        parts = b.nodes("Split", [x, b.data(_i64(sizes))], count, axis=axis)
    elif b.supports("Split", "num_outputs"):
        if count > size:
            raise Rejected("more parts than elements, which the runtime refuses")
        parts = b.nodes("Split", [x], count, axis=axis, num_outputs=count)
    else:
        count = d.choice([c for c in (1, 2, 3) if size % c == 0])
        parts = b.nodes("Split", [x], count, axis=axis)
    if d.chance(50):
        b.node("Neg", [d.choice(parts)])


def expand(b: Builder, d: Draw) -> None:
    """To a shape with more axes, or that is repeated along some."""
    x = b.tensor(range(4))
    sizes = [d.integer(1, 3) if s == 1 and d.chance(70) else s for s in b.shape(x)]
    if d.chance(40):
        sizes = [*b.sizes(1), *sizes]
    target = [
        1 if d.chance(20) and s == o else s
        for s, o in zip(sizes, [1] * (len(sizes) - len(b.shape(x))) + list(b.shape(x)), strict=True)
    ]
    b.node("Expand", [x, _shape_of(b, d, target)])


def tile(b: Builder, d: Draw) -> None:
    """Repeats may be zero."""
    x = b.tensor()
    b.node("Tile", [x, b.data(_i64([d.choice([0] * b.empty + [1, 2, 3]) for _ in b.shape(x)]))])


def trilu(b: Builder, d: Draw) -> None:
    """Above or below any diagonal."""
    k = [b.data(np.array(d.integer(-3, 3)))] if d.chance(60) else []
    b.node("Trilu", [b.tensor(range(2, 5)), *k], upper=d.choice([None, 0, 1]))


def range_(b: Builder, d: Draw) -> None:
    """From a trained start by trained steps."""
    start, delta = b.leaf((), 0.5, 0.6), b.leaf((), 0.4, 0.45)
    b.node("Range", [start, b.data(np.array(d.choice([0.0] * b.empty + [0.8, 1.2, 2.0]))), delta])


def reverse_sequence(b: Builder, d: Draw) -> None:
    """Either axis comes first."""
    x = b.tensor(range(2, 5))
    batch = d.choice([0, 1])
    time = 1 - batch
    lengths = [d.integer(0, b.shape(x)[time]) for _ in range(b.shape(x)[batch])]
    b.node("ReverseSequence", [x, b.data(_i64(lengths))], batch_axis=batch, time_axis=time)


def slice_(b: Builder, d: Draw) -> None:
    """Forward and backward, beyond the ends, with everything or nothing known."""
    x = b.tensor(range(1, 5))
    rank = len(b.shape(x))
    axes = axes_of(b, d, rank, least=1)
    if d.chance(30):
        axes = list(range(d.integer(1, rank)))
    steps = [d.choice([1, 1, 1, 2, 3, -1, -2]) for _ in axes]
    starts = [d.choice([0, 0, 1, 2, -1, -2, MAX, MIN]) for _ in axes]
    ends = [d.choice([MAX, MAX, 1, 2, -1, MIN, 0]) for _ in axes]
    fixed = [d.chance(65) for _ in range(4)]
    inputs = [b.data(_i64(v), fixed=f) for v, f in zip((starts, ends), fixed, strict=False)]
    in_order = axes == list(range(len(axes)))
    plain = all(step == 1 for step in steps)
    inputs.append("" if in_order and d.chance(70) else b.data(_i64(axes), fixed=fixed[2]))
    inputs.append("" if plain and d.chance(70) else b.data(_i64(steps), fixed=fixed[3]))
    b.node("Slice", [x, *inputs])


def pad(b: Builder, d: Draw) -> None:
    """All modes; negative padding with constants."""
    x = b.tensor(range(1, 5))
    rank = len(b.shape(x))
    mode = d.choice([None, "constant", "reflect", "edge", *(["wrap"] if b.graph.opset >= 19 else [])])
    constant = mode in (None, "constant")
    axes = axes_of(b, d, rank, least=1) if b.graph.opset >= 18 and d.chance(40) else None
    over = range(rank) if axes is None else axes
    most = [2 if constant else min(2, max(b.shape(x)[a] - 1, 0)) for a in over]
    pads = [d.integer(0, m) for m in (*most, *most)]
    value = ""
    if constant and d.chance(40):
        value = b.leaf((), 0.3, 1.0) if d.chance(60) else b.data(np.array(0.5))
    inputs = [x, b.data(_i64(pads)), value] + ([] if axes is None else [b.data(_i64(axes))])
    b.node("Pad", inputs, mode=mode)


def center_crop_pad(b: Builder, d: Draw) -> None:
    """Axes grow or shrink."""
    x = b.tensor(range(1, 5))
    rank = len(b.shape(x))
    axes = axes_of(b, d, rank, least=1) if d.chance(60) else None
    count = rank if axes is None else len(axes)
    b.node("CenterCropPad", [x, b.data(_i64([d.integer(1, 4) for _ in range(count)]))], axes=axes)


# Reading.


def indices(b: Builder, d: Draw, shape: Sequence[int], size: int) -> np.ndarray:
    """Returns indices into an axis; there must be none if it is empty."""
    if size == 0 and np.prod(shape) > 0:
        raise Rejected("an index into nothing")
    low = -size if d.chance(40) else 0
    return d.rng().integers(low, max(size, 1), tuple(shape), dtype=d.choice([np.int64, np.int64, np.int32]))


def gather(b: Builder, d: Draw) -> None:
    """By indices of any rank."""
    x = b.tensor(range(1, 5))
    axis = _axis(b, d, x)
    shape = b.sizes(d.integer(0, 2))
    b.node("Gather", [x, b.data(indices(b, d, shape, b.shape(x)[axis]))], axis=axis)


def gather_elements(b: Builder, d: Draw) -> None:
    """As many as the data, more or fewer along the axis."""
    x = b.tensor(range(1, 5))
    axis = _axis(b, d, x)
    shape = list(b.shape(x))
    shape[axis] = b.sizes(1)[0]
    b.node("GatherElements", [x, b.data(indices(b, d, shape, b.shape(x)[axis]))], axis=axis)


def _tuples(b: Builder, d: Draw, shape: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    return np.stack([indices(b, d, shape, size).astype(np.int64) for size in sizes], -1)


def gather_nd(b: Builder, d: Draw) -> None:
    """Elements or slices, with and without batch axes."""
    x = b.tensor(range(1, 5))
    sizes = b.shape(x)
    batch = d.integer(0, min(len(sizes) - 1, 2)) if d.chance(40) else 0
    depth = d.integer(1, len(sizes) - batch)
    shape = [*sizes[:batch], *b.sizes(d.integer(0 if batch else 1, 2))]
    where = _tuples(b, d, shape, sizes[batch : batch + depth])
    b.node("GatherND", [x, b.data(where)], batch_dims=batch or None)


def compress(b: Builder, d: Draw) -> None:
    """Along an axis or of all elements; the condition may be short."""
    x = b.tensor(range(1, 5))
    axis = None if d.chance(30) else _axis(b, d, x)
    size = b.values[x].size if axis is None else b.shape(x)[axis]
    condition = np.array([d.chance(60) for _ in range(d.integer(0, size))], bool)
    b.node("Compress", [x, b.data(condition)], axis=axis)


def top_k(b: Builder, d: Draw) -> None:
    """The largest or smallest."""
    x = b.tensor(range(1, 5))
    axis = _axis(b, d, x)
    k = b.data(_i64([d.integer(0 if b.empty else 1, max(b.shape(x)[axis], 1))]))
    b.nodes("TopK", [x, k], 2, axis=axis, largest=d.choice([None, 0, 1]))


def unique(b: Builder, d: Draw) -> None:
    """Of all elements or of slices, some of them there twice; other ones are apart, since they would change places."""
    x = b.tensor()
    axis = None if d.chance(40) or not b.shape(x) else _axis(b, d, x)
    if np.diff(np.sort(b.values[x], axis=None)).min(initial=1.0) < 1e-3:
        raise Rejected("equal elements, or almost")
    if b.shape(x) and d.chance(40):
        x = b.node("Concat", [x, x], axis=axis or 0)
    b.nodes("Unique", [x], d.integer(1, 4), axis=axis, sorted=d.choice([None, 0, 1]))


def one_hot(b: Builder, d: Draw) -> None:
    """Indices beyond the depth are cold."""
    shape = b.sizes(d.integer(1, 2))
    depth = d.integer(1, 3)
    where = d.rng().integers(-depth - 1, depth + 2, shape)
    values = b.tensor([1], fits=lambda a: a.shape == (2,), shape=lambda: (2,))
    axis = d.integer(-len(shape) - 1, len(shape))
    b.node("OneHot", [b.data(where), b.data(np.array(depth)), values], axis=axis)


# Writing.


def _reduction(b: Builder, d: Draw, op: str) -> str | None:
    names: list[str | None] = [None]
    if b.supports(op, "reduction"):
        names += ["none", "add", "mul"] + (["max", "min"] if b.graph.opset >= 18 else [])
    return d.choice(names)


def scatter_elements(b: Builder, d: Draw) -> None:
    """Without a reduction, indices do not repeat."""
    x = b.tensor(range(1, 5))
    axis = _axis(b, d, x)
    how = _reduction(b, d, "ScatterElements")
    size = b.shape(x)[axis]
    shape = [d.integer(0 if b.empty else min(1, s), s) if d.chance(30) else s for s in b.shape(x)]
    if how in (None, "none"):
        shape[axis] = min(shape[axis], size)
        scores = d.rng().random([size if i == axis % len(shape) else s for i, s in enumerate(shape)])
        order = np.argsort(scores, axis)
        where: Any = np.take(order, range(shape[axis]), axis)
    else:
        where = indices(b, d, shape, size)
    updates = b.like(shape)
    b.node("ScatterElements", [x, b.data(where), updates], axis=axis, reduction=how)


def scatter_nd(b: Builder, d: Draw) -> None:
    """Without a reduction, indices do not repeat."""
    x = b.tensor(range(1, 5))
    sizes = b.shape(x)
    depth = d.integer(1, len(sizes))
    how = _reduction(b, d, "ScatterND")
    places = int(np.prod(sizes[:depth]))
    count = d.integer(0 if b.empty or not places else 1, min(places, 3))
    if how in (None, "none"):
        flat = d.rng().permutation(places)[:count]
    else:
        flat = d.rng().integers(0, max(places, 1), count)
    where = np.stack(np.unravel_index(flat, sizes[:depth]), -1) if places else np.zeros((0, depth), int)
    updates = b.like([len(where), *sizes[depth:]])
    b.node("ScatterND", [x, b.data(where.astype(np.int64)), updates], reduction=how)


def tensor_scatter(b: Builder, d: Draw) -> None:
    """Into a cache, linear or circular."""
    past = b.tensor([3, 4], fits=lambda a: a.shape[-2] > 0)
    sizes = list(b.shape(past))
    axis = d.integer(1, len(sizes) - 1) if d.chance(50) else None
    at = len(sizes) - 2 if axis is None else axis
    if sizes[at] == 0:
        raise Rejected("a cache of nothing")
    update = list(sizes)
    update[at] = d.integer(min(1, sizes[at]), sizes[at])
    mode = d.choice([None, "linear", "circular"])
    most = sizes[at] - 1 if mode == "circular" else sizes[at] - update[at]
    starts = [d.integer(0, max(most, 0)) for _ in range(sizes[0])]
    write = [b.data(_i64(starts))] if d.chance(70) else []
    b.node("TensorScatter", [past, b.like(update), *write], axis=axis, mode=mode)


DRAWERS: dict[str, Drawer] = {
    "CenterCropPad": center_crop_pad,
    "Compress": compress,
    "Concat": concat,
    "Expand": expand,
    "Flatten": flatten,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "OneHot": one_hot,
    "Pad": pad,
    "Range": range_,
    "Reshape": reshape,
    "ReverseSequence": reverse_sequence,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "Slice": slice_,
    "Split": split,
    "Squeeze": squeeze,
    "TensorScatter": tensor_scatter,
    "Tile": tile,
    "TopK": top_k,
    "Transpose": transpose,
    "Trilu": trilu,
    "Unique": unique,
    "Unsqueeze": unsqueeze,
}
