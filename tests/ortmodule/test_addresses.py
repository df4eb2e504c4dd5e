"""Addresses that earlier calls gave to ONNX Runtime are never read for tensors that have moved since."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from onnxtrain.ortmodule import ORTModule  # noqa: E402
from ortmodule.eager import Of, assert_same_step, compare  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


def _pair(*layers: torch.nn.Module) -> tuple[torch.nn.Module, torch.nn.Module]:
    eager = torch.nn.Sequential(*layers)
    return ORTModule(copy.deepcopy(eager)), eager


def _other_memory(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data.clone().mul_(0.9)


def _swapped_back(parameter: torch.nn.Parameter) -> None:
    first = parameter.data
    parameter.data = torch.full_like(first, 0.5)
    first.fill_(0.25)
    parameter.data = first


@pytest.mark.parametrize("change", [_other_memory, _swapped_back])
def test_parameters_may_move(change: Callable[[torch.nn.Parameter], None]) -> None:
    model, eager = _pair(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    x = torch.randn(3, 4)
    for _ in range(3):
        assert_same_step(model, eager, x)
        for module in (model, eager):
            for parameter in module.parameters():
                change(parameter)
    assert_same_step(model, eager, x)


def test_a_transposed_input_lies_where_the_input_lies() -> None:
    model, eager = _pair(torch.nn.Linear(4, 4), torch.nn.Tanh())
    x = torch.randn(4, 4)
    for _ in range(2):
        assert_same_step(model, eager, x)
        assert_same_step(model, eager, x.t())
        assert_same_step(model, eager, x.view(2, 2, 4))


def test_a_view_of_another_dtype_lies_where_the_input_lies() -> None:
    model, eager = _pair(torch.nn.Embedding(256, 3))
    x = torch.tensor([[1, 2, 3, 4]])
    for _ in range(2):
        assert_same_step(model, eager, x)
        assert_same_step(model, eager, x.view(torch.int32)[:, ::2])
        assert_same_step(model, eager, x.view(torch.int32)[:, ::2].contiguous())


def test_more_batches_than_addresses_that_are_remembered() -> None:
    model, eager = _pair(torch.nn.Linear(4, 2))
    for x in [torch.randn(5, 4) for _ in range(40)]:
        assert_same_step(model, eager, x)


def test_a_saved_tensor_that_a_hook_has_changed_is_not_taken_for_what_was_saved() -> None:
    model, eager = _pair(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    x = torch.randn(4, 4)
    assert_same_step(model, eager, x)
    expected = torch.autograd.grad(eager(x).sum(), list(eager.parameters()))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor[:1]):
        y = model(x)
    with pytest.warns(UserWarning, match="gradient runs in PyTorch.*Got invalid dimensions"):
        found = torch.autograd.grad(y.sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected)


def test_transposed_and_expanded_cotangents() -> None:
    x, cotangent = torch.randn(4, 4), torch.randn(4, 4)
    given = (cotangent, cotangent.t(), cotangent[:1].expand(4, 4), cotangent, cotangent.t())

    def program(module: torch.nn.Module) -> list[Any]:
        return [torch.autograd.grad(module(x), list(module.parameters()), one) for one in given]

    compare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)), program)


def test_an_input_that_is_a_result_stays_in_memory() -> None:
    """Random numbers are returned as they were drawn, which are an input of the ONNX graph."""

    def program(module: torch.nn.Module) -> list[torch.Tensor]:
        drawn = []
        for _ in range(8):
            drawn.append(module(torch.randn(4))[1])
            torch.rand(3)  # takes the memory of what is gone
        return drawn

    compare(Of(lambda _, x: (x + 1, torch.rand(3))), program)
