"""Elementwise arithmetic, casts, determinants."""

import numpy as np
import torch

from autodiff.case import UNDER_TEST, C, Case, F, R

POSITIVE = {"low": 0.3, "high": 2.0}
UNIT = {"low": -0.9, "high": 0.9}

CASES = [
    Case(op, inputs, twin)
    for op, twin in {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div}.items()
    for inputs in [
        (F(2, 3), F(2, 3, **POSITIVE)),
        (F(2, 3, 4), F(4, **POSITIVE)),
        (F(2, 1, 4), F(3, 1, **POSITIVE)),
        (F(), F(2, 3, **POSITIVE)),
    ]
] + [
    Case(op, (F(2, 3, **domain),), twin)
    for op, domain, twin in [
        ("Neg", {}, torch.neg),
        ("Abs", {}, torch.abs),
        ("Sqrt", POSITIVE, torch.sqrt),
        ("Reciprocal", POSITIVE, torch.reciprocal),
        ("Exp", {}, torch.exp),
        ("Log", POSITIVE, torch.log),
        ("Erf", {}, torch.erf),
        ("Sin", {}, torch.sin),
        ("Cos", {}, torch.cos),
        ("Tan", UNIT, torch.tan),
        ("Asin", UNIT, torch.asin),
        ("Acos", UNIT, torch.acos),
        ("Atan", {}, torch.atan),
        ("Sinh", {}, torch.sinh),
        ("Cosh", {}, torch.cosh),
        ("Asinh", {}, torch.asinh),
        ("Acosh", {"low": 1.1, "high": 3.0}, torch.acosh),
        ("Atanh", UNIT, torch.atanh),
        ("Identity", {}, lambda x: x * 1),
    ]
]

CASES += [
    Case("Pow", inputs, torch.pow)
    for inputs in [(F(2, 3, **POSITIVE), F(2, 3)), (F(2, 3, **POSITIVE), F(3)), (F(3, **POSITIVE), F(2, 1))]
]
CASES += [
    Case("Pow", (F(2, 3), C(exponent)), lambda x, y: x**y, name=f"constant-{exponent}")
    for exponent in (1.0, 2.0, 3.0, 4.0, -1.0)
]
CASES += [
    Case("Pow", (F(2, 3), C(np.array(3, np.int64))), torch.pow, name="constant-int64"),
    Case("Pow", (F(2, 3, **POSITIVE), C(0.5)), torch.pow, name="constant-root"),
    Case("Pow", (F(2, 3, **POSITIVE), C(-1.5)), torch.pow, name="constant-fraction"),
    Case("Pow", (F(2, 3), C(np.array([0.0, 1.0, 2.0]))), torch.pow, name="constant-with-zero"),
    Case("Pow", (F(2, 3), R(np.array([0, 1, 4], np.int64))), torch.pow, name="run-time-int64"),
    Case("Pow", (F(3), R(np.array([[3], [2]], np.int32))), torch.pow, name="run-time-int32-broadcasts-base"),
]

CASES += [
    Case("Clip", (F(3, 4),), lambda x: x * 1),
    Case("Clip", (F(3, 4), C(-0.5), C(0.7)), torch.clamp, name="both-bounds"),
    Case("Clip", (F(3, 4), None, C(0.7)), lambda x, _, high: x.clamp(max=high), name="max"),
    Case("Clip", (F(3, 4), C(-0.5)), lambda x, low: x.clamp(min=low), name="min"),
    Case("Clip", (F(3, 4), F(low=-0.7, high=-0.5), F(low=0.5, high=0.7)), torch.clamp, name="trained-bounds"),
    Case("Clip", (F(3, 4), F(low=0.5, high=0.7), F(low=-0.7, high=-0.5)), torch.clamp, name="crossed-bounds"),
    Case("Clip", (F(3, 4), F(low=-0.7, high=-0.5)), lambda x, low: torch.clamp(x, low), name="trained-min"),
    Case("Where", (R(np.array([[True, False, True], [False, False, True]])), F(2, 3), F(2, 3)), torch.where),
    Case("Where", (R(np.array([[True], [False]])), F(3), F()), torch.where),
    Case("Mod", (F(2, 3, low=-5.0, high=5.0), F(2, 3, low=0.7, high=1.3)), torch.fmod, {"fmod": 1}),
    Case("Mod", (F(2, 3, low=-5.0, high=5.0), F(3, low=-1.3, high=-0.7)), torch.fmod, {"fmod": 1}),
    Case("Sum", (F(2, 3), F(3), F(2, 1)), lambda a, b, c: a + b + c),
    Case("Mean", (F(2, 3), F(3), F(2, 1)), lambda a, b, c: (a + b + c) / 3),
    Case("Mean", (F(2, 3),), lambda a: a * 1),
]


def _stacked(reduce):
    return lambda *xs: reduce(torch.stack(torch.broadcast_tensors(*xs)), 0)


CASES += [
    Case(op, inputs, _stacked(reduce))
    for op, reduce in (("Max", torch.amax), ("Min", torch.amin))
    for inputs in [
        (F(2, 3),),
        (F(2, 3), F(2, 3)),
        (F(2, 3), F(3), F(2, 1)),
        (F(2, 3), R(np.array(0.25)), F(3)),
    ]
]

CASES += [
    Case("Det", (F(*batch, n, n),), torch.linalg.det, symbolic={0: tuple(range(len(batch)))})
    for *batch, n in [(1,), (2,), (3,), (9,), (2, 4), (2, 1, 3)]
]

CASES += [
    # Between two dtypes: test_cast.py.
    Case("Cast", (F(2, 3),), lambda x: x * 1, {"to": UNDER_TEST}),
    Case("CastLike", (F(2, 3), C(np.zeros(1))), lambda x, _: x * 1),
    Case("CastLike", (F(2, 3), F(2)), lambda x, like: x + 0 * like.sum()),
]
