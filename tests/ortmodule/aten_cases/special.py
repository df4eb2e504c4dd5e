"""torch.special. Tails have cases of their own: in a norm they would vanish beside larger values."""

import math
from typing import Any

import torch

from ortmodule.aten_case import Case, T

NAN, INF = float("nan"), float("inf")
POSITIVE: dict[str, Any] = {"low": 0.05, "high": 9.0}
PROBABILITY: dict[str, Any] = {"low": 0.01, "high": 0.99}
NAMES: dict[str, tuple[tuple[float, float], ...]] = {
    # name: intervals to sample from
    "digamma": ((0.05, 9.0), (-2.9, -2.1), (50.0, 1e4)),
    "entr": ((0.05, 9.0),),
    "erf": ((-2.0, 2.0),),
    "erfc": ((-2.0, 2.0), (4.0, 5.0)),
    "erfcx": ((-2.0, 2.0), (30.0, 50.0)),
    "erfinv": ((-0.95, 0.95), (-1e-3, 1e-3), (0.99, 0.9999)),
    "exp2": ((-9.0, 9.0),),
    "expit": ((-9.0, 9.0),),
    "expm1": ((-1e-7, 1e-7),),
    "gammaln": ((0.05, 9.0), (-2.9, -2.1), (50.0, 1e4)),
    "log1p": ((-1e-7, 1e-7),),
    "log_ndtr": ((-3.0, 3.0), (-30.0, -20.0), (3.0, 5.0)),
    "logit": ((0.01, 0.99),),
    "ndtr": ((-3.0, 3.0),),
    "ndtri": ((0.01, 0.99), (1e-9, 1e-8)),
    "sinc": ((0.1, 2.9),),
}
LIMITS = torch.tensor([0.0, 1.0, -1.0, INF, -INF, NAN])

CASES = [
    *(
        Case(f"{name}_{low:g}_to_{high:g}", getattr(torch.special, name), (T(3, 4, low=low, high=high),))
        for name, intervals in NAMES.items()
        for low, high in intervals
    ),
    *(
        Case(f"{name}_limits", getattr(torch.special, name), (LIMITS,))
        for name in ("erfc", "erfcx", "erfinv")
    ),
    Case("ndtri_limits", torch.special.ndtri, (torch.tensor([0.0, 0.5, 1.0, 1.5, NAN]),)),
    Case("log_ndtr_limits", torch.special.log_ndtr, (torch.tensor([0.0, INF, NAN]),)),
    Case("xlogy_zero", torch.special.xlogy, (torch.tensor([0.0, 0.0, 2.0]), torch.tensor([0.0, NAN, 0.0]))),
    *(
        Case(f"{fn.__name__}_gradient_at_zero", fn, (torch.zeros(4, requires_grad=True), y))
        for fn, y in (
            (torch.special.xlogy, torch.tensor([0.0, -1.0, 2.0, 1.0])),
            (torch.special.xlog1py, torch.tensor([-1.0, -2.0, 2.0, 0.0])),
        )
    ),
    *(
        Case(f"{fn.__name__}_gradient_of_logarithm", fn, (torch.zeros(4), y))
        for fn, y in (
            (torch.special.xlogy, torch.tensor([0.0, -1.0, 2.0, INF], requires_grad=True)),
            (torch.special.xlog1py, torch.tensor([-1.0, -2.0, 2.0, INF], requires_grad=True)),
        )
    ),
    Case(
        "xlog1py_gradient_at_infinity",
        torch.special.xlog1py,
        (torch.tensor([1.0, -2.0, 1.0]), torch.tensor([-1.0, -1.0, INF], requires_grad=True)),
    ),
    Case("erfinv_gradient_at_zero", torch.erfinv, (torch.tensor([0.0, -0.0, 0.5], requires_grad=True),)),
    Case("sinc_gradient_at_zero", torch.sinc, (torch.tensor([0.0, 1.0, 0.5], requires_grad=True),)),
    Case("frexp", torch.frexp, (T(4, 5),)),
    Case(
        "frexp_of_powers",
        torch.frexp,
        (torch.tensor([0.0, 1, -1, 0.5, 0.25, 8, 2.0**-126, 1e-42, 2.0**127]),),
    ),
    Case(
        "frexp_beside_powers",
        torch.frexp,
        (torch.tensor([1 - 2.0**-24, 1 + 2.0**-23, 2**20 - 0.0625, math.inf, -math.inf, math.nan]),),
    ),
    Case("xlog1py", torch.special.xlog1py, (T(4, 5, **POSITIVE), T(4, 5, **POSITIVE))),
    Case("logit_eps", lambda x: torch.special.logit(x, 0.1), (T(4, 5, **PROBABILITY),)),
    Case("multigammaln", lambda x: torch.special.multigammaln(x, 2), (T(4, 5, low=2.0, high=9.0),)),
    Case("beta_log_density", lambda x, a: _log_density(x, a), (T(4, 5, **PROBABILITY), T(5, **POSITIVE))),
]


def _log_density(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Beta(a, 2.0, validate_args=False).log_prob(x)
