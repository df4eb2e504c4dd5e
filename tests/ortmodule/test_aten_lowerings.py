"""Every lowering: outputs and gradients in ONNX Runtime against eager PyTorch in float64, static and dynamic shapes."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

from onnxtrain.ortmodule._torch import bounds_pass_gradients, isolates_recompiles
from ortmodule import aten_cases
from ortmodule.aten_case import Case
from ortmodule.side_by_side import batches, differences

CASES: dict[str, list[Case]] = {
    module.name: importlib.import_module(f"ortmodule.aten_cases.{module.name}").CASES
    for module in pkgutil.iter_modules(aten_cases.__path__)
}
SIZES = {False: 32, True: 8}
"""Number of cases compiled as one function; many symbols make PyTorch's algebra of them slow."""


def _passed_over(case: Case, dynamic: bool) -> bool:
    # PyTorch 2.15 passes gradients where a bound is no number; docs/ortmodule.md says so.
    if case.name == "clamp_nan_bounds" and not bounds_pass_gradients:
        return True
    # Dynamo 2.12 fails at it: it runs in PyTorch.
    return dynamic and not isolates_recompiles and case.name == "binary_cross_entropy_weight"


def _parameters() -> list[Any]:
    found = []
    for module, cases in CASES.items():
        for dynamic, size in SIZES.items():
            chosen = [c for c in cases if (c.dynamic or not dynamic) and not _passed_over(c, dynamic)]
            for count, batch in enumerate(batches(chosen, size)):
                kind = "dynamic" if dynamic else "static"
                found.append(pytest.param(batch, dynamic, id=f"{module}-{count}-{kind}"))
    return found


@pytest.mark.torch
@pytest.mark.parametrize(("cases", "dynamic"), _parameters())
def test_lowerings_match_eager(cases: list[Case], dynamic: bool) -> None:
    try:
        found = differences(cases, dynamic=dynamic)
    except Exception as error:
        found = dict(filter(None, (_failure(case, dynamic) for case in cases)))
        if not found:
            raise AssertionError(f"none of {[case.name for case in cases]} fails alone") from error
    # Without the traceback through Dynamo, so that the names and reasons are what the failure ends with.
    if found:
        pytest.fail("\n".join(f"{name}: {reason}" for name, reason in found.items()), pytrace=False)


def _failure(case: Case, dynamic: bool) -> tuple[str, str] | None:
    """The name of a case, and the error with which it ends or the difference that it shows; None where it passes."""
    try:
        return next(iter(differences([case], dynamic=dynamic).items()), None)
    except Exception as error:
        # Dynamo wraps the error of a back end.
        reason = getattr(error, "inner_exception", error)
        return case.name, f"{type(reason).__name__}: {reason}"


def test_case_names_are_unique() -> None:
    names = [case.name for cases in CASES.values() for case in cases]
    assert len(set(names)) == len(names)
