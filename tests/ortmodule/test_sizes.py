"""Sizes that change from call to call, also where ONNX wants constants: all in ONNX Runtime, as eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as fn
from torch import nn

from onnxtrain.ortmodule import ORTModule
from ortmodule.eager import Of, compare, pair

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Lets PyTorch sum on two threads on every machine: the error of its sums, the tolerance here, depends on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_same(plain: nn.Module, *shapes: tuple[int, ...]) -> ORTModule:
    """Compares with eager PyTorch in float64: as close as ten times eager float32 is, and 1e-6 of the largest."""
    ours, plain = pair(plain)
    for shape in shapes:
        x, results = torch.randn(shape), []
        for model, dtype in ((copy.deepcopy(plain).double(), torch.float64), (plain, None), (ours, None)):
            leaf = x.to(dtype or torch.float32).clone().requires_grad_()
            out = model(leaf)
            model.zero_grad()
            (out * torch.arange(out.numel()).reshape(out.shape).cos()).sum().backward()
            results.append([out.detach(), leaf.grad, *(p.grad for p in model.parameters())])
        for true, eager, got in zip(*results, strict=True):
            assert got.shape == true.shape
            errors = [(value.double() - true).abs().max().item() for value in (eager, got)]
            assert errors[1] <= 10 * errors[0] + 1e-6 * (1 + true.abs().max().item()), (shape, errors)
    assert ours.report().runs_in_onnxruntime
    return ours


def _by_size(x: torch.Tensor) -> torch.Tensor:
    return fn.adaptive_avg_pool2d(x, (x.shape[2] // 2 + 1, x.shape[0]))


def _ramp(x: torch.Tensor) -> torch.Tensor:
    return x * torch.linspace(0, 1, x.shape[-1]) + torch.tril_indices(x.shape[-1], 2).sum()


def _of_all(x: torch.Tensor) -> torch.Tensor:
    return fn.avg_pool2d(x, (x.shape[2], x.shape[3]))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (nn.AdaptiveAvgPool2d(7), [(2, 3, 10, 10), (2, 3, 17, 17), (1, 3, 14, 21)]),
        (nn.AdaptiveAvgPool2d(2), [(2, 3, 4, 4), (2, 3, 1, 7), (1, 3, 6, 5)]),
        (nn.AdaptiveAvgPool2d((None, 3)), [(2, 3, 4, 4), (2, 3, 5, 7)]),
        (_by_size, [(2, 3, 5, 5), (3, 3, 6, 4), (4, 3, 5, 8)]),
        (nn.AdaptiveMaxPool2d(2), [(2, 3, 4, 4), (2, 3, 8, 4), (1, 3, 6, 2)]),
        (nn.AvgPool2d(1280, ceil_mode=True), [(2, 3, 2, 2), (2, 3, 4, 5), (1, 3, 5, 3)]),
        (nn.AvgPool2d(40, 3, 2, ceil_mode=True), [(2, 3, 34, 41), (2, 3, 44, 35)]),
        (_ramp, [(2, 3, 4, 4), (2, 3, 4, 5), (2, 3, 4, 7)]),
        (_of_all, [(2, 3, 4, 4), (2, 3, 4, 5), (2, 3, 3, 7)]),
    ],
    ids=["seven", "two", "one_axis", "by_size", "max", "far_larger", "larger", "linspace", "kernel"],
)
def test_second_sizes_match_eager_pytorch(
    function: Callable[[torch.Tensor], torch.Tensor], shapes: list[tuple[int, ...]]
) -> None:
    assert_same(Of(lambda m, x: function(m.layer(x)), layer=nn.Conv2d(3, 4, 1)), *shapes)


@pytest.mark.parametrize("size", [(2, 3, 3), (1, 2, 4), 2])
def test_adaptive_pooling_of_three_axes(size: tuple[int, ...] | int) -> None:
    net = nn.Sequential(nn.Conv3d(1, 2, 1), nn.AdaptiveAvgPool3d(size))
    assert_same(net, (2, 1, 5, 4, 6), (2, 1, 7, 5, 4), (1, 1, 4, 4, 4))


def test_one_graph_for_all_sizes_of_an_image() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(196, 5)
    )
    ours = assert_same(net, *((2, 3, size, size) for size in (12, 17, 21, 30, 9)))
    assert len(ours.report()) == 2


def test_sizes_of_random_numbers_are_computed_from_the_arguments() -> None:
    """Many expressions of sizes, in the shapes of dropout."""

    def drawing(_: Of, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        rows, columns = x.shape
        shapes = [
            (rows * columns, y.shape[0] - 1),
            ((rows + 1) // 2, columns % 3 + 1),
            (max(rows, 2) + y.shape[0], 2),
            ((rows + columns - 1) // y.shape[0] * 2 + 1,),
        ]
        return [fn.dropout(torch.ones(shape) * x.sum(), 0.5) for shape in shapes]

    sizes = (4, 6, 3), (5, 7, 4), (9, 8, 5), (6, 11, 7)
    batches = [(torch.randn(rows, columns), torch.randn(length)) for rows, columns, length in sizes]
    ours = compare(Of(drawing), lambda module: [module(x, y) for x, y in batches])
    assert ours.report().runs_in_onnxruntime
