"""Python numbers that change between calls: symbolic in the graph, or another graph for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onnxtrain.ortmodule import ORTModule, ORTModuleONNXModelException
from onnxtrain.ortmodule.lowering._table import LOWERINGS
from ortmodule.eager import Of, compare, strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

LABELS = torch.tensor([0, 1, 2])


def assert_same(function: Callable[..., Any], numbers: tuple[int, ...], *more: torch.Tensor) -> ORTModule:
    """Compare results and gradients with eager PyTorch in float64, for every number."""
    batches = [(number, [torch.randn(3, 4), *more]) for number in numbers]

    def program(module: Of) -> list[Any]:
        seen = []
        for number, inputs in batches:
            leaves = [tensor.to(module.dtype.dtype).clone().requires_grad_() for tensor in inputs]
            out = module(*leaves, number)
            out.square().sum().backward()
            seen.append((out.detach(), [leaf.grad for leaf in leaves]))
        return seen

    return compare(of(function), program, wrap=strict, exact=True)


def of(function: Callable[..., Any]) -> Of:
    return Of(lambda _, *inputs: function(*inputs), dtype=torch.zeros(()))


@pytest.mark.parametrize(
    ("function", "numbers"),
    [
        (lambda x, p: x.norm(p), (2, 3, 1, 4)),
        (lambda x, p: F.normalize(x, p=p), (2, 3, 1)),
        (lambda x, p: torch.renorm(x, p, 0, 0.5), (2, 3, 1)),
        (lambda x, n: x.var(1, correction=n), (1, 0, 2)),
        (lambda x, n: x.std(correction=n), (1, 0, 2)),
        (lambda x, n: F.cross_entropy(x, LABELS, ignore_index=n), (1, 2, 0)),
        (lambda x, n: F.leaky_relu(x, n), (0, 2, 3)),
        (lambda x, n: F.softplus(x, n), (4, 1, 2)),
        (lambda x, n: F.hardshrink(x, n), (0, 1, 2)),
    ],
    ids=[
        "norm",
        "normalize",
        "renorm",
        "var",
        "std",
        "cross_entropy",
        "leaky_relu",
        "softplus",
        "hardshrink",
    ],
)
def test_number_that_onnx_keeps_in_an_attribute_may_change(
    function: Callable[..., Any], numbers: tuple[int, ...]
) -> None:
    assert_same(function, numbers)


@pytest.mark.parametrize(
    "number",
    [lambda n: torch.sym_ite(n > 4, n, n + 2), lambda n: torch.sym_sum([n, 2, n])],
    ids=["sym_ite", "sym_sum"],
)
def test_a_number_is_made_of_a_size(number: Callable[..., Any]) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * number(x.shape[0])

    model = strict(of(scaled))
    for rows in (3, 4, 5, 7):
        x = torch.randn(rows, 4, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        y = model(x)
        y.sum().backward()
        factor = number(rows)
        torch.testing.assert_close(y, x * factor)
        torch.testing.assert_close(x.grad, torch.full_like(x, factor))
    assert model.report().runs_in_onnxruntime
    assert len(model.report().graphs) == 1


@pytest.mark.parametrize("mode", ["constant", "replicate", "reflect"])
def test_padding_may_change_its_sign(mode: str) -> None:
    assert_same(lambda x, n: F.pad(x, (n, 1), mode=mode), (1, 2, -1, 0, -2))


def _write(place: Callable[[int], Any]) -> Callable[..., torch.Tensor]:
    def write(x: torch.Tensor, y: torch.Tensor, number: int) -> torch.Tensor:
        z = x * 2
        z[place(number)] = y
        return z

    return write


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "function",
    [
        _write(lambda i: i),
        _write(lambda i: slice(i, None)),
        _write(lambda i: slice(None, i)),
        _write(lambda i: slice(1, i)),  # empty at times
        _write(lambda i: slice(i, i + 1)),
        _write(lambda i: slice(i, None, 2)),
        lambda x, y, i: x.select_scatter(y, 0, i),
        lambda x, y, i: (x * 2)[i].add_(y),
        lambda x, y, i: x[i:] * y,
        lambda x, y, i: x.narrow(0, i, 1) * y,
        lambda x, y, i: x.narrow(0, 0, abs(i) + 1) * y,
    ],
    ids=[
        "row",
        "from",
        "to",
        "between",
        "one",
        "step",
        "select_scatter",
        "in_place",
        "slice",
        "narrow",
        "abs",
    ],
)
@pytest.mark.parametrize("places", [(1, 2, -1, -2, 0), (-1, 1, -2, 2)], ids=["positive", "negative"])
def test_place_may_change_its_sign(function: Callable[..., Any], places: tuple[int, ...]) -> None:
    assert_same(function, places, torch.randn(4))


def test_number_that_onnx_takes_as_an_input_makes_one_graph() -> None:
    assert len(assert_same(lambda x, n: x * n, (2, 3, 4, 5, 6)).report()) == 2


def test_lowering_that_fails_leaves_the_graph_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise TypeError("no such thing")

    monkeypatch.setitem(LOWERINGS, "aten.cosh.default", broken)
    x = torch.randn(3, requires_grad=True)
    model = ORTModule(of(torch.cosh))
    with pytest.warns(
        UserWarning, match=r"aten.cosh.default: its lowering failed \(TypeError: no such thing"
    ):
        model(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.sinh(x.detach()))
    with pytest.raises(ORTModuleONNXModelException, match=r"aten.cosh.default: its lowering failed"):
        strict(of(torch.cosh))(x)


@pytest.mark.parametrize(
    ("mode", "shape", "scale", "why"),
    [
        ("bicubic", (1, 1, 4, 3), 1.1, r"scales \[1.1, 1.1\] that do not change the sizes"),
        ("nearest", (1, 1, 4), 1.1, r"scales \[1.1\] that do not change the sizes"),
    ],
)
def test_scales_that_onnxruntime_ignores_run_in_pytorch(
    mode: str, shape: tuple[int, ...], scale: float, why: str
) -> None:
    x = torch.randn(shape)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=scale, mode=mode)

    with pytest.raises(ORTModuleONNXModelException, match=why):
        strict(of(scaled))(x)
    with pytest.warns(UserWarning, match=why):
        result = ORTModule(of(scaled))(x)
    torch.testing.assert_close(result, scaled(x))


def test_a_scale_that_some_sizes_ignore_runs_in_pytorch_for_all_sizes() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=1.3, mode="bilinear") + 1

    model = ORTModule(of(scaled))

    def with_other_sizes() -> None:
        for rows in (4, 5, 3, 2):
            x = torch.randn(1, 1, rows, 6)
            torch.testing.assert_close(model(x), scaled(x))

    with pytest.warns(UserWarning, match="scale 1.3 with symbolic sizes"):
        with_other_sizes()


def test_a_shift_by_a_number_that_changes_runs_in_pytorch() -> None:
    def shifted(x: torch.Tensor, count: int) -> torch.Tensor:
        return x * (1 << count)

    model = ORTModule(of(shifted))
    x = torch.randn(3)

    def with_other_numbers() -> None:
        for count in (2, 3, 5):
            torch.testing.assert_close(model(x, count), x * 2**count)

    with pytest.warns(UserWarning, match="a symbolic number of bits"):
        with_other_numbers()
