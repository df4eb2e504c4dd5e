"""Ties, NaN, constants that a narrow dtype rounds, probabilities of 0 and 1, and long reductions, beside eager."""

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
from onnxtrain.runtime import kernels

pytestmark = pytest.mark.torch

NAN, INF = math.nan, math.inf
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

Function = Callable[..., Any]


class Together(nn.Module):
    def __init__(self, functions: Sequence[Function]) -> None:
        super().__init__()
        self.functions = list(functions)

    def forward(self, arguments: list[list[torch.Tensor]]) -> list[Any]:
        return [function(*given) for function, given in zip(self.functions, arguments, strict=True)]


def _all(model: Any, arguments: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor | None]]:
    """Returns per function its results, then the gradients of their sum."""
    given = [[x.clone().requires_grad_() for x in those] for those in arguments]
    found: list[list[torch.Tensor | None]] = []
    for those, result in zip(given, model(given), strict=True):
        results = list(result) if isinstance(result, tuple) else [result]
        active = [y for y in results if y.requires_grad]
        cotangents = [
            torch.linspace(0.5, 1, y.numel(), dtype=torch.float64).to(y.dtype).reshape(y.shape)
            for y in active
        ]
        gradients = torch.autograd.grad(active, those, cotangents, allow_unused=True, retain_graph=True)
        found.append([*(y.detach() for y in results), *gradients])
    return found


def _compare(functions: dict[str, Function], arguments: Sequence[Sequence[torch.Tensor]]) -> None:
    torch._dynamo.reset()
    plain = Together(list(functions.values()))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ORTModule: ")
        got = _all(ORTModule(plain), arguments)
    for name, ours, theirs in zip(functions, got, _all(plain, arguments), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None), name
            if one is not None and other is not None:
                tolerance = TOLERANCES.get(one.dtype, 0)
                torch.testing.assert_close(
                    one,
                    other,
                    rtol=tolerance,
                    atol=tolerance,
                    equal_nan=True,
                    msg=lambda m, name=name: f"{name}: {m}",
                )


ROWS = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1],
        [0, 0, 0, 3, 3, 3],
        [2, 1, 2, 1, 2, 1],
        [NAN, 1, 1, NAN, 2, 2],
        [INF, INF, -INF, -INF, 0, 0],
        [NAN] * 6,
        [-0.0, 0.0, -0.0, 0.0, 0.0, -0.0],
        [5, 5, NAN, INF, INF, -1],
        [3, 2, 1, 0, -1, -2],
    ]
)
"""Ties and NaN. The index of a tie is PyTorch's own choice in `topk`, `kthvalue` and an unstable `sort` of long rows,
which its documentation leaves open."""

PICKED: dict[str, Function] = {
    **{
        f"{name} over {dim}": lambda x, name=name, dim=dim: getattr(torch, name)(x, dim)
        for name in ("max", "min", "median", "mode", "cummax", "cummin", "amax", "amin")
        for dim in (0, -1)
    },
    **{name: getattr(torch, name) for name in ("max", "min", "median", "nanmedian", "aminmax")},
    "amax over all": lambda x: torch.amax(x, (0, 1)),
    "keepdim": lambda x: torch.max(x, -1, keepdim=True),
    "stable sort": lambda x: torch.sort(x, dim=-1, stable=True),
    "stable descending sort": lambda x: torch.sort(x, dim=-1, stable=True, descending=True),
    "norm of infinity": lambda x: torch.linalg.vector_norm(x, INF, -1),
    "norm of minus infinity": lambda x: torch.linalg.vector_norm(x, -INF, -1),
}


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_of_the_chosen_element(dtype: torch.dtype) -> None:
    functions = {name: f for name, f in PICKED.items() if not name.startswith("mode")}
    _compare(functions, [[ROWS.to(dtype)]] * len(functions))


def test_scattered_extrema_keep_nan() -> None:
    index = (torch.arange(6) % 2).expand(9, 6)
    for reduce in ("amax", "amin"):
        torch._dynamo.reset()
        f = lambda x, reduce=reduce: torch.zeros(9, 2).scatter_reduce(1, index, x, reduce)
        torch.testing.assert_close(ORTModule(Together([f]))([[ROWS]])[0], f(ROWS), equal_nan=True)


SCALARS = [(1, 1), (0, 1), (0, 0), (0.1, 0.3), (2, 3), (1e-46, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scaled_products(dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(0)
    functions: dict[str, Function] = {}
    arguments = []
    shapes = {
        "addmm": ((2, 4), (2, 3), (3, 4)),
        "addmv": ((2,), (2, 3), (3,)),
        "baddbmm": ((2, 2, 4), (2, 2, 3), (2, 3, 4)),
        "addbmm": ((2, 4), (2, 2, 3), (2, 3, 4)),
    }
    for name, sizes in shapes.items():
        for beta, alpha in SCALARS:
            functions[f"{name} {beta} {alpha}"] = lambda c, a, b, name=name, beta=beta, alpha=alpha: getattr(
                torch, name
            )(c, a, b, beta=beta, alpha=alpha)
            arguments.append([torch.randn(size, generator=made).to(dtype) for size in sizes])
    _compare(functions, arguments)


@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize("scalars", [{"alpha": 1e39}, {"beta": 1e39}], ids=str)
@pytest.mark.parametrize("name", ["addmm", "addmv"])
def test_scalars_beyond_float32_are_refused(name: str, scalars: dict[str, float]) -> None:
    torch._dynamo.reset()
    sizes = {"addmm": ((2, 4), (2, 3), (3, 4)), "addmv": ((2,), (2, 3), (3,))}[name]
    given = [torch.ones(size) for size in sizes]
    f = lambda c, a, b: getattr(torch, name)(c, a, b, **scalars)
    for run in (lambda: f(*given), lambda: ORTModule(Together([f]))([given])):
        with pytest.raises(RuntimeError, match="overflow"):
            run()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_constants_that_a_dtype_rounds(dtype: torch.dtype) -> None:
    """At the rounded and the exact constant, and beside it."""
    functions: dict[str, Function] = {}
    for k in (0.1, 0.3, 1 / 3, math.pi):
        functions |= {
            f"clamp {k}": lambda x, k=k: x.clamp(-k, k),
            f"threshold {k}": lambda x, k=k: F.threshold(x, k, 7.0),
            f"hardshrink {k}": lambda x, k=k: F.hardshrink(x, k),
            f"softshrink {k}": lambda x, k=k: F.softshrink(x, k),
            f"hardtanh {k}": lambda x, k=k: F.hardtanh(x, -k, k),
            f"softplus {k}": lambda x, k=k: F.softplus(x, 1.0, k),
            f"greater {k}": lambda x, k=k: x * (x > k),
            f"product {k}": lambda x, k=k: x * k,
            f"sum {k}": lambda x, k=k: torch.add(x, x, alpha=k),
        }
    rounded = torch.tensor([0.1, 0.3, 1 / 3, math.pi]).to(dtype)
    beside = [torch.nextafter(rounded, torch.full_like(rounded, end)) for end in (0.0, 9.0)]
    points = torch.cat([rounded, *beside])
    _compare(functions, [[torch.cat([points, -points])]] * len(functions))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", ["native_dropout", "dropout", "alpha_dropout", "feature_dropout"])
def test_generator_after_dropout(name: str, p: float) -> None:
    torch._dynamo.reset()
    x = torch.tensor([[[INF, NAN, 1.0, -2.0]], [[3.0, 4.0, 0.0, 5.0]]])

    def f(x: torch.Tensor) -> Any:
        return getattr(torch, name)(x * 1.5, p, True)

    found = []
    for run in (f, lambda x: ORTModule(Together([f]))([[x]])[0]):
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        result = run(leaf)
        y, *mask = result if isinstance(result, tuple) else (result,)
        (first,) = torch.autograd.grad(y.square()[1].sum(), leaf, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), leaf, allow_unused=True)[0]
        found.append([y.detach(), *mask, first.detach(), second, torch.get_rng_state()])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


UNIT = 2.0**-23

LONG: dict[str, Function] = {
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum of columns": lambda x: x.reshape(-1, 2).cumsum(0),
    "cumprod": lambda x: (x * 0.001 + 1).cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "prod": lambda x: (1 + x * 2**-20).prod(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "batch_norm": lambda x: F.batch_norm(x.reshape(-1, 2), None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(x.reshape(1, 2, -1)),
    "group_norm": lambda x: F.group_norm(x.reshape(1, 4, -1), 2),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "norm": lambda x: x.norm(dim=-1),
    "norm of 3": lambda x: x.norm(3, -1),
    "normalize": lambda x: F.normalize(x, dim=-1),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("size", [1000, 100_000, 1_000_000])
@pytest.mark.parametrize("name", LONG)
def test_long_reductions_are_as_exact_as_eager(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # With native kernels, whatever earlier tests have found: ONNX Runtime's own normalizations add up in float32.
    monkeypatch.setenv(kernels.VARIABLE, "on")
    kernels._installed.cache_clear()
    torch._dynamo.reset()
    x = torch.rand(2, size, generator=torch.Generator().manual_seed(0))
    f = LONG[name]

    def results(run: Function, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = run(x)
        weights = torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) + 0.5
        return [y.detach().double(), torch.autograd.grad(y, x, weights.to(y.dtype))[0].double()]

    exact, eager = results(f, x.double()), results(f, x)
    ours = results(lambda x: ORTModule(Together([f]))([[x]])[0], x)
    for want, one, other in zip(exact, ours, eager, strict=True):
        error, allowed = (float((value - want).abs().max() / want.abs().max()) for value in (one, other))
        assert error <= 2 * max(allowed, UNIT)
