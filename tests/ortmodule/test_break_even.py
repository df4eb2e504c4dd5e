"""PyTorch runs the calls for which another capture would take longer than they do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from onnxtrain.ortmodule import DebugOptions, FallbackPolicy, ORTModule
from onnxtrain.ortmodule.capture import _break_even
from onnxtrain.ortmodule.capture._break_even import BreakEven
from ortmodule.eager import Of

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

CALLS = 5


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uses the default of users, with at most five calls in PyTorch. The warnings of ORTModule are errors."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_ALL", "0")
    monkeypatch.setattr(_break_even, "MAX_CALLS", CALLS)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ORTModule")
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.last = nn.Linear(5, 2)
        self.scale: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = 2.0
        return self.last(self.dropout(self.norm(self.first(x)).relu())) * self.scale


def train(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.train()
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def evaluate(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(x)


def autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return train(model, x)


@pytest.mark.parametrize(
    "call",
    [
        evaluate,
        autocast,
        lambda model, x: train(model, x[:3]),
        lambda model, x: train(model.double(), x.double()),
    ],
    ids=["evaluation", "autocast", "smaller batch", "dtype"],
)
def test_another_variant_is_captured_when_that_pays(call: Callable[[nn.Module, torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    net = Net()
    net.scale = 2.0
    eager, model = net, ORTModule(copy.deepcopy(net))
    x = torch.randn(8, 6)
    for module in (model, eager):
        torch.manual_seed(1)
        train(module, x)
    for count in range(1, CALLS + 1):
        results = []
        for module in (model, eager):
            torch.manual_seed(count)
            results.append(call(module, x))
        torch.testing.assert_close(*results)
        assert len(model.report()) == 1
        assert model.report().calls_in_pytorch == count
    for _ in range(2):
        torch.manual_seed(9)
        got = call(model, x)
        torch.manual_seed(9)
        torch.testing.assert_close(got, call(eager, x), rtol=1e-2, atol=1e-2)
        assert len(model.report()) == 2
        assert model.report().calls_in_pytorch == CALLS
    assert model.report().runs_in_onnxruntime
    for (name, value), other in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, msg=name)


def test_an_attribute_that_the_first_call_writes_costs_no_second_capture() -> None:
    model = ORTModule(Net())
    x = torch.randn(8, 6)
    for count in range(CALLS + 1):
        train(model, x)
        assert model.report().calls_in_pytorch == count
        assert len(model.report()) == 1
    assert str(model.report()).endswith(f"because another capture did not pay yet: {CALLS}")
    train(model, x)
    assert len(model.report()) == 2


def test_a_training_in_both_engines_is_that_of_eager_pytorch() -> None:
    torch.manual_seed(0)
    net = Net().double()
    ends = []
    for module in (copy.deepcopy(net), ORTModule(copy.deepcopy(net))):
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(module.parameters(), 0.05)
        data = torch.randn(20, 6, dtype=torch.float64)
        losses = []
        for _ in range(2 * CALLS):
            for batch in data.split(8):
                losses.append(train(module, batch))
                optimizer.step()
            losses.append(evaluate(module, data[:7]).sum())
        ends.append([torch.stack(losses), *module.state_dict().values()])
    assert module.report().calls_in_pytorch > 2 * CALLS
    assert len(module.report()) > 2
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize(
    "options",
    [
        {"capture_all": True},
        {"fallback_policy": FallbackPolicy.DISABLE},
        {"save_onnx": True, "onnx_prefix": "net"},
    ],
    ids=str,
)
def test_options_that_capture_everything(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "capture_all" in options:
        monkeypatch.delenv("ORTMODULE_CAPTURE_ALL")
    model = ORTModule(nn.Linear(6, 2), DebugOptions(**options, save_path=tmp_path))
    x = torch.randn(8, 6)
    train(model, x)
    evaluate(model, x)
    train(model, x[:3])
    assert (len(model.report()), model.report().calls_in_pytorch) == (3, 0)


def test_an_error_in_pytorch_does_not_drop_the_graphs() -> None:
    model = ORTModule(nn.Linear(6, 2))
    x = torch.randn(8, 6)
    train(model, x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        evaluate(model, torch.randn(8, 5))
    train(model, x)
    assert len(model.report()) == 1


def test_a_first_call_that_raises_is_captured_again() -> None:
    model = ORTModule(nn.Linear(6, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(model, torch.randn(8, 5))
    train(model, torch.randn(8, 6))
    assert (len(model.report()), model.report().calls_in_pytorch) == (1, 0)


def test_a_checkpoint_around_the_model_saves_the_same_tensors_twice() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    model = ORTModule(copy.deepcopy(net))
    train(model, torch.randn(8, 6))
    for rows in (3, 4, 5, 6, 7):
        gradients = []
        x = torch.randn(rows, 6)
        for module in (model, net):
            module.zero_grad()
            checkpoint(module, x, use_reentrant=False).square().mean().backward()
            gradients.append([p.grad for p in module.parameters()])
        torch.testing.assert_close(*gradients)
    assert model.report().calls_in_pytorch == 0


def test_only_the_thread_whose_call_pytorch_runs_is_marked() -> None:
    break_even = BreakEven(True)
    break_even.in_pytorch = True
    assert break_even.in_pytorch
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(lambda: break_even.in_pytorch).result()


class Growing(nn.Module):
    """Needs a new graph in each call, for the length of its list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(0)
        return self.layer(x) * len(self.kept)


def test_waiting_does_not_hide_that_a_function_is_captured_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_break_even, "MAX_CALLS", 1)
    model, net = ORTModule(Growing()), Growing()
    net.load_state_dict(model.state_dict())
    x = torch.randn(2, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            torch.testing.assert_close(model(x), net(x))
    assert sum("was captured again in each of 16 calls" in str(warning.message) for warning in caught) == 1
    # Of the first 32 calls every second one was captured. The layer is captured by itself from then on.
    assert 14 <= model.report().calls_in_pytorch <= 17


class Broken(nn.Module):
    """A layer in whose middle the graph ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        return self.layer(x).tanh()


def test_layers_of_one_class_are_captured_in_one_call() -> None:
    """A graph break in a container makes Dynamo capture each layer by itself, with one function for all."""
    model = ORTModule(nn.Sequential(Broken(), Broken(), Broken()))
    x = torch.randn(2, 4)
    model(x)
    first = len(model.report())
    assert first == 3
    model(x)
    assert (len(model.report()), model.report().calls_in_pytorch) == (first, 0)
    expected = model.module(x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert (len(model.report()), model.report().calls_in_pytorch) == (first, 1)


def test_the_number_of_calls_follows_from_nodes_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_break_even, "MAX_CALLS", 10**9)

    def net(x: torch.Tensor, w: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(torch.relu(x @ w).reshape(1, 1, 20, 30), k)

    graph = make_fx(net)(torch.randn(20, 10), torch.randn(10, 30), torch.randn(4, 1, 3, 3))
    nodes = sum(node.op == "call_function" for node in graph.graph.nodes)
    operations = 2 * 20 * 10 * 30 + 2 * 4 * 18 * 28 * 3 * 3
    capture, call = 0.2 + 0.004 * nodes, 15e-6 * nodes + operations / 2e10
    pays = BreakEven(True)
    assert pays.calls == 0
    pays.add(graph)
    assert pays.calls == int(capture / (call / 2))
    pays.add(graph)
    assert pays.calls == int(capture / (call / 2))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert pays.calls == 0
    off = BreakEven(False)
    off.add(graph)
    assert off.calls == 0


def test_operations_of_our_own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []
    monkeypatch.setattr(BreakEven, "add", lambda self, graph: graphs.append(graph))
    ORTModule(nn.LSTM(3, 4, bidirectional=True))(torch.randn(5, 2, 3))
    ORTModule(Of(lambda net, q, k, v: nn.functional.scaled_dot_product_attention(q, k, v)))(
        torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6)
    )
    ops = torch.ops.onnxtrain.recurrent_layer.default, torch.ops.onnxtrain.attention.default
    nodes = [g.graph.find_nodes(op="call_function", target=op) for g, op in zip(graphs, ops, strict=True)]
    flops = [sum(map(_break_even._flops, found)) for found in nodes]
    # Two directions; four gates; 3 inputs and 4 states; two batched products.
    assert flops == [2 * (2 * 5 * 2) * 4 * 4 * (3 + 4), 2 * 2 * 3 * 5 * 7 * (4 + 6)]


def test_a_model_whose_calls_take_seconds_is_captured_immediately() -> None:
    with torch.device("meta"):
        graph = make_fx(lambda x, w: x @ w)(torch.empty(100_000, 4096), torch.empty(4096, 4096))
    pays = BreakEven(True)
    pays.add(graph)
    assert pays.calls == 0
