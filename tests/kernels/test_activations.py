"""Kernels of activations beside their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kernels.against_body import SIZES, check, needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize("name", ["GeluGradient", "GeluTanhGradient"])
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_gradient_of_gelu(name: str, shape: Sequence[int]) -> None:
    rng = np.random.default_rng(0)
    check(name, {"x": 3 * rng.standard_normal(shape), "ct": rng.standard_normal(shape)})


@pytest.mark.parametrize("name", ["GeluGradient", "GeluTanhGradient"])
def test_gelu_far_out(name: str) -> None:
    x = np.array([-1e4, -100, -13, -5.5, -1e-30, 0, 1e-30, 5.5, 13, 100, 1e4])
    check(name, {"x": x, "ct": np.ones_like(x)})
