"""Branches, asserts and checks in Python about numbers that were read from tensors: as in eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch

from onnxtrain.ortmodule import ORTModule
from ortmodule import deciding
from ortmodule.deciding import Counting

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

CASES = [case for case in vars(deciding).values() if isinstance(case, type) and issubclass(case, Counting)]
TOKENS = ([0, 1, 4], [0, 0, 2], [0, 0, 0], [2, 2, 2])


def run(
    module: torch.nn.Module, x: torch.Tensor, tokens: torch.Tensor
) -> list[torch.Tensor] | tuple[type, str]:
    """Returns the result and the gradients, or the error's type and text."""
    module.zero_grad()
    try:
        result = module(x, tokens)
    except (AssertionError, RuntimeError, ValueError) as error:
        return type(error), str(error)
    if result.requires_grad:
        result.backward()
    return [result.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.mark.sample(every=4)
@pytest.mark.filterwarnings("ignore:ORTModule")  # of parts that PyTorch computes
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case is not Counting], ids=lambda case: case.__name__
)
def test_decision_is_that_of_eager_pytorch(case: type[Counting], first: int, training: bool) -> None:
    torch.manual_seed(0)
    plain = case()
    ours = ORTModule(copy.deepcopy(plain))
    errors = 0
    # What was captured for one must not decide for the next.
    for tokens in map(torch.tensor, TOKENS[first:] + TOKENS[:first]):
        x = torch.randn(2, 3)
        with torch.set_grad_enabled(training):
            expected, found = run(plain, x, tokens), run(ours, x, tokens)
        if isinstance(expected, tuple):
            assert found == expected
            errors += 1
        else:
            torch.testing.assert_close(found, expected)
    assert errors < len(TOKENS)
    assert (errors > 0) == case.__name__.startswith(("Assert", "Check"))
