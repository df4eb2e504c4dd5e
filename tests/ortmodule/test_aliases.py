"""Outputs that are inputs or views of them, and inputs that forward changes: memory and gradients as in PyTorch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule
from ortmodule.custom_functions import StraightThrough
from ortmodule.eager import Of, compare, compare_steps


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_buffers_stay_the_same_tensors() -> None:
    """Who holds a buffer (a state_dict, shared memory, another module) sees what later calls write."""

    def counting(module: Of, x: torch.Tensor) -> Any:
        module.calls += 1
        module.cache[: x.shape[0]] = x
        return module.linear(module.cache), module.cache

    batches = [torch.randn(batch, 4) for batch in (1, 2, 3)]

    def program(module: nn.Module) -> Any:
        calls, cache = module.calls, module.cache
        seen = []
        for x in batches:
            result = module(x)
            assert result[1] is cache is module.cache
            assert module.calls is calls
            seen.append(
                (result[0].detach(), {name: buffer.clone() for name, buffer in module.named_buffers()})
            )
        assert calls == 3
        return seen

    buffers = {"calls": torch.zeros((), dtype=torch.long), "cache": torch.zeros(5, 4)}
    ours = compare(Of(counting, linear=nn.Linear(4, 4), **buffers), program)
    assert ours.report().runs_in_onnxruntime


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            stopped = self.weight.t()
        views = x, x.view(-1), x[:, :2], x.chunk(2, 1)[1], self.weight[0], self.weight.detach(), stopped
        return x @ self.weight.t(), *views


def test_views_share_the_memory_of_inputs() -> None:
    batches = [torch.randn(batch, 4) for batch in (2, 3, 5)]

    def program(module: nn.Module) -> Any:
        seen = []
        for x in batches:
            mine = x.clone()
            module.zero_grad()
            product, *outputs = module(mine)
            assert outputs[0] is mine
            (product.square().sum() + 2 * outputs[4].sum()).backward()
            # PyTorch says so of a view that no_grad took of a parameter, too.
            assert [output.requires_grad for output in outputs] == [False] * 4 + [True, False, True]
            with torch.no_grad():
                for value, output in enumerate(outputs[1:-1]):  # the last cannot be used after a write
                    output.add_(value + 1)
            seen.append([t.detach().clone() for t in (product, *outputs[:-1], mine, module.weight)])
            seen.append([module.weight.grad])
        return seen

    compare(Views(), program)


@pytest.mark.parametrize("loss", [lambda a, b: b, lambda a, b: a.sum() + b, lambda a, b: a.sum()])
def test_an_input_changed_in_place_carries_the_gradient(loss: Callable[[Any, Any], torch.Tensor]) -> None:
    def scaling(module: Of, x: torch.Tensor) -> Any:
        x.mul_(module.weight)
        return x, (x * module.weight).sum()

    batches = [torch.randn(batch, 4) for batch in (2, 3)]

    def program(module: nn.Module) -> Any:
        seen = []
        for x in batches:
            mine = x.clone()
            changed, total = module(mine)
            assert changed is mine
            assert mine.requires_grad
            loss(changed, total).backward()
            seen.append((changed, total, module.weight.grad.clone()))
        return seen

    plain = Of(scaling, weight=nn.Parameter(torch.full((4,), 3.0)))
    assert compare(plain, program).report().runs_in_onnxruntime


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a view, then its base is read": lambda y, p: (y[0].mul_(p[0]), y)[1],
    "a view of a view": lambda y, p: (y.t()[1].add_(p[1]), y)[1],
    "by copying": lambda y, p: (y[:, 1:].copy_(p[:, 1:]), y)[1],
    "by indexing": lambda y, p: (y.view(-1).__setitem__(slice(0, 3), p[0]), y)[1],
    "by a mask": lambda y, p: (y.t().masked_scatter_(y.t() > 1, p), y)[1],
    "by a function of lists": lambda y, p: (torch._foreach_mul_([y[0], y[1]], [p[0], p[1]]), y)[1],
    "the base, then a view is read": lambda y, p: (y.view(-1), y.lerp_(p, 0.5))[0],
    "a view, then another view is read": lambda y, p: (y[:, 0], y[0].mul_(p[0]))[0],
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("write", WRITES)
def test_a_custom_function_of_memory_that_was_written_to(write: str) -> None:
    def function(module: Of, x: torch.Tensor) -> Any:
        return StraightThrough.apply(module.write(x * 2, module.weight))

    def program(module: nn.Module) -> Any:
        result = module(torch.linspace(0, 1, 9).reshape(3, 3))
        result.sum().backward()
        return result, module.weight.grad

    weight = nn.Parameter(torch.arange(9.0).reshape(3, 3))
    compare(Of(function, write=WRITES[write], weight=weight), program, ignore="ORTModule.*_foreach_mul")


@pytest.mark.parametrize("write", WRITES)
def test_requires_grad_of_memory_that_was_written_to(write: str) -> None:
    def function(module: Of, x: torch.Tensor) -> Any:
        y = module.write(x * 2, module.weight)
        return y, y.requires_grad, y.is_leaf, y.detach().requires_grad

    weight = nn.Parameter(torch.arange(9.0).reshape(3, 3))
    plain = Of(function, write=WRITES[write], weight=weight)
    x = torch.linspace(0, 1, 9).reshape(3, 3)
    compare(plain, lambda module: module(x), ignore="ORTModule.*_foreach_mul")


def test_an_input_that_overlaps_a_written_one_is_left_to_pytorch() -> None:
    """A buffer is a part of another one, which forward writes to."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        module.flat.add_(x)
        return module.head * 2

    flat = torch.zeros(4)
    plain = Of(function, flat=flat, head=flat[:2])
    compare(plain, lambda module: module(torch.ones(4)), warns="shares its memory")


def test_arguments_that_begin_to_overlap() -> None:
    """Apart in the first call, then parts of one tensor that do not overlap, then overlapping."""

    def function(_: Of, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    model = ORTModule(Of(function))
    torch.testing.assert_close(model(torch.ones(4), torch.ones(2)), torch.full((2,), 2.0))
    base = torch.ones(6)
    torch.testing.assert_close(model(base[:4], base[4:]), torch.full((2,), 2.0))
    assert model.report().runs_in_onnxruntime
    with pytest.warns(UserWarning, match="share memory"):
        result = model(base[:4], base[2:4])
    torch.testing.assert_close(result, torch.full((2,), 6.0))
    torch.testing.assert_close(base, torch.tensor([3.0, 3.0, 3.0, 3.0, 1.0, 1.0]))


class Parts(nn.Module):
    """Results that are views of one intermediate tensor, one of them laid out otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> Any:
        h = x * self.weight
        t = (x.t() * 2).mul(self.weight[0])
        with torch.no_grad():
            stopped = h[1]
        return h, h[0], h.detach(), h[:, 2:], t, t.t()[0], stopped.detach()


def test_results_share_memory_with_each_other() -> None:
    batches = [torch.randn(batch, 4) for batch in (2, 3)]

    def program(module: nn.Module) -> Any:
        seen = []
        for x in batches:
            module.zero_grad()
            results = module(x)
            flags = [result.requires_grad for result in results]
            (results[1].sum() + results[3].square().sum() + results[5].sum()).backward()
            with torch.no_grad():
                for number, result in enumerate(results):
                    result.add_(number)
            seen.append((results, module.weight.grad, flags))
        return seen

    assert compare(Parts(), program).report().runs_in_onnxruntime


def test_a_view_that_is_written_to_after_a_graph_break() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x * module.weight
        row = h[0]
        torch._dynamo.graph_break()
        row.zero_()
        return h.square()

    plain, warns = (
        Of(function, weight=nn.Parameter(torch.randn(4))),
        "graph 1 runs in PyTorch: .*shares its memory",
    )
    compare_steps(plain, (2, 4), loss=lambda out: out[0].sum(), differentiate_inputs=False, warns=warns)


class Turning(nn.Module):
    """Gives its argument another shape behind a function that returns it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = torch.atleast_2d(x)
        same.transpose_(0, 1)
        return same.sum(0) * 2


def test_an_argument_that_gets_another_shape_is_left_to_pytorch() -> None:
    start = torch.randn(3, 3)

    def program(module: nn.Module) -> Any:
        x = start.clone()
        result = module(x)
        assert x.stride() == (1, 3)
        return result, x

    compare(Turning(), program, warns="changes the shape of an input in place")


class InactiveDropout(nn.Module):
    """Writes to the result of dropout, which is its argument where it is off."""

    def __init__(self, dropout: Callable[[torch.Tensor], torch.Tensor], write: bool) -> None:
        super().__init__()
        self.dropout, self.write = dropout, write
        self.weight = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self.dropout(x)
        if self.write:
            kept[1].mul_(3)
        return kept, kept * self.weight


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize(
    "dropout",
    [
        lambda x: nn.functional.dropout(x, 0.0),
        lambda x: nn.functional.dropout(x, 0.5, training=False),
        lambda x: torch.dropout(x, 0.0, True),
        lambda x: torch.dropout(x, 0.5, False),
        nn.Dropout(0.5).eval(),
    ],
)
def test_dropout_that_is_off_returns_its_argument(
    dropout: Callable[[torch.Tensor], torch.Tensor], expanded: bool, write: bool
) -> None:
    seen = []
    plain = InactiveDropout(dropout, write)
    for module in (ORTModule(copy.deepcopy(plain)), plain):
        x = torch.ones(1, 3).expand(4, 3) if expanded else torch.ones(4, 3)
        in_pytorch = expanded and write and module is not plain
        said = (
            pytest.warns(match="whose elements share memory with each other")
            if in_pytorch
            else contextlib.nullcontext()
        )
        with said:
            kept, product = module(x)
        assert kept is x
        assert x._version == int(write)
        product.sum().backward()
        seen.append((kept, product, module.get_parameter("weight").grad))
    torch.testing.assert_close(seen[0], seen[1])


class FirstRow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:1].mul_(3)
        return x.sum(1) + 1


def test_an_expanded_argument_that_is_written_to_is_left_to_pytorch() -> None:
    """Eager PyTorch allows the write to one of its rows, which are one in memory."""

    def first_row(_: Of, x: torch.Tensor) -> torch.Tensor:
        x[:1].mul_(3)
        return x.sum(1) + 1

    start = torch.randn(1, 4)

    def program(module: nn.Module) -> Any:
        x = start.clone().expand(3, 4)
        return module(x), x

    compare(Of(first_row), program, warns="whose elements share memory with each other")


def filled_grid(_: Of, x: torch.Tensor) -> Any:
    grid = torch.meshgrid(x, x, indexing="ij")[0]
    grid.fill_(0.5)
    return grid * x


def set_rows(_: Of, x: torch.Tensor) -> Any:
    rows = x.unsqueeze(0).expand(2, 4)
    rows[[1, -2, 1]] = 1
    return rows * 2


def set_row_of_a_view(_: Of, x: torch.Tensor) -> Any:
    rows = (x * 2).expand(3, 4)
    rows[0][1:].zero_()
    return rows + 1


def result_of_out(_: Of, x: torch.Tensor) -> Any:
    rows = torch.zeros(1, 4).expand(3, 4)
    torch.mul(x, 2, out=rows[0])
    return rows + 1


@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded tensors is deprecated")
@pytest.mark.parametrize("forward", [filled_grid, set_rows, set_row_of_a_view, result_of_out])
def test_writes_to_expanded_tensors_are_left_to_pytorch(forward: Callable[..., Any]) -> None:
    """Functionalization (PyTorch 2.13) adds up the copies: `filled_grid` would hold other numbers than 0.5."""
    start = torch.randn(4)

    def program(module: nn.Module) -> Any:
        x = start.clone()
        return module(x), x

    compare(Of(forward), program, warns="whose elements share memory with each other")


def test_a_tensor_that_is_expanded_elsewhere_may_be_written_to() -> None:
    def forward(_: Of, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        rows = y.expand(3, 4)
        y.add_(1)
        return rows + x

    start = torch.randn(4)
    compare(Of(forward), lambda module: module(start.clone()))


def smallest_row(module: Of, x: torch.Tensor) -> Any:
    """Returns a row that is no longer the smallest one when the write is done."""
    row = x.narrow(0, x.sum(1).argmin().item(), 1)
    row.zero_()
    x.sub_(2 * x.sum(1, keepdim=True))
    return row, row * 2


def narrowed_rows(module: Of, x: torch.Tensor) -> Any:
    start = int(x.sum(1).argmin())
    few, many = x.narrow(0, start, 1), x[start:]
    x.neg_()
    return few, many, few + 1


def drawn_row(module: Of, x: torch.Tensor) -> Any:
    row = x[torch.randint(0, 3, ()).item()]
    return row, row * 2, nn.functional.dropout(row, 0.5)


def row_of_a_changed_number(module: Of, x: torch.Tensor) -> Any:
    index = x.sum(1).argmin()
    rows = x[index.item()], x[index]
    index.neg_()
    return *rows, index


def shape_of_a_dropout(module: Of, x: torch.Tensor) -> Any:
    view = x.view_as(nn.functional.dropout(x.reshape(-1), 0.5))
    return view, nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize(
    ("forward", "differentiable"),
    [
        # With a gradient Dynamo captures no `narrow` by such a number in front of a write to the view.
        (smallest_row, False),
        *(
            (forward, differentiable)
            for forward in (narrowed_rows, drawn_row, row_of_a_changed_number, shape_of_a_dropout)
            for differentiable in (False, True)
        ),
    ],
)
def test_a_view_lies_where_the_numbers_said_when_it_was_made(
    forward: Callable[..., Any], differentiable: bool
) -> None:
    start = torch.tensor([[1.0, 2.0, 3.0], [-3.0, 1.0, -1.0], [2.0, 0.0, 1.0]])

    def program(module: nn.Module) -> Any:
        seen = []
        for rows in (3, 3):
            leaf = start[:rows].clone().requires_grad_(differentiable)
            x = leaf * 1
            results = module(x)
            if differentiable:
                sum(result.sum() for result in results if result.is_floating_point()).backward()
            places = [result.data_ptr() - x.data_ptr() for result in results[:1]]
            seen.append((x.detach(), [result.detach() for result in results], places, leaf.grad))
        return seen

    assert compare(Of(forward), program).report().runs_in_onnxruntime


def test_a_view_of_the_row_that_a_number_said_after_a_graph_break() -> None:
    def forward(module: Of, x: torch.Tensor) -> Any:
        row = x.select(0, x.sum(1).argmin().item())
        row.zero_()
        torch._dynamo.graph_break()
        return row * 2, x * 2

    start = torch.tensor([[1.0, 2.0], [-3.0, 1.0]])
    compare(Of(forward), lambda module: module(start.clone()))


def test_addresses_behind_the_end_of_a_view() -> None:
    """`as_strided` addresses the memory that a view lies in, further than the view itself goes."""

    def forward(module: Of, x: torch.Tensor) -> Any:
        first, second = (x * 1).chunk(2, 0)
        return first.as_strided((1, 2), (1, 1), 1), second * 2, first.sigmoid()

    compare_steps(Of(forward), (4,), (6,), (4,), warns="elements past the end of a view")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("offset", [None, 0, 1])
@pytest.mark.parametrize("rows", [slice(1, None), slice(1, 4), slice(0, 4)], ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_addresses_in_the_memory_of_an_argument(rows: slice, offset: int | None, flat: bool) -> None:
    """An offset counts from the beginning of the memory; the argument may be any part of it, another in each call."""

    def forward(module: Of, x: torch.Tensor) -> Any:
        return (x.view(-1) if flat else x).as_strided((2, 4), (4, 1), offset) * 2, x.sin()

    def program(module: nn.Module) -> Any:
        memory = torch.arange(24.0).reshape(6, 4)
        results = [module(memory[rows]), module(memory[:4]), module(memory[2:])]
        return [*results, module(torch.randn(4, 4))]

    compare(Of(forward), program, ignore="ORTModule: ")


@pytest.mark.usefixtures("fresh_dynamo")
def test_addresses_behind_the_end_of_an_argument() -> None:
    def forward(module: Of, x: torch.Tensor) -> Any:
        return x.as_strided((3, 4), (4, 1)) * 2, x.sin()

    def program(module: nn.Module) -> Any:
        memory = torch.arange(24.0).reshape(6, 4)
        return [module(memory[:2]), module(memory[3:5])]

    compare(Of(forward), program, warns="elements past the end of a view")
