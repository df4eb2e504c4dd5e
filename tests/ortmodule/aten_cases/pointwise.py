"""Elementwise functions.

Functions without a gradient of their own are multiplied by their argument, so that a gradient is compared too.
"""

from typing import Any

import torch

from ortmodule.aten_case import Case, T

NAN, INF = float("nan"), float("inf")
INTS = torch.tensor([[-7, 7, -6], [5, 0, -1]])
DIVISORS = torch.tensor([3, -3, 2])
ZERO_AND_NOT = torch.tensor([0.0, 0.0, 1.0, 1e-30], requires_grad=True)
SPECIAL = torch.tensor([NAN, -INF, INF, -1.5, 0.0, 0.5, 1.0])
POSITIVE: dict[str, Any] = {"low": 0.2, "high": 3.0}
UNIT: dict[str, Any] = {"low": -0.9, "high": 0.9}


def _unary(name: str, **domain: Any) -> Case:
    return Case(name, getattr(torch, name), (T(2, 3, **domain),))


def _step(name: str, fn: Any) -> Case:
    return Case(name, lambda x: fn(x) * x, (T(4, 5),))


SMALLEST = torch.tensor([-(2**63), -(2**63), -(2**63), 2**63 - 1, 7, -7, -7])
SMALLEST_BY = torch.tensor([-1, 1, 3, -1, -2, 2, -3])
LIMITS = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN])

CASES = [
    *(
        Case(
            f"quotients_of_smallest_{bits}",
            lambda a, b, bits=bits: (
                (a >> (64 - bits)).to(getattr(torch, f"int{bits}")) // b.to(getattr(torch, f"int{bits}")),
                (a >> (64 - bits)).to(getattr(torch, f"int{bits}")) % b.to(getattr(torch, f"int{bits}")),
                (a >> (64 - bits)).to(getattr(torch, f"int{bits}")) // -1,
                (a >> (64 - bits)).to(getattr(torch, f"int{bits}")) // 3,
            ),
            (SMALLEST, SMALLEST_BY),
        )
        for bits in (8, 16, 32, 64)
    ),
    Case(
        "lerp_far_end",
        torch.lerp,
        (
            torch.tensor([1e8, 1e8, -1e9, 2.0], requires_grad=True),
            torch.tensor([1.0, 0.5, 1.5, 3.0], requires_grad=True),
            torch.tensor([1.0, 0.5, 1.0, 0.25], requires_grad=True),
        ),
    ),
    Case(
        "lerp_number",
        lambda a, b: (
            torch.lerp(a, b, 1.0),
            torch.lerp(a, b, 0.5),
            torch.lerp(a, b, 0.1),
            torch.lerp(a, b, 2),
        ),
        (T(2, 3), T(2, 3)),
    ),
    Case("atan2_limits", lambda a: torch.atan2(a.unsqueeze(1), a), (LIMITS,)),
    Case("add", torch.add, (T(2, 3), T(3))),
    Case("add_alpha", lambda x, y: torch.add(x, y, alpha=2.5), (T(2, 3), T(2, 1))),
    Case("add_int_float", lambda i, x: i + x, (INTS, T(2, 3))),
    Case("add_int_number", lambda i: (i + 1.5, i + 2, i > 0), (INTS,)),
    Case("add_bool", lambda i: ((i > 0) + (i < 5), (i > 0) * (i < 5)), (INTS,)),
    Case("add_size", lambda x: x + x.shape[0] * 2, (T(4, 3),)),
    Case("sub_alpha", lambda x, y: torch.sub(x, y, alpha=3), (T(2, 3), T(3))),
    Case("rsub", lambda x: 1.5 - x, (T(2, 3),)),
    Case("rsub_tensor", lambda x, y: torch.rsub(x, y, alpha=2), (T(2, 3), T(3))),
    Case("mul", torch.mul, (T(2, 3), T(3))),
    Case("mul_number", lambda x: x * 3, (T(2, 3),)),
    Case("mul_int8", lambda i: i.to(torch.int8) * 100, (INTS,)),
    Case("div", torch.div, (T(2, 3), T(3, **POSITIVE))),
    Case("div_ints", lambda a, b: a / b, (INTS, DIVISORS)),
    Case(
        "div_floor",
        lambda x, y: torch.div(x, y, rounding_mode="floor") * x,
        (T(4, 5, low=-9, high=9), T(5, grad=False)),
    ),
    Case(
        "div_trunc",
        lambda x, y: torch.div(x, y, rounding_mode="trunc") * x,
        (T(4, 5, low=-9, high=9), T(5, grad=False)),
    ),
    Case("div_floor_ints", lambda a, b: torch.div(a, b, rounding_mode="floor"), (INTS, DIVISORS)),
    Case("div_trunc_ints", lambda a, b: torch.div(a, b, rounding_mode="trunc"), (INTS, DIVISORS)),
    Case("floor_divide_by_zero", lambda x: torch.floor_divide(x, torch.zeros(7)), (SPECIAL,)),
    Case("floor_divide_number", lambda x: (x // 0.5) * x, (T(4, 5, grad=False),)),
    Case("remainder", torch.remainder, (T(4, 5, low=-9, high=9), T(5, low=-3, high=-1))),
    Case("remainder_ints", lambda a, b: (a % b, torch.fmod(a, b), a % 4), (INTS, DIVISORS)),
    Case("fmod", torch.fmod, (T(4, 5, low=-9, high=9), T(5, low=-3, high=-1))),
    Case("pow_2", lambda x: x**2, (T(2, 3),)),
    Case("pow_3", lambda x: x**3, (T(2, 3),)),
    Case("pow_fraction", lambda x: (x**0.5, x**1.7, x**-1, x**-0.5), (T(2, 3, **POSITIVE),)),
    Case("pow_ints", lambda i: (i**0, i**3, i**5), (INTS,)),
    Case("pow_int_float", lambda i: (i + 9) ** 0.5, (INTS,)),
    Case("pow_tensor", torch.pow, (T(2, 3, **POSITIVE), T(3))),
    Case("pow_of_number", lambda x: 2.5**x, (T(2, 3),)),
    Case("exp2", torch.exp2, (T(2, 3, low=-9, high=9),)),
    *(
        _unary(name)
        for name in ("abs", "neg", "exp", "sin", "cos", "sinh", "cosh", "tanh", "asinh", "atan", "erf")
    ),
    *(_unary(name) for name in ("sigmoid", "expm1", "square", "positive")),
    *(_unary(name, **POSITIVE) for name in ("sqrt", "rsqrt", "reciprocal", "log", "log2", "log10", "log1p")),
    *(_unary(name, **UNIT) for name in ("asin", "acos", "atanh", "tan")),
    _unary("acosh", low=1.2, high=3.0),
    Case("log1p_of_tiny", torch.log1p, (T(9, low=-1e-7, high=1e-7),)),
    Case("log1p_limits", torch.log1p, (torch.tensor([-1.0, 0.0, 1e-30, 3e38, INF]),)),
    Case("expm1_of_tiny", torch.expm1, (T(9, low=-1e-7, high=1e-7),)),
    Case("expm1_limits", torch.expm1, (torch.tensor([-200.0, -20.0, 0.0, 1e-30, 80.0]),)),
    Case("sqrt_of_ints", lambda i: torch.sqrt(i + 8), (INTS,)),
    Case("abs_kink", torch.abs, (torch.tensor([-1.0, 0.0, 2.0], requires_grad=True),)),
    Case("ints", lambda i: (i.abs(), -i, i.sign(), i.floor(), i.round(), torch.relu(i)), (INTS,)),
    Case("neg_uint8", lambda i: -i.to(torch.uint8), (INTS,)),
    _step("sign", torch.sign),
    _step("floor", torch.floor),
    _step("ceil", torch.ceil),
    _step("round", torch.round),
    _step("trunc", torch.trunc),
    Case("round_half", torch.round, (torch.tensor([0.5, 1.5, 2.5, -0.5]),)),
    Case("round_decimals", lambda x: torch.round(x, decimals=2) * x, (T(4, 5),)),
    Case("round_tens", lambda x: torch.round(x, decimals=-1), (T(4, low=-99, high=99, grad=False),)),
    Case("atan2", torch.atan2, (T(4, 5), T(4, 5))),
    Case(
        "atan2_axes",
        torch.atan2,
        (torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0]), torch.tensor([1.0, 0.0, -1.0, 0.0, 0.0])),
    ),
    Case("logaddexp", torch.logaddexp, (T(4, 5), T(5, low=-50, high=50))),
    Case("logaddexp_inf", torch.logaddexp, (torch.tensor([-INF, INF, 0.0]), torch.tensor([-INF, 1.0, 0.0]))),
    Case("clamp", lambda x: x.clamp(-0.5, 1), (T(4, 5),)),
    Case("clamp_min", lambda x: (x.clamp(min=0.1), torch.clamp_min(x, 0.2)), (T(4, 5),)),
    Case("clamp_max", lambda x: (x.clamp(max=0.1), torch.clamp_max(x, 0.2)), (T(4, 5),)),
    Case("clamp_nan", lambda x: x.clamp(-1, 1), (SPECIAL,)),
    Case("clamp_nan_numbers", lambda x: (x.clamp(min=NAN), x.clamp(-1, NAN)), (T(4, 5),)),
    Case("clamp_infinite", lambda x: (x.clamp(min=0.1), x.clamp(max=0.1)), (SPECIAL,)),
    Case("clamp_ints", lambda i: (i.clamp(-2, 3), i.to(torch.int16).clamp(min=0), i.clamp(min=0.5)), (INTS,)),
    Case("clamp_bound", lambda x: x.clamp(0, 1), (torch.tensor([0.0, 1.0, 2.0, 0.5], requires_grad=True),)),
    Case(
        "clamp_tensors",
        lambda x, a, b: torch.clamp(x, a, b),
        (T(4, 5), T(5, low=-1, high=0), T(5, low=0.1, high=1)),
    ),
    Case(
        "clamp_nan_bounds",
        lambda x, a: (torch.clamp(x, a, a + 1), torch.clamp_max(x, a)),
        (T(7), torch.tensor([NAN, 0.0, 0.1, NAN, -1.0, -INF, INF])),
    ),
    Case("clamp_tensor_min", lambda x, a: torch.clamp(x, min=a), (T(4, 5), T(5))),
    Case("clamp_tensor_max", lambda x, a: torch.clamp_max(x, a), (T(4, 5), T(5))),
    Case("maximum", torch.maximum, (T(4, 5), T(5))),
    Case("minimum", torch.minimum, (T(4, 5), T(5))),
    Case(
        "maximum_tie", torch.maximum, (torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True))
    ),
    Case("maximum_nan", lambda x: (torch.maximum(x, x.flip(0)), torch.minimum(x, x.flip(0))), (SPECIAL,)),
    Case("maximum_bool", lambda i: (torch.maximum(i > 0, i < 6), torch.minimum(i > 0, i < 6)), (INTS,)),
    Case("maximum_int16", lambda i: torch.maximum(i.to(torch.int16), -i.to(torch.int16)), (INTS,)),
    Case("where", lambda x, y: torch.where(x > 0, x, y), (T(4, 5), T(5))),
    Case("where_number", lambda x: (torch.where(x > 0, x, 1.5), torch.where(x > 0, -1, x)), (T(4, 5),)),
    Case("where_bool", lambda i: torch.where(i > 0, i > 5, i < -6), (INTS,)),
    Case("where_promoted", lambda i, x: torch.where(i > 0, i, x), (INTS, T(2, 3))),
    Case("masked_fill", lambda x: x.masked_fill(x > 0.5, -1e9), (T(4, 5),)),
    Case("masked_fill_inf", lambda x: x.masked_fill(x > 0.5, -INF).exp(), (T(4, 5),)),
    Case("masked_fill_tensor", lambda x, v: x.masked_fill(x > 0.5, v), (T(4, 5), T())),
    Case("lerp", lambda x, y: torch.lerp(x, y, 0.3), (T(4, 5), T(4, 5))),
    Case("lerp_tensor", torch.lerp, (T(4, 5), T(4, 5), T(5))),
    Case("addcmul", lambda x, a, b: torch.addcmul(x, a, b, value=0.5), (T(4, 5), T(4, 5), T(5))),
    Case("addcdiv", lambda x, a, b: torch.addcdiv(x, a, b, value=2), (T(4, 5), T(4, 5), T(5, **POSITIVE))),
    Case("to_int", lambda x: (x.to(torch.int64), x.bool(), x.to(torch.int32)), (T(4, 5, grad=False),)),
    Case("to_float", lambda i, x: i.float() * x + i.to(torch.uint8).float(), (INTS, T(2, 3))),
    Case("clone", lambda x: (x.clone(), x.contiguous() + 1, x.t().contiguous()), (T(4, 5),)),
    Case("detach", lambda x: x * x.detach() + torch.tensor(2.0), (T(4, 5),)),
    Case(
        "nan_to_num",
        lambda x: (torch.nan_to_num(x, 0.5, 3.0, -3.0), torch.nan_to_num(x, posinf=1.0)),
        (SPECIAL,),
    ),
    Case("nan_to_num_gradient", lambda x: torch.nan_to_num(x * x), (T(4, 5),)),
    Case("xlogy", torch.xlogy, (T(4, 5, **POSITIVE), T(4, 5, **POSITIVE))),
    Case("logit", torch.logit, (T(4, 5, low=0.1, high=0.9),)),
    Case("sinc", torch.sinc, (T(4, 5, low=0.2),)),
    Case("hypot", torch.hypot, (T(4, 5), T(5))),
    Case("hypot_inf", lambda x: torch.hypot(x, x.flip(0)), (SPECIAL,)),
    Case(
        "hypot_gradient_at_zero",
        torch.hypot,
        (ZERO_AND_NOT, torch.tensor([0.0, 2.0, 0.0, 1e-30], requires_grad=True)),
    ),
    Case("sign_nan", torch.sign, (SPECIAL,)),
    Case("fmax", lambda x, y: (torch.fmax(x, y), torch.fmin(x, y)), (T(4, 5), T(5))),
    Case("fmax_nan", lambda x: (torch.fmax(x, x.flip(0)), torch.fmin(x, x.flip(0))), (SPECIAL,)),
    Case(
        "fmax_of_equal_numbers",
        lambda x, y: (torch.fmax(x, y), torch.fmin(x, y)),
        (ZERO_AND_NOT, torch.tensor([0.0, 1.0, 1.0, NAN], requires_grad=True)),
    ),
    Case(
        "copysign", lambda x, y: (torch.copysign(x, y), torch.copysign(x, -1.5)), (T(4, 5), T(5, grad=False))
    ),
    Case("signbit", torch.signbit, (torch.tensor([-1.0, -0.0, 0.0, 2.0, -INF]),)),
    Case("signbit_ints", torch.signbit, (INTS,)),
    Case("ldexp", torch.ldexp, (T(4, 5), T(5, low=-9, high=9))),
    Case("frac", torch.frac, (T(4, 5),)),
    Case("deg2rad", torch.deg2rad, (T(4, 5),)),
    Case("heaviside", lambda x: torch.heaviside(x, x.new_full((), 0.5)), (torch.tensor([-1.0, 0.0, 2.0]),)),
    Case("in_place", lambda x: (x.exp() * 2).add_(1).clamp_(max=3).neg_(), (T(4, 5),)),
]
