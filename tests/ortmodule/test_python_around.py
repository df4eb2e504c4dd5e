"""Python around tensors: what it raises, catches, compares and keeps is that of eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch

from onnxtrain.ortmodule import ORTModule
from ortmodule import python_around
from ortmodule.python_around import Layer

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

CASES = [
    case
    for case in vars(python_around).values()
    if isinstance(case, type) and issubclass(case, Layer) and case is not Layer
]


def batches() -> list[torch.Tensor]:
    """Returns inputs of which 2, 0, 4, 1 and 6 rows begin with a positive number, in three sizes."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for positive, size in ((2, 4), (0, 4), (4, 4), (1, 2), (6, 6)):
        x = torch.rand(size, 3, generator=generator) + 0.2
        x[positive:] *= -1
        results.append(x)
    return results


def run(
    module: torch.nn.Module, x: torch.Tensor
) -> tuple[list[torch.Tensor] | tuple[type, str, tuple[object, ...]], int]:
    """Returns the result and the gradients, or the error; and the module's count of calls."""
    module.zero_grad()
    try:
        result = module(x)
    except (ArithmeticError, ValueError, IndexError, RuntimeError) as error:
        return (type(error), str(error), error.args), module.calls
    if result.requires_grad:
        result.sum().backward()
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [result.detach(), *gradients], module.calls


@pytest.mark.filterwarnings("ignore:ORTModule")  # of parts that PyTorch computes
@pytest.mark.sample(every=4)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_python_is_that_of_eager_pytorch(case: type[Layer], training: bool) -> None:
    torch.manual_seed(0)
    plain = case()
    ours = ORTModule(copy.deepcopy(plain))
    for x in batches():
        with torch.set_grad_enabled(training):
            expected, found = run(plain, x), run(ours, x)
        assert found[1] == expected[1]
        if isinstance(expected[0], tuple):
            assert found[0] == expected[0]
        else:
            torch.testing.assert_close(found[0], expected[0], equal_nan=True)


@pytest.mark.parametrize(
    "case",
    [python_around.Quotient, python_around.MeanOfSome, python_around.SizeAmong, python_around.ReportedLookup],
)
def test_checks_leave_the_graph_in_onnxruntime(case: type[Layer]) -> None:
    model = ORTModule(case())
    model(batches()[0]).sum().backward()
    assert model.report().runs_in_onnxruntime
    assert len(list(model.report())) == 1
