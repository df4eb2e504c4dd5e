"""A graph of which PyTorch runs some operators computes what eager PyTorch computes, and the report says which."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as fn
from torch import nn

from onnxtrain.ortmodule import (
    ORTModule,
    ORTModuleONNXModelException,
    PyTorchOp,
)
from onnxtrain.ortmodule.lowering import aten
from onnxtrain.ortmodule.lowering._table import LOWERINGS, Lowering
from ortmodule.eager import Of, compare, compare_steps, gradients, strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Takes lowerings away: `without("aten.tanh")`."""

    def remove(*prefixes: str) -> None:
        for name in [name for name in LOWERINGS if f"{name}.".startswith(tuple(f"{p}." for p in prefixes))]:
            monkeypatch.delitem(LOWERINGS, name)

    return remove


def assert_same(
    plain: nn.Module, *shapes: tuple[int, ...], share: tuple[float, float] = (0.1, 0.99)
) -> ORTModule:
    """Compare steps with eager PyTorch; `share` bounds the part of each graph that runs in ONNX Runtime."""
    dtype = next(plain.parameters()).dtype
    ours = compare_steps(
        plain,
        *(torch.randn(shape, dtype=dtype) for shape in shapes),
        loss=lambda outputs: sum((t * (i + 1)).sum() for i, t in enumerate(outputs)),
        ignore="ORTModule: graph . runs in PyTorch",
    )
    for graph in ours.report():
        assert share[0] < graph.share < share[1], ours.report()
    assert not ours.report().runs_in_onnxruntime
    return ours


class Singular(nn.Module):
    """A decomposition, which ONNX has not, in the midst of a network with dropout and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = fn.dropout(self.norm(self.first(x)), 0.5)
        h = h + torch.linalg.svdvals(h)[: h.shape[0], None]
        return self.last(fn.dropout(h, 0.2)).relu()


def test_one_operator_runs_in_pytorch_and_the_rest_in_onnxruntime() -> None:
    ours = assert_same(Singular().double(), (3, 4), (3, 4), (4, 4), (2, 4))
    for graph in ours.report():
        (op,) = graph.in_pytorch
        assert op == PyTorchOp(
            "aten._linalg_svd.default", 1, "aten._linalg_svd.default has no lowering to ONNX"
        )
        assert graph.mode == "training"
        assert graph.backward_nodes > 0
    text = str(ours.report())
    assert "graph 0 runs in PyTorch in part: 1 of " in text
    assert "both, 9" in text  # per cent
    assert "both" in repr(ours.report())


def stopped(m: Of, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Parts of it have no gradient."""
    with torch.no_grad():
        target = torch.tanh(m.frozen(x))
    h = m.layer(x)
    return (h * target).exp(), torch.tanh(h.detach()) @ m.layer.weight, torch.tanh(h) @ target.T, target


def random(m: Of, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Draws before, in and behind what runs in PyTorch, and from what depends on nothing else."""
    h = fn.dropout(m.layer(x), 0.5)
    noise = torch.rand_like(h)
    t = fn.dropout(torch.tanh(h), 0.25)
    free = torch.randn(4, 4)
    t = torch.tanh(t * noise) @ m.layer.weight
    return fn.dropout(t, 0.3) @ free, torch.rand(3)


def sizes(m: Of, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Numbers that depend on sizes, on both sides."""
    rows = x.shape[0]
    t = torch.tanh(m.layer(x)).reshape(rows * 2, 2)
    positions = torch.arange(rows * 2, dtype=x.dtype)[:, None]
    u = torch.tanh(t + positions / rows)
    return u.reshape(rows, 4) @ m.layer.weight, u.mean() * rows, fn.dropout(u.reshape(2, -1), 0.5).exp()


def strides(m: Of, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Inputs of the part in PyTorch have other strides in eager PyTorch than ONNX Runtime's results."""
    h = m.layer(x)[:, None].repeat(1, 3, 1).transpose(0, 1) * 2
    t = torch.tanh(h)
    again = t.transpose(0, 1).view(-1, 12)
    return fn.dropout(t, 0.5) @ m.layer.weight, torch.tanh(again) * 2, torch.rand_like(t).sum(0)


def written(m: Of, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Writes to its argument, to buffers and to views, before and behind what runs in PyTorch."""
    h = m.layer(x.clone())
    row = h.view(-1, 2)
    t = torch.tanh(h)  # in PyTorch
    h.mul_(2)  # seen by `row`
    x.add_(t)
    m.total += t.detach().sum(0)
    m.calls += 1
    u = torch.tanh(row) @ m.layer.weight[:2]
    row[0] = 1.0
    return h.exp() * 0.1, u, row + 1, m.total * 2, x


def branches(m: Of, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Many operators in PyTorch on branches that need not wait for each other; tuples; a convolution."""
    parts = [torch.tanh(layer(x)) for layer in (m.layer, m.frozen, m.third)]
    a, b = torch.tanh(torch.cat(parts, 1)).split(6, 1)
    values, indices = torch.tanh(a @ b.T).max(1)
    return m.conv(b[:, None]).exp(), values * 2, indices.to(x.dtype) + 1


def of(function: Callable[..., Any]) -> Of:
    layers = {name: nn.Linear(4, 4) for name in ("layer", "frozen", "third")}
    buffers = {"total": torch.zeros(4), "calls": torch.zeros((), dtype=torch.int64)}
    return Of(function, **layers, **buffers, conv=nn.Conv1d(1, 2, 3))


FUNCTIONS = pytest.mark.parametrize(
    "function", [written, stopped, random, sizes, strides, branches], ids=lambda function: function.__name__
)


@pytest.mark.sample(every=3)
@FUNCTIONS
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_parts_in_pytorch_match_eager_pytorch(
    function: Callable[..., Any], training: bool, without: Callable[..., None]
) -> None:
    without("aten.tanh")
    ours = assert_same(of(function).train(training), (3, 4), (5, 4), (2, 4))
    reasons = {op.op: op.reason for graph in ours.report() for op in graph.in_pytorch}
    assert reasons.pop("aten.tanh.default") == "aten.tanh.default has no lowering to ONNX"
    assert all(reason.startswith("too few operators") for reason in reasons.values())


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "away",
    [
        ("aten.mul", "aten.add"),
        ("onnxtrain.bernoulli_like", "aten.exp"),
        ("aten.view", "aten.t", "aten.rand_like"),
        ("aten.detach", "aten.max", "aten.cat"),
    ],
    ids=lambda names: "-".join(name.split(".")[1] for name in names),
)
@FUNCTIONS
def test_parts_of_other_operators_match_eager_pytorch(
    function: Callable[..., Any], away: tuple[str, ...], without: Callable[..., None]
) -> None:
    without("aten.tanh", *away)
    assert_same(of(function), (3, 4), (5, 4), share=(-0.01, 0.99))


def test_parts_under_autocast_round_as_eager_pytorch(without: Callable[..., None]) -> None:
    without("aten.tanh")
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(5, 4)

    def program(module: nn.Module) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        out.float().sum().backward()
        assert out.dtype == torch.bfloat16
        return out.detach(), gradients(module)

    compare(plain, program, warns="graph 0 runs in PyTorch in part", rtol=2e-2, atol=2e-2)


def test_second_derivatives_through_parts(without: Callable[..., None]) -> None:
    without("aten.tanh")
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(), nn.Tanh(), nn.Linear(4, 1)
    ).double()
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match="graph 0 runs in PyTorch in part"):
        ours(x)
    assert torch.autograd.gradcheck(ours, (x,))
    assert torch.autograd.gradgradcheck(ours, (x,))


def test_an_operator_without_a_kernel_runs_in_pytorch() -> None:
    filtered = Of(
        lambda m, x: m.after(m.conv(m.before(x)[:, None]).squeeze(1)),
        before=nn.Linear(6, 6),
        conv=nn.Conv1d(1, 1, 3),
        after=nn.Linear(4, 2),
    )
    ours = ORTModule(filtered.double())
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match="in part: 1 of .*no kernel of Conv for float64"):
        out = ours(x)
    torch.testing.assert_close(out, ours.module(x), rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(ours, (x,))
    (graph,) = ours.report()
    assert [op.op for op in graph.in_pytorch] == ["aten.convolution.default"]


def test_an_operator_without_a_gradient_rule_runs_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(low: Lowering, x: Any) -> Any:
        """tanh, rounded by an operator that is not differentiated."""
        scale = low.op.const(0.1, low.dtype)
        return low.op.DequantizeLinear(low.op.QuantizeLinear(low.op.Tanh(x), scale), scale)

    monkeypatch.setitem(LOWERINGS, "aten.tanh.default", rounded)
    ours = assert_same(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), (1, 4))
    (graph,) = ours.report()
    (op,) = graph.in_pytorch
    assert op.op == "aten.tanh.default"
    assert "no VJP rule for 'DequantizeLinear'" in op.reason


def test_the_policy_forbids_parts_in_pytorch(without: Callable[..., None]) -> None:
    without("aten.tanh")
    ours = strict(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    with pytest.raises(ORTModuleONNXModelException, match=r"aten\.tanh\.default has no lowering"):
        ours(torch.randn(3, 4))


def test_what_is_too_small_for_a_session_runs_in_pytorch(without: Callable[..., None]) -> None:
    without("aten.tanh")
    plain = Of(lambda m, x: torch.tanh(torch.tanh(torch.tanh(x) + 1).exp()).T)
    x = torch.randn(3, 4)
    ours = compare(plain, lambda module: module(x), warns="graph 0 runs in PyTorch: aten.tanh")
    assert [graph.share for graph in ours.report()] == [0.0]


def test_a_gradient_that_fails_at_run_time_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten.pooling, "_MAX_UNLIMITED_KERNEL", 2**30)
    # Its body needs a convolution kernel of 2^48 bytes; the native kernel of the gradient needs none.
    monkeypatch.setenv("ONNXTRAIN_KERNELS", "off")
    plain = nn.Sequential(nn.Conv2d(1, 64, 1), nn.AvgPool2d(2**20, ceil_mode=True))
    warns = "graph 0, gradient runs in PyTorch: ONNX Runtime failed"
    compare_steps(plain, (2, 1, 3, 3), loss=lambda out: out[0].sum(), differentiate_inputs=False, warns=warns)


def test_a_graph_that_fails_at_run_time_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_even_rows(low: Lowering, x: Any) -> Any:
        return low.op.Reshape(low.op.Reshape(low.op.Tanh(x), [-1, 2, 4]), low.op.shape_of(x))

    monkeypatch.setitem(LOWERINGS, "aten.tanh.default", of_even_rows)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))
    ours = ORTModule(copy.deepcopy(plain))
    for rows in (4, 6, 8, 5):
        x, results = torch.randn(rows, 4), []
        for model in (plain, ours):
            torch.manual_seed(rows)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results.append(model(x))
            results[-1].sum().backward()
        torch.testing.assert_close(*results)
        said = [str(w.message) for w in caught if "ORTModule" in str(w.message)]
        assert [("forward runs in PyTorch: ONNX Runtime failed" in text) for text in said] == [True] * (
            rows == 5
        )
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
