"""Gradient models differentiated again: a case of each op against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autodiff.case import Case, runtime_inputs
from autodiff.reference import ReferenceEvaluator
from autodiff.test_rules import CASES
from onnxtrain.autodiff import differentiate
from tolerances import norm_relative_error

FIRST_CASES = {
    case.op: case for case in reversed(CASES) if case.outputs == 1 and case.evaluator == "reference"
}


@pytest.mark.parametrize("case", FIRST_CASES.values(), ids=lambda case: case.id)
def test_second_vjp_matches_torch(case: Case) -> None:
    """d/dx <v, d(loss)/dx0> for every input x."""
    dtype, first = np.dtype(np.float64), case.wrt[0]
    names = [f"x{i}" for i in case.wrt]
    gradient = differentiate(case.model(dtype), of="loss", wrt=[f"x{first}"])
    model = differentiate(gradient, of=f"x{first}_grad", wrt=names, cotangent="v")
    outputs = [output.name for output in model.graph.output][-len(names) :]

    arrays = case.arrays(dtype)
    tensors = [None if a is None else torch.from_numpy(np.array(a)) for a in arrays]
    leaves = [tensors[i].requires_grad_() for i in case.wrt]
    result = case.twin(*tensors)
    rng = np.random.default_rng(0)
    weights = rng.uniform(0.5, 1.5, tuple(result.shape))
    loss = (result * torch.from_numpy(np.asarray(weights))).sum()
    (slope,) = torch.autograd.grad(loss, [tensors[first]], create_graph=True)
    v = rng.uniform(0.5, 1.5, tuple(slope.shape))
    expected = [torch.zeros_like(leaf) for leaf in leaves]
    if slope.requires_grad:
        found = torch.autograd.grad(
            (slope * torch.from_numpy(np.asarray(v))).sum(), leaves, allow_unused=True
        )
        expected = [zero if g is None else zero + g for zero, g in zip(expected, found, strict=True)]

    feeds = runtime_inputs(case, arrays) | {"w0": np.asarray(weights), "v": np.asarray(v)}
    got = ReferenceEvaluator(model).run(outputs, feeds)
    for value, want in zip(got, expected, strict=True):
        assert norm_relative_error(value, want.detach().numpy()) <= 1e-8
