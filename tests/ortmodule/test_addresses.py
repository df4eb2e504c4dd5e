"""What ONNX Runtime has been told of memory in earlier calls is never taken for what lies there now."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from onnxtrain.ortmodule import ORTModule  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


def _agrees(model: torch.nn.Module, eager: torch.nn.Module, x: torch.Tensor) -> None:
    for module in (model, eager):
        module.zero_grad()
        module(x).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(model(x), eager(x))


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
        _agrees(model, eager, x)
        for module in (model, eager):
            for parameter in module.parameters():
                change(parameter)
    _agrees(model, eager, x)


def test_a_transposed_input_lies_where_the_input_lies() -> None:
    model, eager = _pair(torch.nn.Linear(4, 4), torch.nn.Tanh())
    x = torch.randn(4, 4)
    for _ in range(2):
        _agrees(model, eager, x)
        _agrees(model, eager, x.t())
        _agrees(model, eager, x.view(2, 2, 4))


def test_a_view_of_another_dtype_lies_where_the_input_lies() -> None:
    model, eager = _pair(torch.nn.Embedding(256, 3))
    x = torch.tensor([[1, 2, 3, 4]])
    for _ in range(2):
        _agrees(model, eager, x)
        _agrees(model, eager, x.view(torch.int32)[:, ::2])
        _agrees(model, eager, x.view(torch.int32)[:, ::2].contiguous())


def test_more_batches_than_addresses_that_are_remembered() -> None:
    model, eager = _pair(torch.nn.Linear(4, 2))
    for x in [torch.randn(5, 4) for _ in range(40)]:
        _agrees(model, eager, x)


def test_a_saved_tensor_that_a_hook_has_changed_is_not_taken_for_what_was_saved() -> None:
    model, eager = _pair(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    x = torch.randn(4, 4)
    _agrees(model, eager, x)
    expected = torch.autograd.grad(eager(x).sum(), list(eager.parameters()))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor[:1]):
        y = model(x)
    with pytest.warns(UserWarning, match="gradient runs in PyTorch.*Got invalid dimensions"):
        found = torch.autograd.grad(y.sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected)


def test_transposed_and_expanded_cotangents() -> None:
    model, eager = _pair(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    x, cotangent = torch.randn(4, 4), torch.randn(4, 4)
    for given in (cotangent, cotangent.t(), cotangent[:1].expand(4, 4), cotangent, cotangent.t()):
        found = [
            torch.autograd.grad(module(x), list(module.parameters()), given) for module in (model, eager)
        ]
        torch.testing.assert_close(*found)


class _Passing(torch.nn.Module):
    """Returns random numbers as they were drawn, which are an input of the ONNX graph."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, torch.rand(3)


def test_an_input_that_is_a_result_stays_in_memory() -> None:
    model, eager = ORTModule(_Passing()), _Passing()
    found = []
    for module in (model, eager):
        torch.manual_seed(0)
        drawn = []
        for _ in range(8):
            drawn.append(module(torch.randn(4))[1])
            torch.rand(3)  # takes the memory of what is gone
        found.append(torch.stack(drawn))
    torch.testing.assert_close(*found)
