"""Kernels of activations beside their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kernels.against_body import SIZES, check, needs_kernels, run
from onnxtrain.functions import COMPOSITES

pytestmark = needs_kernels
POINTWISE = [
    *("ReluGradient", "ReluGradientOfFinite", "SigmoidGradient", "TanhGradient"),
    *("GeluGradient", "GeluTanhGradient", "MishGradient", "SiluGradient"),
]


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_pointwise_gradient(name: str, shape: Sequence[int]) -> None:
    rng = np.random.default_rng(0)
    check(name, _inputs(name, 3 * rng.standard_normal(shape), rng.standard_normal(shape)))


@pytest.mark.parametrize("name", POINTWISE)
def test_far_out(name: str) -> None:
    x = np.array([-80, -13, -5.5, -1e-30, 0, 1e-30, 5.5, 13, 25, 80])
    check(name, _inputs(name, x, np.ones_like(x)))


def _inputs(name: str, primal: np.ndarray, ct: np.ndarray) -> dict[str, np.ndarray]:
    return {COMPOSITES[name].inputs[0]: primal, "ct": ct}


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_silu(shape: Sequence[int]) -> None:
    check("Silu", {"x": 5 * np.random.default_rng(0).standard_normal(shape)})


def test_silu_far_out() -> None:
    check("Silu", {"x": np.array([-80, -13, -5.5, -1e-30, 0, 1e-30, 5.5, 13, 25, 80])})


@pytest.mark.parametrize(
    ("shape", "axis"),
    [([1], 0), ([3, 17], 1), ([17, 3], 0), ([2, 5, 19], 1), ([2, 3, 4, 33], -1), ([7, 3000], 1), ([0, 3], 1)],
)
def test_safe_softmax(shape: Sequence[int], axis: int) -> None:
    """Some elements and some rows are masked, and one is no number; beside PyTorch, with kernel and with body."""
    rng = np.random.default_rng(0)
    x = 4 * rng.standard_normal(shape).astype(np.float32)
    x[rng.random(shape) < 0.3] = -np.inf
    rows = np.moveaxis(x, axis, -1)
    rows[rng.random(rows.shape[:-1]) < 0.4] = -np.inf
    for row in np.ndindex(rows.shape[:-1]):
        finite = np.flatnonzero(np.isfinite(rows[row]))
        if len(finite) > 1:
            rows[row][finite[0]] = np.nan
            break
    want = torch.ops.aten._safe_softmax(torch.from_numpy(x).double(), axis).numpy()
    for native, threads in ((True, 1), (True, 2), (False, 2)):
        (y,) = run("SafeSoftmax", {"x": x}, {"axis": axis}, native=native, threads=threads)
        np.testing.assert_allclose(y, want, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("shape", [[1, 1], [4, 3], [2, 3, 33], [7, 5000], [3, 32000], [0, 3]], ids=str)
def test_log_softmax_of_rows(shape: Sequence[int]) -> None:
    """Scores far apart and a masked one; beside PyTorch in float64, with kernel and with body."""
    rng = np.random.default_rng(0)
    x = (30 * rng.standard_normal(shape)).astype(np.float32)
    if shape[-1] > 1:
        x[..., 0] = -np.inf
    want = torch.log_softmax(torch.from_numpy(x).double(), -1).numpy()
    for native, threads in ((True, 1), (True, 2), (False, 2)):
        (y,) = run("LogSoftmaxOfRows", {"x": x}, {}, native=native, threads=threads)
        np.testing.assert_allclose(y, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_log_softmax_of_a_row_without_a_sum(value: float) -> None:
    """A row with NaN or an infinite score, or of minus infinity alone, has NaN, as in PyTorch; other rows have not."""
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    x[1, 7 if value != -np.inf else slice(None)] = value
    (y,) = run("LogSoftmaxOfRows", {"x": x}, {}, native=True)
    want = torch.log_softmax(torch.from_numpy(x), -1).numpy()
    np.testing.assert_array_equal(np.isnan(y), np.isnan(want))
    np.testing.assert_allclose(y[[0, 2]], want[[0, 2]], rtol=2e-6, atol=2e-6)


BOUNDED = ["ClipGradient", "ClipGradientOfFinite", "HardtanhGradient", "HardtanhGradientOfFinite"]


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_bounded_gradient(name: str, shape: Sequence[int]) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 9, shape).astype(float)  # some of them on the bounds
    bounds = {"low": np.zeros(()), "high": np.full((), 6.0)}
    check(name, {COMPOSITES[name].inputs[0]: x, **bounds, "ct": rng.standard_normal(shape)})


@pytest.mark.parametrize("name", ["SoftmaxGradient", "LogSoftmaxGradient"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ([1], 0),
        ([5], -1),
        ([3, 17], 1),
        ([17, 3], 0),
        ([2, 5, 19], 1),
        ([2, 3, 4, 33], -1),
        ([70, 500], 1),
        ([0, 3], 1),
    ],
    ids=str,
)
def test_gradient_along_an_axis(name: str, shape: Sequence[int], axis: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape)
    y = np.exp(x) / np.exp(x).sum(axis, keepdims=True)
    y = np.log(y) if name.startswith("Log") else y
    check(name, {"y": y, "ct": rng.standard_normal(shape)}, {"axis": axis})


@pytest.mark.parametrize("native", [True, False], ids=["kernel", "body"])
@pytest.mark.parametrize("name", ["ReluGradient", "ReluGradientOfFinite"])
def test_relu_gradient_of_what_is_no_number(name: str, native: bool) -> None:
    """The cotangent, as in PyTorch, where the activation is NaN."""
    y = np.resize(np.array([np.nan, 0, 2, np.inf, 0, np.nan, 1e-40], np.float32), 41)
    ct = np.arange(1, 42, dtype=np.float32)
    (computed,) = run(name, {"y": y, "ct": ct}, {}, native=native)
    want = torch.ops.aten.threshold_backward(torch.from_numpy(ct), torch.from_numpy(y), 0).numpy()
    np.testing.assert_array_equal(computed, want)
