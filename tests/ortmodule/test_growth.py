"""Memory and work of no lowering and no gradient rule grow faster than eager PyTorch's, but for named exceptions."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from autodiff import cases as rule_cases
from autodiff.growing import grown_rules
from ortmodule import aten_cases, sized_cases
from ortmodule.aten_case import Case
from ortmodule.growing import Growing, Grown, grown
from ortmodule.growth import Cost, Growth, ours

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]

SIZE = 64
"""Costs are counted at this size, twice and four times of it; where they grow fast, from eight times of it on."""

ABOVE = {
    "attention": "without native kernels, the scores of all pairs of queries and keys are values of the graph",
    "multilabel_margin_loss": "its table has a column for each label of the longest list; eager mode has a loop",
}
"""Beginnings of the names of cases whose costs grow faster than eager mode's, with the reason."""

ABOVE_OF_RULES = {
    "Resize": "with antialiasing, or sizes known at run time only, its gradient is a product with a matrix of weights",
}
"""The same for the cases of gradient rules."""


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs function bodies, and PyTorch on one thread: with several, its convolutions take memory for each."""
    monkeypatch.setenv("ONNXTRAIN_KERNELS", "off")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _parameters() -> list[Any]:
    found = []
    for kind, package in (("lowering", aten_cases), ("rule", rule_cases)):
        for module in pkgutil.iter_modules(package.__path__):
            cases = importlib.import_module(f"{package.__name__}.{module.name}").CASES
            for first in range(0, len(cases), 4):
                found.append(pytest.param(cases[first : first + 4], id=f"{kind}-{module.name}-{first // 4}"))
    for first in range(0, len(sized_cases.CASES), 4):
        found.append(pytest.param(sized_cases.CASES[first : first + 4], id=f"sized-{first // 4}"))
    # All of them take an hour and 18 GB. The first of 24, the second of the next 24, and so on.
    every = 1 if os.environ.get("ONNXTRAIN_GROWTH") else 24
    return [case for place, case in enumerate(found) if place % every == place // every % every]


def _candidates(case: Any) -> Iterator[Growing]:
    if isinstance(case, Grown):
        return iter([case])
    return grown(case) if isinstance(case, Case) else grown_rules(case)


@pytest.mark.sample(every=9)
@pytest.mark.parametrize("cases", _parameters())
@pytest.mark.filterwarnings("ignore")
def test_costs_grow_as_in_eager_mode(cases: Sequence[Any]) -> None:
    found = {}
    for case in cases:
        for candidate in _candidates(case):
            growths = candidate.finding(SIZE)
            if growths is not None and not candidate.name.startswith((*ABOVE, *ABOVE_OF_RULES)):
                found[candidate.name] = growths
    assert found == {}


@pytest.mark.parametrize("start", ABOVE)
def test_exceptions_grow_faster(start: str) -> None:
    cases = [case for case in sized_cases.CASES if case.name.startswith(start)]
    assert any(case.finding(SIZE) for case in cases), "delete it from ABOVE"


def test_exponents_of_known_costs() -> None:
    def costs(cost: Any) -> list[Cost]:
        return [Cost(cost(n), 7 * cost(n)) for n in (64, 128, 256)]

    assert Growth.of(costs(lambda n: 5 * n)) == pytest.approx(Growth(1.0, 1.0))
    assert Growth.of(costs(lambda n: 3 * n * n)).memory == pytest.approx(2.0)
    assert Growth.of(costs(lambda n: n * n + 500)).work == pytest.approx(2.0, abs=0.1)
    assert Growth.of(costs(lambda n: 1000)) == Growth(0.0, 0.0)


def test_a_table_of_all_pairs_is_found() -> None:
    """The measure sees what it is for: n² comparisons where eager mode has n numbers."""

    def pairs(x: torch.Tensor) -> torch.Tensor:
        return (x[:, None] > x).sum(1) * x

    def of(n: int) -> tuple[Any, list[torch.Tensor]]:
        return pairs, [torch.randn(n, requires_grad=True)]

    growth = Growth.of([ours(*of(n)) for n in (64, 128, 256)])
    assert growth.memory > 1.8
    assert growth.work > 1.8
    assert Grown("pairs", of).finding(SIZE) is None, "eager mode has the table, too"


@pytest.mark.parametrize("name", ["cummax", "cumprod", "logcumsumexp", "searchsorted", "adaptive_max_pool1d"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_memory_and_work_are_linear_but_for_a_logarithm(name: str, dynamic: bool) -> None:
    (case,) = (case for case in sized_cases.CASES if case.name == name)
    growth = Growth.of([ours(*case.of(n), dynamic=dynamic) for n in (256, 512, 1024)])
    assert growth.memory < 1.2
    assert growth.work < 1.25
