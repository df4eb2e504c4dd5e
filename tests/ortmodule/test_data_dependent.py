"""Sizes and numbers that depend on the data: one graph, in ONNX Runtime, whatever the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule
from onnxtrain.ortmodule._torch import isolates_recompiles
from ortmodule.custom_functions import Scaling
from ortmodule.eager import Of, compare, compare_steps, strict

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(9, 6), nn.Linear(6, 2)


class Masked(Base):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.last(x[x.sum(-1) > 0]).sum() + x[tokens > 2].mean()


class Unique(Base):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        kinds, inverse = torch.unique(tokens, return_inverse=True)
        sums = torch.zeros(len(kinds), 6).index_add_(0, inverse.flatten(), self.embed(tokens).flatten(0, 1))
        return self.last(sums).square().sum()


class Repeated(Base):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.repeat_interleave(self.embed(tokens).flatten(0, 1), tokens.flatten() % 3, 0)
        return self.last(x).sin().sum() + torch.bincount(tokens.flatten()).float().square().sum()


class Experts(Base):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).flatten(0, 1)
        out = torch.zeros_like(x)
        for number in range(3):
            (rows,) = torch.where(tokens.flatten() % 3 == number)
            out.index_add_(0, rows, torch.tanh(x[rows]) * (number + 1))
        return self.last(out).square().sum()


class Queue(Base):
    """Writes at a place that a buffer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(8, 6))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)[0]
        y = self.last(x + self.queue.clone()[: len(x)])
        at = int(self.place)
        self.queue[at : at + 2] = x[:2].detach()
        self.place[0] = (at + 2) % 8
        return y.sum()


def trained_alike(plain: Base, steps: int) -> ORTModule:
    """Compare steps, random numbers included, with eager PyTorch; nothing may run in it."""
    batches = [torch.randint(9, (2, 5)) for _ in range(steps)]
    ours = compare_steps(plain, *batches, loss=sum, wrap=strict, rtol=1e-5)
    assert ours.report().runs_in_onnxruntime
    return ours


CAPTURED = pytest.mark.skipif(
    not isolates_recompiles, reason="Dynamo 2.12 breaks the graph at a number in an index"
)


@pytest.mark.parametrize("make", [Masked, Unique, Repeated, Experts, pytest.param(Queue, marks=CAPTURED)])
def test_one_graph_whatever_the_data(make: type[Base]) -> None:
    report = trained_alike(make(), 4).report()
    assert len(report) == 1
    assert not any(graph.break_reason for graph in report)


class Dropped(Base):
    """Drops elements of the rows that a mask leaves: how many numbers are drawn is known when it has run."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(self.embed(tokens), 0.3)
        kept = torch.tanh(x[x.sum(-1) > 0])
        return self.last(torch.nn.functional.dropout(kept, 0.5)).square().sum()


def test_as_many_random_numbers_as_the_data_asks_for() -> None:
    trained_alike(Dropped(), 3)


class MaskBesideIndex(Base):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).flatten(0, 1)
        return self.last(x[tokens.flatten() >= 0, torch.arange(10) % 6][None, :6]).sum()


class Branch(Base):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if x[x > 0].numel() > 100:
            x = x * 2
        return self.last(x).sum() * int(tokens.max())


@pytest.mark.parametrize("make", [MaskBesideIndex, Branch])
def test_where_dynamo_stops_the_result_is_right(make: type[Base]) -> None:
    compare_steps(make(), torch.randint(9, (2, 5)), loss=sum, rtol=1e-5, ignore="")


class Checked(Base):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        torch._assert_async((tokens < 5).all(), "no such token")
        return self.last(self.embed(tokens)).sum()


def test_assertion_on_the_data() -> None:
    ours = ORTModule(Checked())
    ours(torch.tensor([[0, 4]])).backward()
    with pytest.raises((RuntimeError, AssertionError), match="no such token"):
        ours(torch.tensor([[0, 5]]))


class Spline(Base):
    """Writes what it computes of some rows, padded on the way, in their places."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        out = torch.zeros_like(x)
        inside = x[..., 0] > 0
        widths = torch.nn.functional.pad(x[inside].softmax(-1).cumsum(-1), (1, 0), value=0.0)
        out[inside] = widths[..., 1:] - 2 * widths[..., :-1]
        return self.last(out).square().sum()


def test_padding_and_writing_rows_that_a_mask_tells() -> None:
    trained_alike(Spline(), 2)


class Chosen(Base):
    """Takes the column that `item()` tells, for which Dynamo has no symbol: the graph ends there."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)[0]
        return x[:, x[0].argmax().item()].sum()


def test_no_advice_to_set_what_ortmodule_sets(caplog: pytest.LogCaptureFixture) -> None:
    from torch._dynamo.variables.tensor import TensorVariable

    TensorVariable._warn_capture_scalar_outputs.cache_clear()  # Dynamo advises once in a process
    ours = ORTModule(Chosen())
    ours(torch.tensor([[0, 4]])).backward()
    assert len(ours.report()) == 2
    assert "capture_scalar_outputs" not in caplog.text


EMPTY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max of a slice": lambda x: x[:0].max(),
    "min of a slice": lambda x: torch.min(x[:0]),
    "max of what a mask selects": lambda x: x[x > 9].max(),
    "min of what a mask selects": lambda x: torch.min(x[x > 9]),
    "amax of what a mask selects": lambda x: x[x > 9].amax(),
    "amin of rows that a mask selects": lambda x: x[x[:, 0] > 9].amin(),
}


@pytest.mark.filterwarnings("ignore:.*in PyTorch")
@pytest.mark.parametrize("name", EMPTY)
def test_the_extremum_of_nothing_is_an_error(name: str) -> None:
    """ONNX Runtime returns an infinity."""
    x = torch.randn(3, 3)
    with pytest.raises(RuntimeError):
        EMPTY[name](x)
    model = ORTModule(Of(lambda module, x: EMPTY[name](x)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Expected reduction dim|Runtime assertion failed"):
            model(x)


def test_the_extremum_of_what_a_mask_selects() -> None:
    plain = Of(lambda module, x: x[x > 0].max() * x[x[:, 0] > 0].amin())
    batch = torch.tensor([[1.0, -2.0, 3.0], [-1.0, 4.0, 0.5], [2.0, 4.0, -1.0]])
    assert compare_steps(plain, batch, batch + 0.1).report().runs_in_onnxruntime


def test_rows_that_a_mask_selects_are_refused_for_their_dtypes() -> None:
    module = Of(lambda module, x: torch.mv(x[x[:, 0] > -9], x[0].half()))
    with pytest.raises(RuntimeError) as wanted:
        module(torch.randn(3, 3))
    with pytest.raises(RuntimeError) as got:
        ORTModule(module)(torch.randn(3, 3))
    assert str(got.value) == str(wanted.value)


def test_a_size_that_depends_on_data_is_used_behind_a_custom_function() -> None:
    """The function cuts the graph, and nothing but the selected rows tells the part behind it how many there are."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x[:, torch.tensor([True, False] * x.shape[1])[: x.shape[1]]]
            weight = Scaling.apply(self.weight)
            return rows @ rows.mT * weight.sum()

    def program(module: nn.Module) -> Any:
        x = torch.randn(4, 3).requires_grad_()
        results = [module(x), module(x[:3])]
        sum(result.sum() for result in results).backward()
        return [*(result.detach() for result in results), x.grad, module.weight.grad]

    torch.manual_seed(0)
    compare(Net(), program, ignore=".*should not be instantiated")  # Dynamo makes an object of a Function
