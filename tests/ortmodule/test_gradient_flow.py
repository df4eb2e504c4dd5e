"""Gradients stop, writes hide from autograd, and backward refuses as in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule
from ortmodule.eager import Of, compare, compare_steps

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


def trained(function: Callable[..., Any], in_onnxruntime: bool = True, **options: Any) -> None:
    """Compare two steps of a function of a weight [3, 4] and an input [batch, 4] with eager PyTorch."""
    torch.manual_seed(0)
    ours = compare_steps(weighted(function), (3, 4), (2, 4), used_later=True, **options)
    assert ours.report().runs_in_onnxruntime or not in_onnxruntime


def weighted(function: Callable[..., Any]) -> Of:
    weight = torch.tensor([[0.3, -0.7, 1.2, 0.1], [1.5, 0.4, -0.2, 2.0], [-1.0, 0.6, 0.9, -0.3]])
    layers = {"lstm": nn.LSTM(4, 4), "gru": nn.GRU(4, 4), "attention": nn.MultiheadAttention(4, 2)}
    return Of(function, weight=nn.Parameter(weight), layers=nn.ModuleDict(layers))


SEVERAL: dict[str, Callable[[Of, torch.Tensor], Any]] = {
    "lstm": lambda m, h: m.layers["lstm"](h[None])[0][0],
    "gru": lambda m, h: m.layers["gru"](h[None])[0][0],
    "attention": lambda m, h: m.layers["attention"](h[:, None], h[:, None], h[:, None])[0][:, 0],
    "max": lambda m, h: h.max(1).values[:, None],
    "min": lambda m, h: h.min(1)[0][:, None],
    "sort": lambda m, h: h.sort(1)[0],
    "topk": lambda m, h: h.topk(2, 1)[0].sum(1, keepdim=True),
    "median": lambda m, h: h.median(1)[0][:, None],
    "var_mean": lambda m, h: sum(torch.var_mean(h, 1))[:, None],
    "split": lambda m, h: h.split(2, 1)[0].sum(1, keepdim=True),
    "unbind": lambda m, h: h.unbind(1)[2][:, None],
    "chunk": lambda m, h: h.chunk(2, 1)[1].sum(1, keepdim=True),
    "view": lambda m, h: h[:, 1:2],
    "weight_view": lambda m, h: m.weight.t()[:, :1].t() * torch.ones_like(h),
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", SEVERAL)
def test_no_grad_stops_gradients(name: str) -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x * module.weight[0]
        with torch.no_grad():
            stopped = SEVERAL[name](module, h)
        return stopped * module.weight[1] + h

    trained(function)


AS_IT_IS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "positive": lambda h: +h,
    "contiguous": lambda h: h.contiguous(),
    "to": lambda h: h.to(torch.float32),
    "one_of_several": lambda h: torch.atleast_1d(h, h * 2)[0],
}


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("name", AS_IT_IS)
def test_what_is_returned_as_it_is_keeps_its_gradient_under_no_grad(name: str, written: bool) -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x * module.weight[0]
        with torch.no_grad():
            same = AS_IT_IS[name](h)
        result = same * module.weight[1]
        return result.mul_(2) if written else result

    trained(function)


@pytest.mark.parametrize(
    "read", [lambda h: h, lambda h: h[0], lambda h: h.chunk(2)[1]], ids=["whole", "row", "chunk"]
)
def test_padding_under_no_grad_stops_the_gradient(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Dynamo's fake tensors say that its result requires a gradient."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            padded = nn.functional.pad(module.weight, (1, 0))
            row = read(padded)
        return (row.sum() + padded.sin().sum()) * x * module.weight[1]

    trained(function)


def test_gradients_that_a_module_enables_under_no_grad() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        with torch.enable_grad():
            return h * module.weight[0]

    def program(module: nn.Module) -> Any:
        with torch.no_grad():
            result = module(torch.ones(2, 4))
        result.sum().backward()
        return module.weight.grad

    compare(weighted(function), program, ignore="ORTModule: graph 0 runs in PyTorch: .*enables gradients")


def test_result_of_no_grad_requires_no_gradient() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            padded = nn.functional.pad(module.weight, (1, 0))
        return padded * x[0, 0]

    assert not ORTModule(weighted(function))(torch.ones(2, 4)).requires_grad


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": lambda h: h.mul_(0.5),
    "round_": lambda h: h.round_(),
    "clamp_": lambda h: h.clamp_(-0.5, 0.5),
    "copy_": lambda h: h.copy_((h > 0).float()),
    "zero_": lambda h: h.zero_(),
    "set_row": lambda h: h.__setitem__(0, 0.25),
    "view": lambda h: h.t()[1].mul_(3),
    "masked": lambda h: h.masked_fill_(h > 0, 2.0),
    "detach": lambda h: h.detach().round_(),
    "detach_row": lambda h: h.detach()[0].round_(),
    "data": lambda h: h.data.mul_(2),
    "infinite": lambda h: h.copy_(h / h.abs()),
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("base", ["result", "input", "after_write"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_that_autograd_does_not_see(name: str, base: str) -> None:
    """The value before the write keeps its gradient: straight-through estimators are written so."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x if base == "input" else x + module.weight[0]
        if base == "after_write":
            h += module.weight[1]
        if name in ("detach", "detach_row", "data"):
            WRITES[name](h)
        else:
            with torch.no_grad():
                WRITES[name](h)
        return h * 3 + module.weight[1]

    trained(function)


@pytest.mark.parametrize("wrap", [ORTModule, lambda module: module], ids=["ours", "eager"])
def test_writes_through_data_do_not_invalidate_what_backward_keeps(wrap: Callable[..., Any]) -> None:
    """As a Runge-Kutta solver fills its table, views of which autograd has kept."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        x.data[0] = 2.0
        return x * module.weight[0]

    x = torch.ones(2, 4, requires_grad=True) * 1
    kept = x[1].sin()
    square = x * x
    (wrap(weighted(function))(x).sum() + kept.sum() + square.sum()).backward()
    assert x._version == 0
    assert x[0].tolist() == [2.0] * 4


KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "result": lambda h: h.exp(),
    "copysign": lambda h: h.copysign(h + h),
    "argument_of_another": lambda h: h + 1,
}


@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize("name", KEPT)
def test_what_backward_has_kept_is_written_through_data(name: str) -> None:
    """Eager PyTorch's backward reads what was written: such a graph is left to it."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = KEPT[name](x * module.weight[0])
        other = h * module.weight[1]
        h.data.mul_(0.5)
        return h + other

    trained(function, in_onnxruntime=False)


def test_what_backward_has_not_kept_is_written_through_data() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x + module.weight[0]
        h.data.mul_(0.5)
        return h * module.weight[1]

    trained(function)


MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros_like": torch.zeros_like,
    "new_empty": lambda h: h.new_empty(h.shape).fill_(1.0),
    "no_grad": lambda h: _without_gradient(h),
    "detached_copy": lambda h: h.detach().clone(),
}


def _without_gradient(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return h * 2


@pytest.mark.parametrize("name", MADE)
def test_what_has_a_gradient_is_written_to_what_has_none(name: str) -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x * module.weight[0]
        made = MADE[name](h)
        made[:1] = h[:1] * module.weight[1]
        made[:, 2:] += module.weight[2, 2:]
        return made * 3

    trained(function)


def test_infinities_pass_straight_through() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x + module.weight[0]
        h[0] = -torch.inf
        with torch.no_grad():
            h.clamp_(-3, 3)
        return h

    trained(function)


def test_detach_in_place_ends_the_gradient() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x * module.weight[0]
        early = h * 2
        h.detach_()
        return h * module.weight[1] + early

    trained(function)


ZERO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fill_": lambda h: h.clone().fill_(0.5),
    "zero_": lambda h: h.clone().zero_(),
    "copy_": lambda h: h.clone().copy_(torch.ones(4)),
    "floor": torch.floor,
    "masked_fill": lambda h: h.masked_fill(torch.ones_like(h, dtype=torch.bool), 1.0),
    "integers": lambda h: h.to(torch.int32).float(),
    "zeros_like": lambda h: torch.zeros_like(h) + 1,
}


@pytest.mark.parametrize("name", ZERO)
def test_gradients_are_zero_or_none_as_in_pytorch(name: str) -> None:
    trained(lambda module, x: ZERO[name](module.weight[0]) * x * 2)


def _factor_changed_after_use(module: Of, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factor = x.sin()
    product = factor * module.weight[0]
    factor[0] = 0.5
    return product


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: _changed_after_use(m, x), "modified by an inplace operation"),
        (lambda m, x: _factor_changed_after_use(m, x), "modified by an inplace operation"),
        (lambda m, x: (m.weight[0] // 0.3) * x, "floor_divide is not implemented"),
    ],
)
def test_backward_refuses_what_pytorch_refuses(function: Any, message: str) -> None:
    ours = ORTModule(weighted(function))
    with pytest.warns(UserWarning, match="runs in PyTorch"):
        result = ours(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=message):
        result.sum().backward()


def _changed_after_use(module: Of, x: torch.Tensor) -> torch.Tensor:
    h = torch.sigmoid(module.weight[0] * x)
    with torch.no_grad():
        h.copy_((h > 0.5).float())
    return h


def test_a_detached_tensor_with_a_gradient_of_its_own_is_left_to_pytorch() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x * module.weight[0]
        other = h.detach()
        other.mul_(module.weight[1])
        return h + other

    trained(function, in_onnxruntime=False, warns="detached tensor")


INDEXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross_entropy": lambda x, i: nn.functional.cross_entropy(x, i),
    "cross_entropy_none": lambda x, i: nn.functional.cross_entropy(x, i, reduction="none"),
    "nll_loss": lambda x, i: nn.functional.nll_loss(x, i),
    "multi_margin_loss": lambda x, i: nn.functional.multi_margin_loss(x, i),
    "gather": lambda x, i: x.gather(0, i[:, None]),
    "index_select": lambda x, i: x.index_select(1, i),
    "scatter": lambda x, i: x.scatter(1, i[:, None], 2.0),
    "scatter_add": lambda x, i: x.scatter_add(1, i[:, None], x[:, :1]),
    "index_add": lambda x, i: x.index_add(0, i, x),
    "index_copy": lambda x, i: x.index_copy(0, i, x),
    "embedding": lambda x, i: nn.functional.embedding(i, x),
    "one_hot": lambda x, i: nn.functional.one_hot(i, 3) * x,
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "index": lambda x, i: x[i],
    "take": lambda x, i: x.take(i),
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("index", [[0, 1, 2], [0, -1, 2], [0, 1, 9]], ids=["right", "negative", "large"])
@pytest.mark.parametrize("name", INDEXED)
def test_indices_out_of_range_raise_as_in_pytorch(name: str, index: list[int]) -> None:
    def program(module: nn.Module) -> Any:
        x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 6.0, 5.0], [9.0, 7.0, 8.0]]).requires_grad_()
        try:
            result = module(x, torch.tensor(index))
            result.square().sum().backward()
        except (RuntimeError, IndexError) as error:
            return type(error), str(error)
        return result.detach(), x.grad

    compare(Of(lambda _, x, i: INDEXED[name](x, i)), program)


def test_ignored_targets_are_no_classes() -> None:
    module = Of(lambda _, x, target: nn.functional.cross_entropy(x, target))
    ours = compare_steps(module, [torch.randn(4, 3), torch.tensor([0, -100, 2, -100])], loss=sum)
    assert ours.report().runs_in_onnxruntime


def test_distances_of_rows_to_themselves_have_no_gradient() -> None:
    """More than 25 rows: PyTorch computes them by one product."""
    x = torch.randint(-4, 5, (30, 3)).float()  # whose squares are exact
    compare_steps(Of(lambda _, x: torch.cdist(x, x)), x, loss=lambda out: out[0].square().sum().sqrt())


def test_the_angle_of_nothing_has_no_gradient() -> None:
    y, x = (torch.tensor([0.0, 0.0, 1.0]) for _ in range(2))
    compare_steps(Of(lambda _, y, x: torch.atan2(y, x)), [y, x], loss=lambda out: out[0].sum())


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return ct * 3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_no_grad_around_a_custom_function() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x * module.weight[0]
        seen = Scaled.apply(h)
        with torch.no_grad():
            stopped = h * module.weight[1]
            inside = Scaled.apply(stopped + h)
            view = h[:, :1]
        return h + seen * inside + view * stopped

    trained(function, in_onnxruntime=False)


def test_embeddings_with_a_largest_norm() -> None:
    """Rows are made shorter by a write inside of the function that reads them."""
    plain = Of(
        lambda m, indices: m.rows(indices).sum(1) * m.bags(indices),
        rows=nn.Embedding(7, 4, max_norm=1.0, padding_idx=2),
        bags=nn.EmbeddingBag(6, 4, max_norm=0.5, norm_type=1.0, mode="sum"),
    )
    ours = compare_steps(plain, *(torch.randint(0, 6, (3, 2)) for _ in range(2)))
    assert ours.report().runs_in_onnxruntime


def test_what_only_views_of_no_grad_are_in_requires_a_gradient_that_leads_nowhere() -> None:
    """As in eager PyTorch: such a view of what requires a gradient requires one."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            view = module.weight[:-1]
        turned = view.swapaxes(1, -2)
        return turned.clamp(turned - 1, turned + 1) * 2

    def program(module: nn.Module) -> Any:
        result = module(torch.zeros(1))
        assert result.requires_grad
        result.sum().backward()
        assert module.weight.grad is None
        return result

    assert compare(weighted(function), program).report().runs_in_onnxruntime


def test_hooks_are_not_called_where_all_gradients_lead_nowhere() -> None:
    """Eager PyTorch does not come to a parameter by way of its view under `no_grad`; hooks cannot work with None."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            view = module.weight[:-1]
        return view * view + x

    plain = weighted(function)
    for module in (ORTModule(copy.deepcopy(plain)), plain):
        weight = module.get_parameter("weight")
        weight.register_hook(lambda gradient: gradient * 2)
        for _ in range(2):
            result = module(torch.ones(4))
            assert result.requires_grad
            result.sum().backward()
        assert weight.grad is None
        assert weight.requires_grad


class ActNorm(nn.Module):
    """Normalises the first batch exactly: its parameters take their values from it by `.data`."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.keep = keep
        self.scale, self.shift = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> Any:
        if not self.initialized:
            with torch.no_grad():
                old = self.shift.detach()
                mean = x.mean(0)
                self.scale.data = -x.std(0).log()
                self.shift.data = -mean
                self.initialized.data = torch.tensor(True)
                if self.keep:  # it is now of another memory
                    self.shift.data.add_(old + 1)
        return x * self.scale.exp() + self.shift


@pytest.mark.parametrize("keep", [False, True])
def test_parameters_that_are_given_other_data_are_trained(keep: bool) -> None:
    warns = "memory of another" if keep else None
    ours = compare_steps(ActNorm(keep), (5, 3), (5, 3), differentiate_inputs=False, warns=warns)
    assert keep or ours.report().runs_in_onnxruntime


@pytest.mark.parametrize("of_x", [False, True])
def test_what_is_overwritten_behind_a_custom_function(of_x: bool) -> None:
    """A result of the graph before a custom function is overwritten in the one behind it."""

    def overwritten(_: Of, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = nn.functional.local_response_norm(y, 2)
        with torch.no_grad():
            other = nn.functional.selu(h)
            x.view(-1).add_(-1.5)
        seen = Scaled.apply(y.view(-1))
        h[:, ...] = other
        return seen, h, other[0, ..., 1:]

    start = torch.randn(3, 3, 4)

    def program(module: nn.Module) -> Any:
        x, y = start.clone().requires_grad_(of_x), start.clone().requires_grad_(not of_x)
        results = module(x, y)
        if not of_x:
            sum(result.sin().sum() for result in results).backward()
        return [*(result.detach() for result in results), x.detach(), y.grad]

    # Parts run in PyTorch, and Dynamo makes an object of a Function.
    compare(Of(overwritten), program, ignore="ORTModule|.*should not be instantiated")


def test_a_write_through_a_strided_view_ends_the_gradient_there() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = (x * module.weight[0]).sin()
        part = h.as_strided((1, 2), (1, 1), 1)
        part.diagonal().fill_(2)
        return torch.cat([part.sum(1), h.flatten()])

    trained(function, in_onnxruntime=False, ignore="ORTModule: ")
