"""Elementwise operators at zeros, ties, subnormal and huge numbers, ends of domains, infinities and NaN, beside eager.

Results and first derivatives are compared in each dtype, second derivatives in float64. `EXEMPT` lists what differs,
with the reason: the tests fail for a new difference, and for one that is gone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule
from ortmodule.elementwise import INTEGERS, ONE, TWO, Function

pytestmark = pytest.mark.torch

FLOAT64, FLOAT32, FLOAT16, BFLOAT16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
DTYPES = (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)
SHARED = 12
"""Operators of one graph."""

# Relative. float16 and bfloat16: a few rounded operations.
TOLERANCES = {FLOAT64: 1e-9, FLOAT32: 2e-5, FLOAT16: 5e-3, BFLOAT16: 2e-2}


def _signed(numbers: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Returns the numbers and their negatives in a dtype, without repetitions, and NaN."""
    rounded = torch.tensor(numbers, dtype=FLOAT64).to(dtype).unique()
    return torch.cat([rounded, -rounded, torch.tensor([math.nan], dtype=dtype)])


def points(dtype: torch.dtype) -> torch.Tensor:
    """Returns arguments of functions of one tensor."""
    f = torch.finfo(dtype)
    small = [0.0, f.tiny, f.tiny / 8, f.tiny * 0.75, 1e-30, 1e-20, 1e-10, 1e-5, 1e-3, 0.25, 0.5]
    medium = [1 - f.eps, 1.0, 1 + f.eps, 1.5, 2.0, 2.5, 3.0, 6.0, 15.0, 20.5]
    return _signed([*small, *medium, 88.0, 100.0, 1e4, 1e20, f.max, math.inf], dtype)


def pairs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns arguments of functions of two tensors: all pairs of some numbers."""
    f = torch.finfo(dtype)
    small = [0.0, f.tiny / 8, f.tiny, 1e-20, 0.3, 0.5, 1 - f.eps]
    one = _signed([*small, 1.0, 2.0, 2.5, 3.0, 7.0, 100.0, 1e20, f.max, math.inf], dtype)
    return [x.reshape(-1) for x in torch.meshgrid(one, one, indexing="ij")]


@dataclass(frozen=True)
class Exempt:
    """Points at which ORTModule differs from eager PyTorch.

    Attributes:
        reason: why, and which of both is exact.
        where: returns the mask of the points, given the arguments.
        results: the results that differ: "y", and "g0", "g1" for the derivatives.
        dtypes: the dtypes in which they differ.
        with_kernels: True if they differ with native kernels only.
    """

    reason: str
    where: Callable[..., torch.Tensor]
    results: str
    dtypes: Sequence[torch.dtype] = DTYPES
    with_kernels: bool = False


def _everywhere(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def _ratio_overflows(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    return (a / b).isinf()


def _near_poles(x: torch.Tensor) -> torch.Tensor:
    return (x < -0.5) & ((x - x.round()).abs() < 0.01)


_FMOD = "PyTorch's vector kernel returns NaN where the ratio overflows, its scalar kernel and ORTModule the remainder"
_POLE = "ill-conditioned: the distance to the pole is a rounding error"
_NARROW = "PyTorch rounds intermediate results of the gradient to the dtype"
_WIDE = (FLOAT64, FLOAT32)
_IN_ONEDNN = [FLOAT32]
"""The dtypes in which PyTorch runs oneDNN's ops, which depend on the processor."""
if torch.ops.mkldnn._is_mkldnn_bf16_supported():
    _IN_ONEDNN.append(BFLOAT16)
if torch.ops.mkldnn._is_mkldnn_fp16_supported():
    _IN_ONEDNN.append(FLOAT16)


def _is_tiny(*arguments: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.abs() for x in arguments]).amin(0) <= torch.finfo(arguments[0].dtype).tiny


EXEMPT: dict[str, list[Exempt]] = {
    "digamma": [
        Exempt(_POLE, _near_poles, "g0", [FLOAT64, FLOAT32, BFLOAT16]),
        Exempt(_POLE, _near_poles, "y", [FLOAT64]),
    ],
    "lgamma": [Exempt(_POLE, _near_poles, "y g0", [FLOAT64])],
    "hardsigmoid": [Exempt("PyTorch rounds 1/6 to float32", lambda x: x.abs() < 3, "g0", [FLOAT64])],
    "celu of 0.3": [Exempt("PyTorch rounds 1 / alpha to float32", lambda x: x <= 0, "g0", [FLOAT64])],
    "gelu": [Exempt("oneDNN's is NaN at infinity", lambda x: x == math.inf, "y", _IN_ONEDNN)],
    "mish": [
        Exempt(
            "the native kernel returns the limit at infinity, PyTorch NaN",
            lambda x: x == math.inf,
            "g0",
            [FLOAT32, FLOAT16, BFLOAT16],
            with_kernels=True,
        )
    ],
    "pow -0.5": [
        Exempt("a power in PyTorch, here a product", torch.isneginf, "g0", [FLOAT64, FLOAT32, BFLOAT16])
    ],
    "1.5 % x": [Exempt(_FMOD, lambda x: _ratio_overflows(1.5, x), "y", [FLOAT64, FLOAT32, BFLOAT16])],
    "fmod of two": [Exempt(_FMOD, _ratio_overflows, "y", [FLOAT64, FLOAT32, BFLOAT16])],
    "remainder of two": [Exempt(_FMOD, _ratio_overflows, "y", [FLOAT64, FLOAT32, BFLOAT16])],
    "log_ndtr": [Exempt("PyTorch's erfcx is inexact, and overflows", lambda x: x <= -80, "g0", _WIDE)],
    "sinc": [
        Exempt("PyTorch squares in float16", lambda x: x.abs() > 200, "g0", [FLOAT16]),
        Exempt(_NARROW, lambda x: x.abs() <= 1e-3, "g0", [BFLOAT16]),
    ],
    "erf": [Exempt("PyTorch's is 0 for small x", lambda x: x.abs() <= 1e-5, "y", [BFLOAT16])],
    "hypot of two": [Exempt("subnormal lengths have few digits", _is_tiny, "g0 g1", [FLOAT16, BFLOAT16])],
    "binary_cross_entropy of two": [
        Exempt(_NARROW, lambda a, b: (a <= 1e-4) | (a >= 0.99), "g0", [FLOAT16, BFLOAT16])
    ],
    "xlogy of two": [Exempt(_NARROW, _is_tiny, "g1", [FLOAT16, BFLOAT16])],
    "addcmul of two": [
        Exempt("PyTorch does not round the product", lambda a, b: (b + 1).abs() < 1e-6, "y", _WIDE)
    ],
    "prelu of two": [
        Exempt(
            "ONNX Runtime's PRelu does not multiply 0 by infinity",
            lambda a, b: (a == 0) & ~b.isfinite(),
            "y",
            [FLOAT32, FLOAT16, BFLOAT16],
        )
    ],
    "product with rsqrt of two": [
        Exempt(
            "PyTorch's gradient is a cube, which over- or underflows",
            lambda a, b: (b <= 1e-4) | (b > 1e37),
            "g1",
        )
    ],
    "glu of two": [
        Exempt("PyTorch rounds the gate to the dtype", lambda a, b: b >= 2, "g1", [FLOAT16, BFLOAT16])
    ],
}


CANCELLING = {
    "add of 0.1 of two",
    "addcdiv of two",
    "binary_cross_entropy_with_logits of two",
    "elu of 0.3",
    "erfcx",
    "expm1",
    "gelu",
    "gelu by tanh",
    "ldexp of two",
    "lerp by a tensor of two",
    "lerp of 0.7 of two",
    "lerp of two",
    "lgamma",
    "log10",
    "logaddexp of two",
    "logaddexp2 of two",
    "mish",
    "selu",
    "silu",
    "sinc",
    "tanh",
    "tanhshrink",
    "xlog1py of two",
}
"""Operators that subtract almost equal numbers at some point, in PyTorch too, in the result or the derivative. Without
native kernels, `silu` has ONNX Runtime's Sigmoid, whose error is absolute."""


IN_PYTORCH = {("frexp", BFLOAT16)}
"""Operators and dtypes that ONNX Runtime cannot run: PyTorch runs them."""


class Together(nn.Module):
    def __init__(self, functions: Sequence[Function]) -> None:
        super().__init__()
        self.functions = list(functions)

    def forward(self, arguments: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [function(*given) for function, given in zip(self.functions, arguments, strict=True)]


def _weights(like: torch.Tensor, start: float) -> torch.Tensor:
    return torch.linspace(start, start + 1, like.numel(), dtype=like.dtype).reshape(like.shape)


def _groups(table: dict[str, Function]) -> list[list[str]]:
    names = list(table)
    return [names[first : first + SHARED] for first in range(0, len(names), SHARED)]


def _results(
    model: Any, names: Sequence[str], arguments: Sequence[torch.Tensor], grad: bool
) -> list[dict[str, torch.Tensor | None]]:
    """Returns per operator its result and first derivatives."""
    given = [[x.clone().requires_grad_(grad) for x in arguments] for _ in names]
    results = model(given)
    active = [y for y in results if y.requires_grad]
    leaves = [x for those in given for x in those]
    # Below 1, so that no product with the largest number overflows.
    cotangents = [_weights(y, 0.5) * 0.65 for y in active]
    gradients: list[torch.Tensor | None] = [None] * len(leaves)
    if active:
        gradients = list(torch.autograd.grad(active, leaves, cotangents, allow_unused=True))
    count = len(arguments)
    return [
        {"y": y.detach(), **{f"g{k}": gradients[index * count + k] for k in range(count if grad else 0)}}
        for index, y in enumerate(results)
    ]


def _differences(
    name: str, got: torch.Tensor | None, want: torch.Tensor | None, arguments: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Returns the mask of the points at which two results differ.

    Where all arguments are small, errors are relative to the largest argument. Elsewhere they are relative to the
    result, and for operators in `CANCELLING` also absolute. Numbers beyond a quarter of the largest one equal infinity,
    as products of them overflow in one order and not in another.
    """
    if got is None or want is None:
        return torch.full_like(arguments[0], got is not want, dtype=torch.bool)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if not want.is_floating_point():
        return got != want
    f, tolerance = torch.finfo(arguments[0].dtype), TOLERANCES[arguments[0].dtype]
    one, other = (torch.where(x.abs() >= f.max / 4, x.sign() * math.inf, x).double() for x in (got, want))
    largest = torch.stack([x.double().abs() for x in arguments]).amax(0)
    least = 4 * f.tiny * (f.eps if f.bits == 16 and f.eps < 1e-3 else 1)
    absolute = 16 * f.eps if name in CANCELLING else least
    near = torch.where(largest <= 1e-3, tolerance * largest + least, absolute)
    same = (one - other).abs() <= near + tolerance * other.abs()
    return ~(same | (one == other) | (one.isnan() & other.isnan()))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "results"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", [*_groups(ONE), *_groups(TWO)], ids=" ".join)
def test_results_and_gradients(names: list[str], dtype: torch.dtype, grad: bool) -> None:
    torch._dynamo.reset()
    assert _wrong(names, dtype, grad) == {}


def _wrong(names: list[str], dtype: torch.dtype, grad: bool) -> dict[str, str]:
    """Returns what differs, by the operator and the result."""
    table, arguments = (ONE, [points(dtype)]) if names[0] in ONE else (TWO, pairs(dtype))
    names = [
        name
        for name in names
        if (name, dtype) not in IN_PYTORCH and _has_kernel(table[name], dtype, len(arguments))
    ]
    plain = Together([table[name] for name in names])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ORTModule: ")
        found, expected = (_results(m, names, arguments, grad) for m in (ORTModule(plain), plain))
    wrong: dict[str, str] = {}
    for name, got, want in zip(names, found, expected, strict=True):
        for key in want:
            differs = _differences(name, got[key], want[key], arguments)
            exempt = torch.zeros_like(differs)
            for part in EXEMPT.get(name, []):
                if key in part.results.split() and dtype in part.dtypes:
                    mask = part.where(*arguments)
                    if not part.with_kernels and not (differs & mask).any():
                        wrong[f"{name} {key}"] = f"is as in PyTorch: no longer exempt ({part.reason})"
                    exempt |= mask
            if (differs & ~exempt).any():
                at = (differs & ~exempt).nonzero()[:4, 0]
                values = [
                    x[at].tolist() if x is not None else None for x in (*arguments, got[key], want[key])
                ]
                wrong[f"{name} {key}"] = f"arguments, result, expected: {values}"
    return wrong


def _has_kernel(function: Function, dtype: torch.dtype, count: int) -> bool:
    """True if PyTorch has kernels of a function and its derivative in a dtype."""
    try:
        given = [torch.full([1], 0.3, dtype=dtype, requires_grad=True) for _ in range(count)]
        result = function(*given)
        if result.requires_grad:
            torch.autograd.grad(result, given, torch.ones_like(result), allow_unused=True)
    except NotImplementedError:
        return False
    return True


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("names", _groups(INTEGERS), ids=" ".join)
def test_integers(names: list[str], dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    limits = torch.iinfo(dtype)
    numbers = [0, 1, 2, 3, 6, 7, 8, 31, 63, 64, limits.max - 1, limits.max, limits.min, limits.min + 1]
    numbers += [-n for n in (1, 2, 3, 6, 7, 8)] if limits.min else []
    kept = torch.tensor([n for n in numbers if limits.min <= n <= limits.max], dtype=dtype)
    arguments = [x.reshape(-1) for x in torch.meshgrid(kept, kept, indexing="ij")]
    names = [name for name in names if limits.min or name not in _NEGATIVE_CONSTANTS]
    plain = Together([INTEGERS[name] for name in names])
    model = ORTModule(plain)
    for name, got, want in zip(
        names, model([arguments] * len(names)), plain([arguments] * len(names)), strict=True
    ):
        # Shifts by the number of bits and more are undefined in C++.
        defined = (arguments[1] >= 0) & (arguments[1] < limits.bits) if name in _SHIFTS else _everywhere(got)
        assert got.dtype == want.dtype, name
        assert torch.equal(got[defined], want[defined]), name


_NEGATIVE_CONSTANTS = {"a % -3 of two", "div floor of two", "clamp of two"}
"""PyTorch runs them for unsigned integers."""

_SHIFTS = {"bitwise_left_shift of two", "bitwise_right_shift of two", "a << b of two", "a >> b of two"}
