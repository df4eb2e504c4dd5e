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
    DebugOptions,
    FallbackPolicy,
    ORTModule,
    ORTModuleONNXModelException,
    PyTorchOp,
)
from onnxtrain.ortmodule.lowering import aten
from onnxtrain.ortmodule.lowering._table import LOWERINGS, Lowering

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
    """Compares three things: what the module returns and changes, its gradients, and the generator behind it."""
    reference, ours = plain, ORTModule(copy.deepcopy(plain))
    for step, shape in enumerate(shapes):
        found = []
        for model in (reference, ours):
            torch.manual_seed(step)
            x = torch.randn(shape, dtype=next(model.parameters()).dtype, requires_grad=True)
            argument = x * 1
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "ORTModule: graph . runs in PyTorch")
                out = model(argument)
            outputs = [out] if isinstance(out, torch.Tensor) else list(out)
            sum((t * (i + 1)).sum() for i, t in enumerate(outputs) if t.requires_grad).backward()  # type: ignore[union-attr]
            state = {
                **{f"output {i}": t.detach().clone() for i, t in enumerate(outputs)},
                **{f"requires_grad {i}": torch.tensor(t.requires_grad) for i, t in enumerate(outputs)},
                "argument": argument.detach().clone(),
                "gradient of x": x.grad,
                **{f"gradient of {n}": p.grad for n, p in model.named_parameters()},
                **{n: b.clone() for n, b in model.named_buffers()},
                "generator": torch.rand(()),
            }
            found.append({name: value for name, value in state.items() if value is not None})
        assert found[0].keys() == found[1].keys()
        for name, value in found[0].items():
            torch.testing.assert_close(
                found[1][name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
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


class Written(nn.Module):
    """Writes to its argument, to a buffer and to views, before and behind what runs in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.layer(x.clone())
        row = h.view(-1, 2)
        t = torch.tanh(h)  # in PyTorch
        h.mul_(2)  # seen by `row`
        x.add_(t)
        self.total += t.detach().sum(0)
        self.calls += 1
        u = torch.tanh(row) @ self.layer.weight[:2]
        row[0] = 1.0
        return h.exp() * 0.1, u, row + 1, self.total * 2, x


class Stopped(nn.Module):
    """Parts of it have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            target = torch.tanh(self.frozen(x))
        h = self.layer(x)
        return (
            (h * target).exp(),
            torch.tanh(h.detach()) @ self.layer.weight,
            torch.tanh(h) @ target.T,
            target,
        )


class Random(nn.Module):
    """Draws before, in and behind what runs in PyTorch, and from what depends on nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = fn.dropout(self.layer(x), 0.5)
        noise = torch.rand_like(h)
        t = fn.dropout(torch.tanh(h), 0.25)
        free = torch.randn(4, 4)
        t = torch.tanh(t * noise) @ self.layer.weight
        return fn.dropout(t, 0.3) @ free, torch.rand(3)


class Sizes(nn.Module):
    """Numbers that depend on sizes, on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.shape[0]
        t = torch.tanh(self.layer(x)).reshape(rows * 2, 2)
        positions = torch.arange(rows * 2, dtype=x.dtype)[:, None]
        u = torch.tanh(t + positions / rows)
        return (
            u.reshape(rows, 4) @ self.layer.weight,
            u.mean() * rows,
            fn.dropout(u.reshape(2, -1), 0.5).exp(),
        )


class Strides(nn.Module):
    """What comes to PyTorch has, in eager PyTorch, other strides than ONNX Runtime's results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.layer(x)[:, None].repeat(1, 3, 1).transpose(0, 1) * 2
        t = torch.tanh(h)
        again = t.transpose(0, 1).view(-1, 12)
        return fn.dropout(t, 0.5) @ self.layer.weight, torch.tanh(again) * 2, torch.rand_like(t).sum(0)


class Branches(nn.Module):
    """Many operators in PyTorch on branches that need not wait for each other; tuples; a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.conv = nn.Conv1d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [torch.tanh(layer(x)) for layer in self.layers]
        a, b = torch.tanh(torch.cat(parts, 1)).split(6, 1)
        values, indices = torch.tanh(a @ b.T).max(1)
        return self.conv(b[:, None]).exp(), values * 2, indices.to(x.dtype) + 1


@pytest.mark.parametrize(
    "module", [Written, Stopped, Random, Sizes, Strides, Branches], ids=lambda m: m.__name__
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_parts(module: type[nn.Module], training: bool, without: Callable[..., None]) -> None:
    without("aten.tanh")
    ours = assert_same(module().train(training), (3, 4), (5, 4), (2, 4))
    reasons = {op.op: op.reason for graph in ours.report() for op in graph.in_pytorch}
    assert reasons.pop("aten.tanh.default") == "aten.tanh.default has no lowering to ONNX"
    assert all(reason.startswith("too few operators") for reason in reasons.values())


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
@pytest.mark.parametrize(
    "module", [Written, Stopped, Random, Sizes, Strides, Branches], ids=lambda m: m.__name__
)
def test_parts_of_other_operators(
    module: type[nn.Module], away: tuple[str, ...], without: Callable[..., None]
) -> None:
    without("aten.tanh", *away)
    assert_same(module(), (3, 4), (5, 4), share=(-0.01, 0.99))


def test_parts_under_autocast_round_as_eager_pytorch(without: Callable[..., None]) -> None:
    without("aten.tanh")
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(5, 4)
    found = []
    for model in (plain, ours):
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ORTModule: graph 0 runs in PyTorch in part")
            out = model(x)
        out.float().sum().backward()
        found.append([out.detach(), *(p.grad for p in model.parameters())])
    assert found[0][0].dtype == found[1][0].dtype == torch.bfloat16
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)


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


class Filtered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.conv, self.after = nn.Linear(6, 6), nn.Conv1d(1, 1, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.conv(self.before(x)[:, None]).squeeze(1))


def test_an_operator_without_a_kernel_runs_in_pytorch() -> None:
    ours = ORTModule(Filtered().double())
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
    options = DebugOptions(fallback_policy=FallbackPolicy.DISABLE)
    ours = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), options)
    with pytest.raises(ORTModuleONNXModelException, match=r"aten\.tanh\.default has no lowering"):
        ours(torch.randn(3, 4))


def test_what_is_too_small_for_a_session_runs_in_pytorch(without: Callable[..., None]) -> None:
    without("aten.tanh")

    class Alternating(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.tanh(torch.tanh(x) + 1).exp()).T

    ours = ORTModule(Alternating())
    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match="graph 0 runs in PyTorch: aten.tanh"):
        torch.testing.assert_close(ours(x), ours.module(x))
    assert [graph.share for graph in ours.report()] == [0.0]


def test_a_gradient_that_fails_at_run_time_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten.pooling, "_LARGE", 2**30)
    plain = nn.Sequential(
        nn.Conv2d(1, 64, 1), nn.AvgPool2d(2**20, ceil_mode=True)
    )  # its kernel needs 2^48 bytes
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(2, 1, 3, 3)
    out = ours(x)
    with pytest.warns(UserWarning, match="graph 0, gradient runs in PyTorch: ONNX Runtime failed"):
        out.sum().backward()
    plain(x).sum().backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


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
