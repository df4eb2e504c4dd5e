"""Every lowering: outputs and gradients in ONNX Runtime against eager PyTorch in float64, static and dynamic shapes."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch

from onnxtrain.ortmodule._data_dependent import data_dependent_results
from onnxtrain.ortmodule._engine import onnxruntime_backend
from onnxtrain.ortmodule._torch import bounds_pass_gradients, isolates_recompiles
from ortmodule import aten_cases
from ortmodule.aten_case import Case

CASES: list[Case] = [
    case
    for module in pkgutil.iter_modules(aten_cases.__path__)
    for case in importlib.import_module(f"ortmodule.aten_cases.{module.name}").CASES
]


def _tensors(result: Any) -> list[torch.Tensor]:
    parts = result if isinstance(result, tuple | list) else (result,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _values_and_gradients(
    fn: Any, arguments: list[Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    torch.manual_seed(0)
    outputs = _tensors(fn(*arguments))
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    scored = [out for out in outputs if out.requires_grad]
    gradients: list[torch.Tensor | None] = [None] * len(leaves)
    if scored and leaves:
        loss = sum(
            (out * torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)).sum()
            for out in scored
        )
        gradients = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    return outputs, gradients


def _close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    if not want.is_floating_point():
        return torch.equal(got, want)
    value, reference = got.detach().double(), want.detach().double()
    finite = reference.isfinite()
    if not torch.equal(value.isfinite(), finite):
        return False
    if not torch.equal(value[~finite].nan_to_num(), reference[~finite].nan_to_num()):
        return False
    value, reference = value[finite], reference[finite]
    difference = (value - reference).norm()
    return bool(difference <= tolerance * max(float(reference.norm()), 1e-2))


def _mark_dynamic(arguments: list[Any]) -> None:
    for tensor in _tensors(arguments):
        for axis, size in enumerate(tensor.shape):
            if size > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, axis)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("case", "dynamic"),
    [
        pytest.param(case, dynamic, id=f"{case.name}-{'dynamic' if dynamic else 'static'}")
        for case in CASES
        for dynamic in ((False, True) if case.dynamic else (False,))
    ],
)
def test_lowering_matches_eager(case: Case, dynamic: bool) -> None:
    if case.name == "clamp_nan_bounds" and not bounds_pass_gradients:
        pytest.skip("PyTorch 2.15 passes gradients where a bound is no number; docs/ortmodule.md says so")
    if dynamic and not isolates_recompiles and case.name == "binary_cross_entropy_weight":
        pytest.skip("Dynamo 2.12 fails at it: it runs in PyTorch")
    torch._dynamo.reset()
    compiled = torch.compile(case.fn, backend=onnxruntime_backend(fallback=False), fullgraph=True)
    arguments = case.sample(torch.float32)
    if dynamic:
        _mark_dynamic(arguments if case.dynamic is True else [arguments[i] for i in case.dynamic or ()])
    settings = torch._dynamo.config.patch(allow_rnn=True, capture_dynamic_output_shape_ops=True)
    with settings, data_dependent_results():
        outputs, gradients = _values_and_gradients(compiled, arguments)
    reference = torch.float32 if case.random else torch.float64
    expected, expected_gradients = _values_and_gradients(case.fn, case.sample(reference))
    assert len(outputs) == len(expected)
    for got, want in zip(outputs, expected, strict=True):
        assert got.shape == want.shape
        assert got.dtype == (torch.float32 if want.dtype == torch.float64 else want.dtype)
        assert _close(got, want, case.tolerance)
    for got_gradient, want_gradient in zip(gradients, expected_gradients, strict=True):
        assert (got_gradient is None) == (want_gradient is None)
        if got_gradient is not None and want_gradient is not None:
            assert _close(got_gradient, want_gradient, case.tolerance)


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
