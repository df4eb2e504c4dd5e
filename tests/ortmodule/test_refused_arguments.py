"""Arguments that eager PyTorch refuses: ORTModule raises the same error. Their valid neighbors run in ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onnxtrain.ortmodule import ORTModule

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

X = torch.linspace(-2, 2, 12).view(3, 4)
INTS = torch.tensor([1, 2])
BYTES = torch.ones(2, dtype=torch.uint8)
NAN, INF = math.nan, math.inf


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


def _ctc(log_probs: torch.Tensor, targets: Any, inputs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return F.ctc_loss(log_probs[:, None].log_softmax(-1), targets, inputs, lengths)


def _bag(weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(indices, weight, offsets)


DATA: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "bce, input": (
        F.binary_cross_entropy,
        (tensor(0.5, 1.5), tensor(0, 1.0)),
        (tensor(0.0, 1), tensor(0.0, 1)),
    ),
    "bce, NaN": (
        F.binary_cross_entropy,
        (tensor(0.5, NAN), tensor(0, 1.0)),
        (tensor(1.0, 0), tensor(0.0, 1)),
    ),
    "bce, target": (
        F.binary_cross_entropy,
        (tensor(0.5, 0.5), tensor(0, 1.5)),
        (tensor(0.5, 0.5), tensor(0, 1.0)),
    ),
    "bce, small target": (
        F.binary_cross_entropy,
        (tensor(0.5, 0.5), tensor(0, -1e-30)),
        (tensor(0.5, 0.5), tensor(0, 1e-30)),
    ),
    "bag, index": (_bag, (X, tensor(0, -1), tensor(0, 1)), (X, tensor(0, 2), tensor(0, 1))),
    "bag, large index": (_bag, (X, tensor(0, 3), tensor(0, 1)), (X, tensor(0, 2), tensor(0, 1))),
    "bag, first offset": (_bag, (X, tensor(0, 1), tensor(1, 1)), (X, tensor(0, 1), tensor(0, 0))),
    "bag, last offset": (_bag, (X, tensor(0, 1), tensor(0, 3)), (X, tensor(0, 1), tensor(0, 2))),
    "repeats": (
        lambda x, n: x.repeat_interleave(n, 0),
        (X, tensor(1, -1, 1)),
        (X, tensor(1, 0, 1)),
    ),
    "bincount": (torch.bincount, (tensor(1, -1),), (tensor(1, 0),)),
    "multinomial, negative": (lambda x: x.multinomial(1), (tensor(-1.0, 2),), (tensor(0.0, 2),)),
    "multinomial, NaN": (lambda x: x.multinomial(1), (tensor(NAN, 2),), (tensor(1.0, 2),)),
    "multinomial, infinite": (lambda x: x.multinomial(1), (tensor(1.0, INF),), (tensor(1.0, 3e38),)),
    "multinomial, zeros": (
        lambda x: x.multinomial(1),
        (torch.tensor([[1.0, 2.0], [0.0, 0.0]]),),
        (torch.tensor([[1.0, 2.0], [0.0, 1e-30]]),),
    ),
    "multinomial, replacement": (
        lambda x: x.multinomial(3, True),
        (torch.tensor([[1.0, 2.0], [1.0, -1.0]]),),
        (torch.tensor([[1.0, 2.0], [1.0, 0.0]]),),
    ),
    "ctc, long input": (
        _ctc,
        (X, torch.tensor([[1, 2]]), tensor(9), tensor(2)),
        (X, torch.tensor([[1, 2]]), tensor(3), tensor(2)),
    ),
    "ctc, long target": (
        _ctc,
        (X, torch.tensor([[1, 2]]), tensor(3), tensor(3)),
        (X, torch.tensor([[1, 2]]), tensor(3), tensor(0)),
    ),
    "ctc, joined targets": (
        _ctc,
        (X, tensor(1, 2), tensor(3), tensor(1)),
        (X, tensor(1, 2), tensor(3), tensor(2)),
    ),
    "integer by zero": (lambda a, b: a // b, (INTS, tensor(1, 0)), (INTS, tensor(1, -1))),
    "remainder by zero": (lambda a, b: a % b, (INTS, tensor(1, 0)), (INTS, tensor(1, -1))),
}
"""Per check of the data: a function, arguments that it refuses, and arguments of the same shapes that it takes."""

ARGUMENTS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "sort, axis": (lambda x: x.sort(dim=4)[0], X),
    "argsort, axis": (lambda x: x.argsort(dim=-3), X),
    "mask - mask": (lambda x: (x > 0) - (x < 0), X),
    "1 - mask": (lambda x: 1 - (x > 0), X),
    "mask - 1.5": (lambda x: (x > 0) - 1.5, X),
    "celu, alpha 0": (lambda x: F.celu(x, 0.0), X),
    "smooth_l1_loss, negative beta": (lambda x: F.smooth_l1_loss(x, x + 1, beta=-1), X),
    "huber_loss, delta 0": (lambda x: F.huber_loss(x, x + 1, delta=0.0), X),
    "clamp, beyond float32": (lambda x: x.clamp(max=3.4e39), X),
    "clamp, below float32": (lambda x: x.clamp(min=-1e40), X),
    "full_like, beyond float32": (lambda x: torch.full_like(x, 1e40), X),
    "masked_fill, beyond float32": (lambda x: x.masked_fill(x > 0, 1e40), X),
    "fill_, beyond uint8": (lambda x: x.fill_(300), BYTES),
    "variance of integers": (lambda x: x.var(), INTS),
    "deviation of integers": (lambda x: x.std(), INTS),
    "elu, alpha beyond float32": (lambda x: F.elu(x, 1e40), X),
    "leaky_relu, slope beyond float32": (lambda x: F.leaky_relu(x, 1e40), X),
    "softplus, beta beyond float32": (lambda x: F.softplus(x, 1e40), X),
    "abs of booleans": (lambda x: (x > 0).abs(), X),
    "relu of booleans": (lambda x: (x > 0).relu(), X),
    "floor of booleans": (lambda x: (x > 0).floor(), X),
    "round of booleans": (lambda x: (x > 0).round(), X),
    "median of booleans": (lambda x: (x > 0).median(), X),
    "kthvalue of booleans": (lambda x: (x > 0).kthvalue(1)[0], X),
    "lerp of integers": (lambda x: torch.lerp(x, x, 0.5), INTS),
    "repeat_interleave, output_size": (
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 3]), 0, output_size=9),
        X,
    ),
    "integers plus 0.5 times integers": (lambda x: torch.add(x, x, alpha=0.5), INTS),
    "integers minus 1.0 times integers": (lambda x: torch.sub(x, x, alpha=1.0), INTS),
}


class Net(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: torch.Tensor) -> Any:
        return self.function(*arguments)


def _clones(arguments: tuple[Any, ...]) -> list[Any]:
    return [argument.clone() for argument in arguments]


def _error(function: Callable[..., Any], *arguments: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*_clones(arguments))
    return caught.value


@pytest.mark.sample(every=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DATA)
def test_data_that_eager_refuses(name: str) -> None:
    function, refused, taken = DATA[name]
    model = ORTModule(Net(function))
    torch.manual_seed(0)
    expected = function(*_clones(taken))
    torch.manual_seed(0)
    torch.testing.assert_close(model(*_clones(taken)), expected)
    assert model.report().runs_in_onnxruntime
    error = _error(function, *refused)
    found = _error(model, *refused)
    assert type(found) is type(error)
    assert str(found).split("\n")[0] == str(error).split("\n")[0]
    torch.manual_seed(0)
    torch.testing.assert_close(model(*_clones(taken)), expected)


@pytest.mark.sample(every=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_eager_refuses(name: str) -> None:
    function, value = ARGUMENTS[name]
    error, found = _error(function, value), _error(ORTModule(Net(function)), value)
    assert type(found) is type(error)
    assert str(error).split("\n")[0] in str(found)
