"""Draw elementwise ops, reductions and matrix products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autodiff.case import UNDER_TEST
from autodiff.fuzz.builder import Builder
from autodiff.fuzz.draw import Draw, Rejected
from autodiff.fuzz.graph import OTHER

Drawer = Callable[[Builder, Draw], None]

DOMAINS = {
    "Acos": (-0.9, 0.9),
    "Acosh": (1.1, 3.0),
    "Asin": (-0.9, 0.9),
    "Atanh": (-0.9, 0.9),
    "Log": (0.3, 3.0),
    "Reciprocal": (0.4, 3.0),
    "Sqrt": (0.2, 3.0),
    "Tan": (-1.2, 1.2),
}
"""Intervals of inputs for functions that are undefined or steep outside of them."""

PLAIN = (
    *("Abs", "Asinh", "Atan", "Cos", "Cosh", "Erf", "Exp", "Identity", "Mish", "Neg", "Relu", "Selu"),
    *("Sigmoid", "Sin", "Sinh", "Softplus", "Softsign", "Tanh", "HardSwish"),
)
WITH_NUMBERS = {
    "Celu": {"alpha": (0.5, 2.0)},
    "Elu": {"alpha": (0.5, 2.0)},
    "HardSigmoid": {"alpha": (0.125, 0.75), "beta": (0.25, 0.625)},
    "LeakyRelu": {"alpha": (-0.25, 0.5)},
    "Shrink": {"lambd": (0.25, 0.75), "bias": (0.0, 0.75)},
    "Swish": {"alpha": (0.5, 1.75)},
    "ThresholdedRelu": {"alpha": (0.25, 0.75)},
}
"""Attributes; each is left out or one of two values."""


def _unary(op: str) -> Drawer:
    def drawer(b: Builder, d: Draw) -> None:
        x = b.tensor()
        if op in DOMAINS:
            x = b.squashed(x, *DOMAINS[op])
        attrs = {n: d.choice([None, *numbers]) for n, numbers in WITH_NUMBERS.get(op, {}).items()}
        b.node(op, [x], **attrs)

    return drawer


def gelu(b: Builder, d: Draw) -> None:
    """Both approximations."""
    b.node("Gelu", [b.tensor()], approximate=d.choice([None, "none", "tanh"]))


def _binary(op: str) -> Drawer:
    def drawer(b: Builder, d: Draw) -> None:
        x = b.tensor()
        y = b.broadcastable(b.shape(x))
        if op in ("Div", "Mod"):
            y = b.squashed(y, 0.5, 2.0)
        pair = [x, y] if op in ("Div", "Mod") or d.chance(60) else [y, x]
        b.node(op, pair, fmod=1 if op == "Mod" else None)

    return drawer


def pow_(b: Builder, d: Draw) -> None:
    """Trained and fixed exponents, integer ones too."""
    x = b.tensor()
    kind = d.choice(["trained", "scalar", "tensor", "integers"])
    if kind == "trained":
        b.node("Pow", [b.squashed(x, 0.3, 2.5), b.broadcastable(b.shape(x))])
    elif kind == "scalar":
        exponent = d.choice([0.0, 1.0, 2.0, 3.0, 4.0, 0.5, -1.0, -1.5])
        fits = exponent >= 0 and exponent % 1 == 0
        b.node(
            "Pow", [x if fits else b.squashed(x, 0.4, 2.5), b.data(np.full(d.choice([(), (1,)]), exponent))]
        )
    else:
        sizes = b.shape(x)[d.integer(0, len(b.shape(x))) :]
        exponents = np.reshape([d.integer(0, 3) for _ in range(int(np.prod(sizes)))], sizes)
        dtype = np.float64 if kind == "tensor" else d.choice([np.int64, np.int32])
        b.node("Pow", [x, b.data(exponents.astype(dtype))])


def prelu(b: Builder, d: Draw) -> None:
    """The slope is broadcast to the input."""
    x = b.tensor()
    b.node("PRelu", [x, b.broadcastable(b.shape(x), within=True)])


def _variadic(op: str) -> Drawer:
    def drawer(b: Builder, d: Draw) -> None:
        values = [b.tensor()]
        for _ in range(d.integer(0, 2)):
            shape = np.broadcast_shapes(*(b.shape(v) for v in values))
            values.append(b.broadcastable(shape))
        b.node(op, values)

    return drawer


def where(b: Builder, d: Draw) -> None:
    """The condition is data, or compares values of the graph."""
    x = b.tensor()
    y = b.broadcastable(b.shape(x))
    shape = np.broadcast_shapes(b.shape(x), b.shape(y))
    if d.chance(40):
        condition = b.node("Greater", [x, b.data(np.array(0.1), fixed=True)])
    else:
        own = [1 if d.chance(25) else s for s in shape[d.integer(0, len(shape)) :]]
        condition = b.data(d.rng().integers(0, 2, own).astype(bool))
        if x == y and not own:
            raise Rejected("a choice of nothing: it says that no gradient passes")
    b.node("Where", [condition, *d.permutation([x, y])])


def clip(b: Builder, d: Draw) -> None:
    """Bounds are left out, fixed, or trained."""

    def bound(low: float, high: float) -> str:
        kind = d.choice(["none", "fixed", "trained"])
        if kind == "none":
            return ""
        return b.leaf((), low, high) if kind == "trained" else b.data(np.array((low + high) / 2))

    b.node("Clip", [b.tensor(), bound(-0.8, -0.4), bound(0.4, 0.8)])


def cast(b: Builder, d: Draw) -> None:
    """To the other floating-point type and back, or to the same."""
    x = b.tensor()
    if d.chance(60):
        x = b.node("Cast", [x], to=OTHER)
        b.unused.add(x)
    b.node("Cast", [x], to=UNDER_TEST)


def cast_like(b: Builder, d: Draw) -> None:
    """To the type of another value."""
    b.node("CastLike", [b.tensor(), b.tensor()])


def dropout(b: Builder, d: Draw) -> None:
    """As in inference, or in training with nothing to drop."""
    kind = d.choice(["inference", "off", "zero"])
    ratio = b.data(np.array(0.0 if kind == "zero" else 0.5)) if kind == "zero" or d.chance(50) else ""
    mode = b.data(np.array(kind == "zero")) if kind != "inference" else ""
    b.node("Dropout", [b.tensor(), ratio, mode])


def axes_of(b: Builder, d: Draw, rank: int, least: int = 0) -> list[int]:
    """Returns different axes, some of them counted from the end."""
    return [a - rank if d.chance(30) else a for a in d.subset(range(rank), least)]


def _reduction(op: str) -> Drawer:
    def drawer(b: Builder, d: Draw) -> None:
        x = b.tensor()
        if op == "ReduceLogSum":
            x = b.squashed(x, 0.3, 2.5)
        axes = axes_of(b, d, len(b.shape(x)))
        keepdims = d.choice([None, 0, 1])
        if b.supports(op, "axes"):
            b.node(op, [x], axes=axes or None, keepdims=keepdims)
            return
        noop = d.choice([None, 0, 1]) if b.supports(op, "noop_with_empty_axes") else None
        given = [] if not axes and d.chance(50) else [b.data(np.array(axes, np.int64))]
        b.node(op, [x, *given], keepdims=keepdims, noop_with_empty_axes=noop)

    return drawer


def _cumulative(op: str) -> Drawer:
    def drawer(b: Builder, d: Draw) -> None:
        x = b.tensor(range(1, 5))
        rank = len(b.shape(x))
        axis = b.data(np.array(d.integer(-rank, rank - 1), d.choice([np.int64, np.int32])))
        b.node(op, [x, axis], exclusive=d.choice([None, 0, 1]), reverse=d.choice([None, 0, 1]))

    return drawer


def _softmax(op: str) -> Drawer:
    def drawer(b: Builder, d: Draw) -> None:
        x = b.tensor(range(1, 5))
        rank = len(b.shape(x))
        b.node(op, [x], axis=d.choice([None, *range(-rank, rank)]))

    return drawer


def matmul(b: Builder, d: Draw) -> None:
    """Vectors, matrices, and batches that are broadcast."""
    x = b.tensor(range(1, 5))
    inner = b.shape(x)[-1]
    batch = [1 if d.chance(30) else s for s in b.shape(x)[:-2]][d.integer(0, max(len(b.shape(x)) - 2, 0)) :]
    if d.chance(15) and len(batch) < 2:
        batch = [*b.sizes(1, least=1), *batch]
    shape = [inner] if d.chance(20) else [*batch, inner, *b.sizes(1)]
    b.node("MatMul", [x, b.like(shape)])


def gemm(b: Builder, d: Draw) -> None:
    """With a bias of any shape that is broadcast."""
    x = b.tensor([2])
    trans_a, trans_b = d.choice([0, 1]), d.choice([0, 1])
    rows, inner = b.shape(x)[::-1] if trans_a else b.shape(x)
    (columns,) = b.sizes(1)
    y = b.like([columns, inner] if trans_b else [inner, columns])
    bias = [] if d.chance(30) else [b.broadcastable((rows, columns), within=True)]
    numbers = {"alpha": d.choice([None, 0.5]), "beta": d.choice([None, 0.25])}
    b.node("Gemm", [x, y, *bias], transA=trans_a or None, transB=trans_b or None, **numbers)


def det(b: Builder, d: Draw) -> None:
    """Of matrices and batches of them."""

    def shape() -> list[int]:
        size = d.integer(1, 3)
        return [*b.sizes(d.integer(0, 2)), size, size]

    b.node("Det", [b.tensor([2, 3, 4], fits=lambda a: a.shape[-1] == a.shape[-2], shape=shape)])


def einsum(b: Builder, d: Draw) -> None:
    """Up to three operands; labels are repeated, broadcast, summed over, or stand in an ellipsis.

    No axis is empty: ONNX Runtime's kernel can end the process there.
    """
    x = b.tensor(range(4), fits=lambda a: a.size > 0)
    if b.values[x].size == 0:
        raise Rejected("Einsum of an empty axis")
    labels = "ijkl"[: len(b.shape(x))]
    sizes = dict(zip(labels, b.shape(x), strict=True))
    same = [i for i in range(1, len(labels)) if b.shape(x)[i] == b.shape(x)[0]]
    if same and d.chance(20):
        labels = "".join(labels[0] if i == same[0] else c for i, c in enumerate(labels))
    terms, operands = [labels], [x]
    for _ in range(d.integer(0, 2)):
        new = "mn"[: d.integer(0, 1)]
        sizes.update({c: d.integer(1, 3) for c in new if c not in sizes})
        term = "".join(d.permutation([*d.subset(sorted(set(labels))), *new])[:3])
        shape = [1 if d.chance(8) else sizes[c] for c in term]
        terms.append(term)
        operands.append(b.like(shape))
    used = sorted(set("".join(terms)))
    output = "".join(d.subset(used))
    equation = ",".join(terms) + ("" if d.chance(15) else "->" + output)
    head = labels[:1]
    if (
        head
        and labels.count(head) == 1
        and d.chance(20)
        and all(t[:1] == head or head not in t for t in terms)
    ):
        equation = equation.replace(head, "...")
    b.node("Einsum", operands, equation=equation)


DRAWERS: dict[str, Drawer] = {
    **{op: _unary(op) for op in (*DOMAINS, *PLAIN, *WITH_NUMBERS)},
    **{op: _binary(op) for op in ("Add", "Div", "Mod", "Mul", "Sub")},
    **{op: _variadic(op) for op in ("Max", "Mean", "Min", "Sum")},
    **{
        f"Reduce{name}": _reduction(f"Reduce{name}")
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
    **{op: _cumulative(op) for op in ("CumProd", "CumSum")},
    **{op: _softmax(op) for op in ("LogSoftmax", "Softmax")},
    "Cast": cast,
    "CastLike": cast_like,
    "Clip": clip,
    "Det": det,
    "Dropout": dropout,
    "Einsum": einsum,
    "Gelu": gelu,
    "Gemm": gemm,
    "MatMul": matmul,
    "PRelu": prelu,
    "Pow": pow_,
    "Where": where,
}
