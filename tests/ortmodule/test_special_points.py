"""Elementwise operators at exact zeros, ties, the ends of their domains and infinities, beside eager PyTorch.

Values, first and second derivatives are compared in float64. `DIFFERENT` lists exactly what differs: the test
fails for a new difference, and for one that is mended.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onnxtrain.ortmodule import ORTModule

pytestmark = pytest.mark.torch

POINTS = torch.tensor(
    [-math.inf, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, math.inf, math.nan], dtype=torch.float64
)
SHARED = 12
"""Operators of one graph."""

_OF_TORCH = """abs acos acosh asin asinh atan atanh cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 frac lgamma
log log10 log1p log2 logit nan_to_num neg reciprocal relu rsqrt sigmoid sin sinc sinh sqrt square tan tanh"""
_OF_FUNCTIONAL = """hardshrink softshrink tanhshrink relu6 hardtanh hardswish leaky_relu elu selu celu gelu silu mish
softplus softsign logsigmoid"""
_OF_TWO = """div mul add sub pow atan2 hypot maximum minimum fmax fmin fmod xlogy logaddexp copysign"""

OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in _OF_TORCH.split()},
    **{name: getattr(F, name) for name in _OF_FUNCTIONAL.split()},
    **{f"pow {e}": lambda x, e=e: x**e for e in (-3, -2, -1.5, -1, -0.5, 0.5, 1, 1.5, 2, 2.5, 3, 4)},
    "power of 2": lambda x: 2.0**x,
    "power of 0": lambda x: 0.0**x,
    "half": lambda x: x / 2,
    "2 / x": lambda x: 2 / x,
    "x / x": lambda x: x / x,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp min": lambda x: x.clamp(min=0),
    "clamp max": lambda x: x.clamp(max=1),
    "clamped reciprocal": lambda x: x.reciprocal().clamp(-1, 1),
    "entr": torch.special.entr,
    "ndtr": torch.special.ndtr,
    "log_ndtr": torch.special.log_ndtr,
    "ndtri": torch.special.ndtri,
    **{f"{name} of two": getattr(torch, name) for name in _OF_TWO.split()},
    "where of two": lambda a, b: torch.where(a > b, a, b),
    "lerp of two": lambda a, b: torch.lerp(a, b, 0.3),
    "addcdiv of two": lambda a, b: torch.addcdiv(a, a, b),
    "product with rsqrt of two": lambda a, b: a * b.rsqrt(),
}

DIFFERENT: dict[str, str] = {
    "abs": "g0 gw",
    "acos": "gg0",
    "acosh": "g0 gg0 gw",
    "asin": "gg0",
    "atanh": "gg0",
    "digamma": "y g0 gg0 gw",
    "erfc": "g0 gw",
    "erfinv": "gg0",
    "expm1": "g0 gg0 gw",
    "lgamma": "y g0 gg0 gw",
    "logit": "g0 gg0 gw",
    "sinc": "gg0 gw",
    "softshrink": "g0 gw",
    "hardswish": "g0",
    "elu": "g0 gg0 gw",
    "selu": "g0 gg0 gw",
    "celu": "g0 gg0 gw",
    "pow -0.5": "y",
    "pow 0.5": "gg0",
    "pow 1.5": "g0 gg0 gw",
    "pow 2.5": "gg0",
    "entr": "g0 gg0 gw",
    "log_ndtr": "g0 gw",
    "ndtri": "gg0",
    "pow of two": "gg0 gw",
    "atan2 of two": "g0 gg0 g1 gg1 gw",
    "hypot of two": "g0 g1 gw",
    "maximum of two": "g0 g1 gw",
    "minimum of two": "g0 g1 gw",
    "fmod of two": "g1 gw",
    "xlogy of two": "g0 gg0 gw",
    "logaddexp of two": "g0 gg0 g1 gg1 gw",
    "copysign of two": "g0 gg0 gw",
    "addcdiv of two": "gg1",
}
"""By operator, the results that differ somewhere: y, first derivatives (g), second ones (gg), and the derivatives of
first ones by the cotangent (gw).

ONNX has no operator for many of these: a formula stands for it, whose parts are infinite where the whole is not.
"""


class Together(nn.Module):
    def __init__(self, functions: Sequence[Callable[..., torch.Tensor]]) -> None:
        super().__init__()
        self.functions = list(functions)

    def forward(self, arguments: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [function(*given) for function, given in zip(self.functions, arguments, strict=True)]


def _weights(like: torch.Tensor, start: float) -> torch.Tensor:
    return torch.linspace(start, start + 1, like.numel(), dtype=like.dtype)


def _derivatives(model: Any, arguments: list[list[torch.Tensor]]) -> list[dict[str, torch.Tensor | None]]:
    """Returns per operator its results, by the names of `DIFFERENT`."""
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


def _groups() -> list[list[str]]:
    groups = []
    for of_two in (False, True):
        names = [name for name in OPERATORS if name.endswith("of two") == of_two]
        groups += [names[first : first + SHARED] for first in range(0, len(names), SHARED)]
    return groups


def _different(names: Sequence[str]) -> dict[str, str]:
    """Returns what differs of each of these operators."""
    pairs = [x.reshape(-1) for x in torch.meshgrid(POINTS, POINTS, indexing="ij")]
    arguments = [pairs if name.endswith("of two") else [POINTS] for name in names]
    plain = Together([OPERATORS[name] for name in names])
    ours = ORTModule(plain)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ORTModule: ")
        found, expected = (_derivatives(model, arguments) for model in (ours, plain))
        return {
            name: " ".join(key for key in want if not _same(got[key], want[key]))
            for name, got, want in zip(names, found, expected, strict=True)
        }


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("names", _groups(), ids=lambda names: names[0])
def test_as_in_eager(names: list[str]) -> None:
    torch._dynamo.reset()
    assert _different(names) == {name: DIFFERENT.get(name, "") for name in names}


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
