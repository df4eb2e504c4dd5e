"""Scatters where entries meet at one place (zeros of a product, ties of a maximum), and in half precision."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
import torch

from autodiff.case import Case, F, R
from autodiff.test_rules import (
    CASES,
    _cannot_run,
    _feeds,
    _gradient_model,
    _session,
    _torch_outputs_and_gradients,
)
from onnxtrain.autodiff import differentiate
from tolerances import NORM_RELATIVE, norm_relative_error

TORCH_NAMES = {"mul": "prod", "max": "amax", "min": "amin"}


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize(
    ("reduction", "data", "updates"),
    [
        ("mul", [2.0, 3.0, 5.0, 7.0], [4.0, 0.0, 6.0, -1.0]),
        ("mul", [2.0, 3.0, 5.0, 7.0], [0.0, 0.0, 6.0, -1.0]),
        ("mul", [0.0, 3.0, 5.0, 7.0], [4.0, 2.0, 0.0, -1.0]),
        ("mul", [0.0, 3.0, 5.0, 7.0], [0.0, 2.0, 6.0, 0.0]),
        ("max", [2.0, 3.0, 5.0, 7.0], [2.0, 2.0, 6.0, 7.0]),
        ("max", [2.0, 3.0, 5.0, 7.0], [4.0, 4.0, 5.0, 5.0]),
        ("min", [2.0, 3.0, 5.0, 7.0], [2.0, 1.0, 5.0, 7.0]),
        ("min", [2.0, 3.0, 5.0, 7.0], [1.0, 1.0, 4.0, 7.0]),
    ],
)
def test_gradients_are_those_of_torch(
    op: str, reduction: str, data: list[float], updates: list[float]
) -> None:
    index, cotangent = np.array([0, 0, 2, 3]), np.array([1.5, -2.0, 3.0, 0.5])
    x, u = (torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in (data, updates))
    out = x.scatter_reduce(0, torch.from_numpy(index), u, TORCH_NAMES[reduction])
    expected = torch.autograd.grad(out, [x, u], torch.from_numpy(cotangent))

    indices = index if op == "ScatterElements" else index[:, None]
    case = Case(op, (F(4), R(indices), F(4)), lambda x, i, u: x, {"reduction": reduction})
    model = differentiate(case.model(np.dtype(np.float64)), "loss", ["x0", "x2"])
    feeds = {"x0": np.array(data), "x1": indices, "x2": np.array(updates), "w0": cotangent}
    for value, want in zip(_session(model).run(["x0_grad", "x2_grad"], feeds), expected, strict=True):
        np.testing.assert_allclose(value, want.numpy(), rtol=1e-14)


# The CPU has no kernel that adds float16 in a scatter, so these gradients must not ask for one.
HALF = [
    case
    for case in CASES
    if case.op in ("Gather", "GatherElements", "GatherND", "Slice", "Pad", "Compress", "TopK")
    or (case.op == "ScatterElements" and case.attrs["reduction"] == "max")
]


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.id)
def test_half_precision_runs_on_the_cpu(case: Case) -> None:
    if (why := _cannot_run(case, True)) is not None:
        pytest.skip(f"onnxruntime {ort.__version__} {why}")
    _, weights, expected = _torch_outputs_and_gradients(case)
    session = _session(_gradient_model(case, np.float16, symbolic=True))
    got = session.run([f"x{i}_grad" for i in case.wrt], _feeds(case, np.float16, weights))
    for value, want in zip(got, expected, strict=True):
        assert value.dtype == np.float16
        assert norm_relative_error(value, want) <= NORM_RELATIVE[np.dtype(np.float16)]
