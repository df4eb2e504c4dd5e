"""Elementwise functions of one and of two tensors, and of integers: every lowering that works element by element.

The names are those of the tests. The functions of two tensors compute with tensors of equal shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import special
from torch.nn import functional as F

Function = Callable[..., torch.Tensor]

_OF_TORCH = """abs acos acosh angle asin asinh atan atanh ceil clone conj_physical cos cosh deg2rad digamma erf erfc
erfinv exp exp2 expm1 floor frac isfinite isinf isnan lgamma log log10 log1p log2 logical_not logit nan_to_num neg
positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc"""
_OF_FUNCTIONAL = """celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu
softplus softshrink softsign tanhshrink"""
_EXPONENTS = (-3, -2, -1.5, -1, -0.5, 0, 0.1, 0.5, 1, 1.5, 2, 2.5, 3, 4, 7)

ONE: dict[str, Function] = {
    **{name: getattr(torch, name) for name in _OF_TORCH.split()},
    **{name: getattr(F, name) for name in _OF_FUNCTIONAL.split()},
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu of 0.3": lambda x: F.elu(x, 0.3),
    "celu of 0.3": lambda x: F.celu(x, 0.3),
    "celu of 2": lambda x: F.celu(x, 2.0),
    "celu of -1": lambda x: F.celu(x, -1.0),
    "softplus of 2": lambda x: F.softplus(x, 2.0),
    "softplus up to 3": lambda x: F.softplus(x, 1.0, 3.0),
    "leaky_relu of -2": lambda x: F.leaky_relu(x, -2.0),
    "leaky_relu of 0": lambda x: F.leaky_relu(x, 0.0),
    "rrelu": F.rrelu,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "hardtanh of 0.1": lambda x: F.hardtanh(x, -0.1, 0.3),
    "hardshrink of 0.1": lambda x: F.hardshrink(x, 0.1),
    "hardshrink of 0": lambda x: F.hardshrink(x, 0.0),
    "softshrink of 0.1": lambda x: F.softshrink(x, 0.1),
    "softshrink of 0": lambda x: F.softshrink(x, 0.0),
    **{f"pow {e}": lambda x, e=e: x**e for e in _EXPONENTS},
    "power of 2": lambda x: 2.0**x,
    "power of 0": lambda x: 0.0**x,
    "power of -1.5": lambda x: (-1.5) ** x,
    "power of infinity": lambda x: torch.pow(math.inf, x),
    "x / 3": lambda x: x / 3,
    "2 / x": lambda x: 2 / x,
    "x / x": lambda x: x / x,
    "x * 0.1": lambda x: x * 0.1,
    "x + 0.1": lambda x: x + 0.1,
    "0.1 - x": lambda x: 0.1 - x,
    "0.1 - 3 x": lambda x: torch.rsub(x, 0.1, alpha=3),
    "x - 0.3": lambda x: torch.sub(x, 0.1, alpha=3),
    "fmod 1.5": lambda x: torch.fmod(x, 1.5),
    "x % 1.5": lambda x: x % 1.5,
    "x % -1.5": lambda x: x % -1.5,
    "x % infinity": lambda x: x % math.inf,
    "1.5 % x": lambda x: torch.remainder(1.5, x.detach()),
    "x // 0.3": lambda x: x.detach() // 0.3,
    "div floor": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    "div trunc": lambda x: torch.div(x, 0.5, rounding_mode="trunc"),
    "round to 2": lambda x: torch.round(x, decimals=2),
    "round to -2": lambda x: torch.round(x, decimals=-2),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp of 0.1": lambda x: x.clamp(-0.1, 0.1),
    "clamp from above": lambda x: x.clamp(1, -1),
    "clamp to NaN": lambda x: x.clamp(min=math.nan),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_max": lambda x: x.clamp_max(0.1),
    "clamped reciprocal": lambda x: x.reciprocal().clamp(-1, 1),
    "entr": special.entr,
    "erfcx": special.erfcx,
    "ndtr": special.ndtr,
    "log_ndtr": special.log_ndtr,
    "ndtri": special.ndtri,
    "logit within 0.001": lambda x: torch.logit(x, 1e-3),
    "xlog1py(x, 0.3)": lambda x: special.xlog1py(x, 0.3),
    "xlog1py(0.3, x)": lambda x: special.xlog1py(0.3, x),
    "xlogy(x, 0.3)": lambda x: torch.xlogy(x, 0.3),
    "xlogy(0.3, x)": lambda x: torch.xlogy(0.3, x),
    "xlogy(0, x)": lambda x: torch.xlogy(0.0, x),
    "copysign of -1": lambda x: torch.copysign(x, -1.0),
    "frexp": lambda x: torch.frexp(x.detach())[0],
    "masked_fill": lambda x: x.masked_fill(x > 0, 3.0),
    "masked_fill by a tensor": lambda x: x.masked_fill(x > 0, torch.tensor(0.1, dtype=x.dtype)),
    "where of numbers": lambda x: torch.where(x > 0, 0.1, x),
    "lerp to the half": lambda x: torch.lerp(x, x * 0.5, 0.3),
    "mvlgamma": lambda x: torch.mvlgamma(x.clamp(min=3), 2),
    **{
        f"{name} 0.1": lambda x, name=name: getattr(torch, name)(x, 0.1)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
}

_OF_TWO = """add atan2 copysign div eq fmax fmin fmod ge gt hypot le ldexp logaddexp logaddexp2 logical_and logical_or
logical_xor lt maximum minimum mul ne pow remainder sub xlogy"""
_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


def _loss(name: str, **options: Any) -> Function:
    return lambda a, b: getattr(F, name)(a, b, reduction="none", **options)


TWO: dict[str, Function] = {
    **{f"{name} of two": getattr(torch, name) for name in _OF_TWO.split()},
    **{f"{name} of two": _loss(name) for name in _LOSSES},
    "floor_divide of two": lambda a, b: torch.floor_divide(a.detach(), b.detach()),
    "smooth_l1_loss below 0.1 of two": _loss("smooth_l1_loss", beta=0.1),
    "smooth_l1_loss below 0 of two": _loss("smooth_l1_loss", beta=0.0),
    "huber_loss below 0.3 of two": _loss("huber_loss", delta=0.3),
    "binary_cross_entropy_with_logits of two": _loss("binary_cross_entropy_with_logits"),
    "binary_cross_entropy of two": lambda a, b: F.binary_cross_entropy(
        a.clamp(0, 1).nan_to_num(0.5), b.detach().clamp(0, 1).nan_to_num(0.5), reduction="none"
    ),
    "xlog1py of two": special.xlog1py,
    "where of two": lambda a, b: torch.where(a > b, a, b),
    "lerp of two": lambda a, b: torch.lerp(a, b, 0.3),
    "lerp of 0.7 of two": lambda a, b: torch.lerp(a, b, 0.7),
    "lerp by a tensor of two": lambda a, b: torch.lerp(a, b, b),
    "addcmul of two": lambda a, b: torch.addcmul(a, a, b),
    "addcmul of 0.1 of two": lambda a, b: torch.addcmul(a, a, b, value=0.1),
    "addcdiv of two": lambda a, b: torch.addcdiv(a, a, b),
    "div floor of two": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div trunc of two": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "prelu of two": torch.ops.aten._prelu_kernel,
    "clamp of two": lambda a, b: torch.clamp(a, b, b + 1),
    "clamp_min of two": torch.clamp_min,
    "clamp_max of two": torch.clamp_max,
    "product with rsqrt of two": lambda a, b: a * b.rsqrt(),
    "add of 0.1 of two": lambda a, b: torch.add(a, b, alpha=0.1),
    "rsub of two": lambda a, b: torch.rsub(a, b),
    "max of two rows of two": lambda a, b: torch.stack([a, b]).max(0).values,
    "amax of two": lambda a, b: torch.stack([a, b]).amax(0),
    "amin of two": lambda a, b: torch.stack([a, b]).amin(0),
    "median of two": lambda a, b: torch.stack([a, b, b]).median(0).values,
    "glu of two": lambda a, b: F.glu(torch.stack([a, b], -1)).squeeze(-1),
}

INTEGERS: dict[str, Function] = {
    **{
        f"{name} of two": getattr(torch, name)
        for name in [
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
            "bitwise_left_shift",
            "bitwise_right_shift",
            "add",
            "sub",
            "mul",
            "eq",
            "lt",
            "maximum",
            "minimum",
            "logical_and",
        ]
    },
    "bitwise_not of two": lambda a, b: torch.bitwise_not(a),
    "neg of two": lambda a, b: torch.neg(a),
    "abs of two": lambda a, b: torch.abs(a),
    "sign of two": lambda a, b: torch.sign(a),
    "a & 6 of two": lambda a, b: a & 6,
    "a | 6 of two": lambda a, b: a | 6,
    "a ^ 6 of two": lambda a, b: a ^ 6,
    "6 & a of two": lambda a, b: torch.bitwise_and(6, a),
    "6 | a of two": lambda a, b: torch.bitwise_or(6, a),
    "6 ^ a of two": lambda a, b: torch.bitwise_xor(6, a),
    "a << 3 of two": lambda a, b: a << 3,
    "a >> 3 of two": lambda a, b: a >> 3,
    "a << b of two": lambda a, b: a << b,
    "a >> b of two": lambda a, b: a >> b,
    "shift by 3 of two": lambda a, b: torch.bitwise_left_shift(a, 3),
    "shift back by 3 of two": lambda a, b: torch.bitwise_right_shift(a, 3),
    "3 shifted of two": lambda a, b: torch.bitwise_left_shift(3, a),
    "3 shifted back of two": lambda a, b: torch.bitwise_right_shift(3, a),
    "a // 3 of two": lambda a, b: a // 3,
    "a % 3 of two": lambda a, b: a % 3,
    "a % -3 of two": lambda a, b: a % -3,
    "fmod 3 of two": lambda a, b: torch.fmod(a, 3),
    "div trunc of two": lambda a, b: torch.div(a, 3, rounding_mode="trunc"),
    "div floor of two": lambda a, b: torch.div(a, -3, rounding_mode="floor"),
    "a ** 3 of two": lambda a, b: a**3,
    "clamp of two": lambda a, b: a.clamp(-2, 5),
    "where of two": lambda a, b: torch.where(a > b, a, b),
    "add of 3 of two": lambda a, b: torch.add(a, b, alpha=3),
}
