"""Kernels of activations beside their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kernels.against_body import SIZES, check, needs_kernels
from onnxtrain.functions import COMPOSITES

pytestmark = needs_kernels
POINTWISE = [
    *("ReluGradient", "ReluGradientOfFinite", "SigmoidGradient", "TanhGradient"),
    *("GeluGradient", "GeluTanhGradient", "MishGradient"),
]


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


@pytest.mark.parametrize("name", ["ClipGradient", "ClipGradientOfFinite"])
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_clip_gradient(name: str, shape: Sequence[int]) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 9, shape).astype(float)  # some of them on the bounds
    bounds = {"low": np.zeros(()), "high": np.full((), 6.0)}
    check(name, {"x": x, **bounds, "ct": rng.standard_normal(shape)})


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
