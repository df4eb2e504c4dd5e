"""Second derivatives of elementwise operators at zeros, ties, ends of domains, infinities and NaN, beside eager.

`DIFFERENT` lists exactly what differs in float64: the test fails for a new difference, and for one that is mended.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from onnxtrain.ortmodule import ORTModule
from ortmodule.elementwise import ONE, TWO, Function
from ortmodule.test_special_points import SHARED, Together

pytestmark = pytest.mark.torch

POINTS = torch.tensor(
    [-math.inf, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, math.inf, math.nan], dtype=torch.float64
)

DIFFERENT: dict[str, str] = {
    "acos": "gg0",
    "acosh": "gg0",
    "asin": "gg0",
    "atanh": "gg0",
    "digamma": "gg0 gw",
    "erfinv": "gg0",
    "expm1": "gg0",
    "lgamma": "gg0 gw",
    "logit": "gw",
    "sinc": "gw",
    "celu": "gg0",
    "elu": "gg0",
    "selu": "gg0",
    "elu of 0.3": "gg0",
    "celu of 0.3": "gg0",
    "celu of 2": "gg0",
    "celu of -1": "gg0",
    "pow -0.5": "gg0 gw",
    "pow 0.5": "gg0",
    "erfcx": "gg0",
    "log_ndtr": "gw",
    "ndtri": "gg0",
    "logit within 0.001": "gw",
    "ldexp of two": "gg1",
    "logaddexp2 of two": "gg0 gg1 gw",
    "pow of two": "gg0 gw",
    "smooth_l1_loss of two": "gw",
    "huber_loss of two": "gw",
    "smooth_l1_loss below 0.1 of two": "gw",
    "huber_loss below 0.3 of two": "gw",
    "xlog1py of two": "gg1",
    "prelu of two": "gg0 gg1 gw",
    "glu of two": "gg1",
}
"""By operator, the second derivatives that differ: by the arguments (gg) and by the cotangent (gw).

The first derivative is a formula, whose own derivative has parts that are infinite where the whole is not.
"""


def _has_gradients(function: Function, count: int) -> bool:
    """True if the result has a gradient with respect to each of `count` arguments."""
    given = [torch.full([1], 0.3, requires_grad=True) for _ in range(count)]
    result = function(*given)
    if not result.requires_grad:
        return False
    gradients = torch.autograd.grad(result.sum(), given, allow_unused=True, create_graph=True)
    if None in gradients:
        return False
    try:
        torch.autograd.grad(
            [g for g in gradients if g.requires_grad], given, [torch.ones(1)], allow_unused=True
        )
    except RuntimeError as error:
        return "not implemented" not in str(error)
    return True


def _groups() -> list[list[str]]:
    groups = []
    for table, count in ((ONE, 1), (TWO, 2)):
        names = [name for name, function in table.items() if _has_gradients(function, count)]
        groups += [names[first : first + SHARED] for first in range(0, len(names), SHARED)]
    return groups


def _weights(like: torch.Tensor, start: float) -> torch.Tensor:
    return torch.linspace(start, start + 1, like.numel(), dtype=like.dtype)


def _derivatives(model: Any, arguments: list[list[torch.Tensor]]) -> list[dict[str, torch.Tensor | None]]:
    """Returns per operator its results and derivatives."""
    given = [[x.clone().requires_grad_() for x in those] for those in arguments]
    results = model(given)
    leaves = [x for those in given for x in those]
    cotangents = [_weights(y, 0.5).requires_grad_() for y in results]
    first = torch.autograd.grad(results, leaves, cotangents, create_graph=True)
    again = [g for g in first if g.requires_grad]
    vectors = [_weights(g, 1.0) for g in again]
    second = iter(torch.autograd.grad(again, [*leaves, *cotangents], vectors, allow_unused=True))
    firsts = iter(first)
    found: list[dict[str, torch.Tensor | None]] = []
    for y, those in zip(results, given, strict=True):
        seen: dict[str, torch.Tensor | None] = {"y": y}
        for place in range(len(those)):
            seen[f"g{place}"] = next(firsts)
            seen[f"gg{place}"] = next(second)
        found.append(seen)
    for seen, gradient in zip(found, second, strict=True):
        seen["gw"] = gradient
    return found


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Tell whether two derivatives are equal; None counts as zero."""
    if one is None or other is None:
        return all(x is None or not x.any() for x in (one, other))
    return torch.allclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True)


def _different(names: Sequence[str]) -> dict[str, str]:
    """Returns which second derivatives of these operators differ."""
    pairs = [x.reshape(-1) for x in torch.meshgrid(POINTS, POINTS, indexing="ij")]
    table = ONE if names[0] in ONE else TWO
    arguments = [[POINTS] if table is ONE else pairs for _ in names]
    plain = Together([table[name] for name in names])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ORTModule: ")
        found, expected = (_derivatives(model, arguments) for model in (ORTModule(plain), plain))
    different = {}
    for name, got, want in zip(names, found, expected, strict=True):
        keys = [k for k in want if k.startswith(("gg", "gw")) and not _same(got[k], want[k])]
        different[name] = " ".join(keys)
        if different[name] != DIFFERENT.get(name, ""):
            for key in keys:
                pair = [torch.zeros_like(POINTS[:1]) if d[key] is None else d[key] for d in (got, want)]
                far = ~torch.isclose(*pair, rtol=1e-6, atol=1e-9, equal_nan=True)
                columns = [x.expand_as(far)[far].tolist() for x in (*arguments[0], *pair)]
                print(f"{name}: {key} at a point, here and in eager:", *zip(*columns, strict=True))
    return different


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("names", _groups(), ids=" ".join)
def test_as_in_eager(names: list[str]) -> None:
    torch._dynamo.reset()
    assert _different(names) == {name: DIFFERENT.get(name, "") for name in names}, (
        "left is what differs from eager, right what DIFFERENT says: mend the lowering (its slope, `low.with_slope`), "
        "or correct DIFFERENT if it is only at kinks, poles, infinities, and at or beyond the ends of the domain"
    )


FINITE = torch.tensor([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "points"),
    [
        (
            "hypot",
            [(a, b) for a in FINITE for b in FINITE]
            + [(a, 0.0) for a in FINITE]
            + [(0.0, b) for b in FINITE],
        ),
        ("erfinv", [(0.0,), (0.5,), (-0.5,), (0.9,), (-0.9,)]),
        ("acosh", [(1.5,), (2.0,)]),
    ],
)
def test_second_derivatives_at_finite_points(name: str, points: list[tuple[float, ...]]) -> None:
    """At ties of |a| and |b|, and where one of them is 0, a maximum and |x| have other derivatives than `hypot`."""
    torch._dynamo.reset()
    function = getattr(torch, name)
    arguments = [
        [
            torch.tensor([float(point[i]) for point in points], dtype=torch.float64)
            for i in range(len(points[0]))
        ]
    ]
    plain = Together([function])
    found, expected = (_derivatives(model, arguments)[0] for model in (ORTModule(plain), plain))
    assert all(value is None or value.isfinite().all() for value in expected.values())
    for key, want in expected.items():
        assert _same(found[key], want), key


def test_slope_of_acosh_is_plus_infinity_at_one() -> None:
    torch._dynamo.reset()
    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    ORTModule(Together([torch.acosh]))([[x]])[0].backward()
    assert x.grad is not None
    assert x.grad.item() == math.inf
