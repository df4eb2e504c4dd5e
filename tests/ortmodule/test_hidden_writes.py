"""Writes that autograd does not see, or that move a tensor's axes: values, gradients and errors of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as fn
from torch import nn

from onnxtrain.ortmodule import ORTModule
from ortmodule.eager import Of, compare, compare_steps

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Doubled(torch.autograd.Function):
    """Ends the graph before it and after it."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 2 + b

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cotangents[0] * 2, cotangents[0]


def of(function: Callable[..., Any]) -> Of:
    return Of(
        function, weight=nn.Parameter(torch.randn(4, 4)), average=torch.zeros(4, 4), norm=nn.BatchNorm1d(4)
    )


def assert_as_in_eager_pytorch(function: Callable[..., Any]) -> ORTModule:
    """Compare two steps with eager PyTorch; return the ORTModule."""
    torch.manual_seed(0)
    return compare_steps(
        of(function), (4, 4), (4, 4), loss=lambda out: sum(o.sin().sum() for o in out), ignore="ORTModule: "
    )


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add_": lambda to, of: to.mul_(0.9).add_(of),
    "copy_": lambda to, of: to.copy_(of),
    "lerp_": lambda to, of: to.lerp_(of, 0.1),
    "slice": lambda to, of: to[1:].__setitem__(slice(None), of[1:]),
    "row": lambda to, of: to[0].copy_(of[0]),
    "foreach": lambda to, of: torch._foreach_add_([to], [of]),
    "out": lambda to, of: torch.add(of, 1, out=to),
    "data": lambda to, of: to.data.add_(of),
    "index_add_": lambda to, of: to.index_add_(0, torch.tensor([0, 2]), of[:2]),
    "masked_scatter_": lambda to, of: to.masked_scatter_(torch.eye(4, dtype=torch.bool), of),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_moving_average_that_is_read_passes_no_gradient(name: str) -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            WRITES[name](module.average, module.weight)
        return x * module.average + module.weight

    ours = assert_as_in_eager_pytorch(function)
    assert ours.report().runs_in_onnxruntime or name == "foreach"


@pytest.mark.parametrize("name", ["add_", "copy_", "row"])
def test_what_is_written_under_no_grad_to_a_new_tensor_passes_no_gradient(name: str) -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            new = torch.ones(4, 4)
            WRITES[name](new, x)
        return new * module.weight

    assert assert_as_in_eager_pytorch(function).report().runs_in_onnxruntime


def test_a_view_of_a_parameter_may_be_written_to_after_a_graph_break() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        row = module.weight.unsqueeze(0)
        torch._dynamo.graph_break()
        with torch.no_grad():
            row.mul_(0.5)
        return x * row[0]

    assert_as_in_eager_pytorch(function)


def test_a_write_through_data_leaves_the_gradient_of_what_it_writes_to_alone() -> None:
    """Backward must not go to the gather, whose arguments have changed, as nothing that has a gradient came from it."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        square = module.weight @ module.weight
        picked = module.weight[2:].gather(0, module.weight[2:].argsort(0))
        with torch.no_grad():
            module.weight.clamp_(-1, 1)
        Doubled.apply(square, square)
        picked.data.mul_(0.5)
        return module.norm(x)

    assert_as_in_eager_pytorch(function)


@pytest.mark.parametrize("square", [False, True], ids=["copy_", "square_"])
def test_backward_reads_what_was_written_after_the_tensor_was_read_through_data(square: bool) -> None:
    """`h.data` has a version counter of its own: PyTorch does not see that `h` has changed since the product."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        h = x * module.weight
        product = h.data * x
        if square:
            h.square_()
        else:
            with torch.no_grad():
                h.copy_(x + 1)
        return product + h

    assert_as_in_eager_pytorch(function)


@pytest.mark.parametrize(
    "turn",
    [
        lambda view: view.transpose_(0, 1),
        lambda view: view.t_(),
        lambda view: view.unsqueeze_(0),
    ],
    ids=["transpose_", "t_", "unsqueeze_"],
)
def test_axes_that_move_in_place(turn: Callable[[torch.Tensor], Any]) -> None:
    """Of a view that goes to another graph together with what it is a view of, and of that itself."""

    def of_view(module: Of, x: torch.Tensor) -> Any:
        value = x * module.weight
        view = value.view(4, 4)
        with torch.no_grad():
            turn(view)
        return Doubled.apply(module.weight, view), value.min()

    def of_base(module: Of, x: torch.Tensor) -> Any:
        value = x * module.weight
        first, second = value.view(4, 4)[:2], value.view(4, 4)[2:]
        with torch.no_grad():
            turn(value)
        return first, second

    assert_as_in_eager_pytorch(of_view)
    assert_as_in_eager_pytorch(of_base)


def test_one_group_of_shuffled_channels_is_a_copy() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        value = (x * module.weight).detach().view(1, 4, 2, 2)
        shuffled = fn.channel_shuffle(value, 1)
        value.mul_(-1.5)
        return shuffled

    assert_as_in_eager_pytorch(function)


def test_the_memory_of_a_view_beside_what_runs_in_onnxruntime() -> None:
    """`as_strided` counts from the beginning of the memory of what it is called on, which is not that of the view."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        wide = (x @ module.weight).repeat_interleave(2, 0)
        right = wide.tensor_split(2, 1)[1]
        return right.as_strided((3, 2), (4, 1)) + (x.exp() @ module.weight).sum()

    report = assert_as_in_eager_pytorch(function).report()
    assert {op.op for graph in report for op in graph.in_pytorch} >= {"aten.as_strided.default"}


def test_a_strided_view_made_under_no_grad() -> None:
    """Values computed from the view require a gradient in eager PyTorch, and pass none on."""

    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            part = x.narrow(1, 0, 3).as_strided((2,), (1,))
        return part.nansum(0) + 0 * (module.average.exp() @ module.average).sum()

    assert_as_in_eager_pytorch(function)


def test_a_size_from_the_data_whose_axis_moves_in_place() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            largest = (x * 2).max(1).values.unsqueeze(0)
            picked = largest[:, torch.tensor([True, False] * 4)[:4]]
            picked.transpose_(0, 1)
        return x * module.weight

    assert_as_in_eager_pytorch(function)


def test_an_error_that_the_module_catches_does_not_run_anything_twice() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        normal = module.norm(x)
        module.average += 1
        torch._dynamo.graph_break()
        try:
            return normal @ torch.ones(17, 3)
        except RuntimeError:
            return normal * module.weight

    ours = assert_as_in_eager_pytorch(function)
    assert ours.norm.num_batches_tracked == 2


def test_gradients_of_gradients_beside_sizes_from_the_data() -> None:
    def function(module: Of, x: torch.Tensor) -> torch.Tensor:
        module.average.masked_select(module.average > 0)
        return module.norm(x @ module.weight)

    x = torch.randn(4, 4)

    def program(module: nn.Module) -> list[bool]:
        module(x).sum().backward(create_graph=True)
        return [p.grad.requires_grad for p in module.parameters() if p.grad is not None]

    compare(of(function), program, ignore="ORTModule: |Using backward")


@pytest.mark.parametrize(
    ("part", "offset"),
    [(lambda whole: whole[::2], 1), (torch.t, 1), (lambda whole: whole[1:], 3)],
    ids=["rows", "transposed", "rest"],
)
@pytest.mark.parametrize("differentiable", [False, True])
def test_a_write_by_addresses_in_the_memory_of_an_argument(
    part: Any, offset: int, differentiable: bool
) -> None:
    """The argument is not contiguous, or not the beginning of its memory: addresses are those of the memory."""
    start = torch.randn(4, 2)

    def forward(module: Of, x: torch.Tensor) -> Any:
        row = x.as_strided((1, 2), (1, 1), offset)
        row[..., 0] *= 3
        return row * 2, x.sin()

    def program(module: nn.Module) -> Any:
        leaf = start.clone().requires_grad_(differentiable)
        whole = leaf * 1
        results = module(part(whole))
        if differentiable:
            sum(result.square().sum() for result in results).backward()
        return [*(result.detach() for result in results), part(whole).detach(), leaf.grad]

    compare(Of(forward), program, ignore="ORTModule: ")


VIEWS_OF_HIDDEN_TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "repeat_interleave": lambda x: x.repeat_interleave(2, -1),
    "inner": lambda x: x.inner(x),
    "tensordot": lambda x: torch.tensordot(x, x, 1),
    "flatten": lambda x: x[..., None].expand(4, 4, 2).clone().flatten(1),
}
"""Functions whose result is a view of a tensor that they don't return, so that any write changes its `grad_fn`."""


@pytest.mark.parametrize("write", [lambda y: y.detach().add_(1), lambda y: y.view(-1).data.mul_(2)])
@pytest.mark.parametrize("name", VIEWS_OF_HIDDEN_TENSORS)
def test_hidden_writes_to_views_of_hidden_tensors(name: str, write: Callable[[torch.Tensor], object]) -> None:
    def function(module: Of, x: torch.Tensor) -> list[torch.Tensor]:
        y = VIEWS_OF_HIDDEN_TENSORS[name](x * module.weight)
        write(y)
        return [y[:, 1:] * 1]

    assert_as_in_eager_pytorch(function)


@pytest.mark.parametrize(
    "write", [lambda y: y.data.mul_(2), lambda y: y.detach().mul_(2), lambda y: y.data[0].add_(1)]
)
@pytest.mark.parametrize("part", [lambda x: x[..., None], lambda x: x[0], lambda x: x.t()])
def test_hidden_writes_to_a_view_of_another_input(
    part: Callable[[torch.Tensor], torch.Tensor], write: Callable[[torch.Tensor], object]
) -> None:
    """After the graph break, the next graph has both as inputs."""

    def forward(module: Of, x: torch.Tensor) -> Any:
        y = part(x)
        torch._dynamo.graph_break()
        write(y)
        return x * 2, y + 1

    def program(module: nn.Module) -> Any:
        x = torch.linspace(0, 1, 9).reshape(3, 3)
        return *module(x), x

    compare(Of(forward), program, ignore="ORTModule: ")


ASSIGNMENTS: dict[str, Callable[[Of, torch.Tensor], torch.Tensor]] = {
    "part of a buffer": lambda module, x: (setattr(module.part, "data", module.part + 1), module.part * x)[1],
    "buffer": lambda module, x: (setattr(module.whole, "data", module.whole * 2), module.whole.sum() * x)[1],
    "parameter": lambda module, x: (setattr(module.weight, "data", module.weight * 2), module.weight * x)[1],
}
"""Functions that assign to `.data` of a tensor that shares its memory, with another one or with a `state_dict`."""


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_assigning_data_leaves_the_old_memory_as_it_is(name: str) -> None:
    whole = torch.ones(2, 3)

    def program(module: nn.Module) -> Any:
        held = dict(module.state_dict())
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(2)).square().sum().backward()
            optimizer.step()
        return [*held.values(), *module.state_dict().values(), module.weight.grad]

    function = lambda module, x: ASSIGNMENTS[name](module, x) * module.weight
    compare(Of(function, weight=nn.Parameter(torch.ones(2)), whole=whole, part=whole.view(-1)[:1]), program)
