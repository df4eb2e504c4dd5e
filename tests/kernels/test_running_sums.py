"""The kernel of running sums beside its body, and beside NumPy, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from kernels.against_body import check, needs_kernels, run

pytestmark = needs_kernels

FLAGS = list(itertools.product((0, 1), repeat=2))
"""Exclusive, reverse."""
SHAPES: list[tuple[list[int], int]] = [
    ([1], 0),
    ([17], 0),
    ([100_000], -1),
    ([64, 33], 1),
    ([67, 300], -1),
    ([1000, 7], 1),
    ([67, 300], 0),
    ([3, 5, 1], 2),
    ([3, 1, 5], 1),
    ([300, 9, 2], 1),
    ([2, 3, 5, 7], 1),
    ([4, 3, 40, 75], 2),
    ([3, 2, 16, 64], -1),
    ([2, 300, 130], -2),
    ([0], 0),
    ([3, 0], 0),
    ([3, 0], 1),
    ([2, 0, 4], 2),
]


def sums(x: np.ndarray, axis: int, exclusive: int, reverse: int) -> np.ndarray:
    """Returns running sums in float64, each rounded to float32."""
    rows = np.moveaxis(x.astype(np.float64), axis, -1)
    rows = rows[..., ::-1] if reverse else rows
    if exclusive and rows.shape[-1]:
        rows = np.concatenate([np.zeros_like(rows[..., :1]), rows[..., :-1]], -1)
    total = np.cumsum(rows, -1)
    return np.moveaxis(total[..., ::-1] if reverse else total, -1, axis).astype(np.float32)


def attributes(axis: int, flags: Sequence[int]) -> dict[str, int]:
    return {"axis": axis, "exclusive": flags[0], "reverse": flags[1]}


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Compares two arrays, including the signs of zeros; any NaN equals any other."""
    np.testing.assert_array_equal(actual, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[numbers]), np.signbit(expected[numbers]))


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_running_sum(shape: Sequence[int], axis: int, flags: Sequence[int]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    check("RunningSum", {"x": x}, attributes(axis, flags))
    expected = sums(x, axis, *flags)
    for native, threads in ((True, 1), (True, 2), (False, 1)):
        (y,) = run("RunningSum", {"x": x}, attributes(axis, flags), native=native, threads=threads)
        assert_same_bits(y, expected)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("shape", [(40, 70), (70, 3)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_special_values(axis: int, shape: tuple[int, int], flags: Sequence[int]) -> None:
    x = np.random.default_rng(0).choice(np.array([-0.0, -0.0, 0.0], np.float32), shape)
    x[3, 1], x[[9, 20], 1], x[[5, 11], 2], x[13] = (
        np.nan,
        np.inf,
        -np.inf,
        [np.inf, -np.inf, *[1] * (shape[1] - 2)],
    )
    inputs = {"x": x}
    (kernel,), (body,) = (
        run("RunningSum", inputs, attributes(axis, flags), native=native) for native in (True, False)
    )
    assert np.isnan(body).any()
    assert np.isinf(body).any()
    assert_same_bits(kernel, body)


def test_no_error_accumulates() -> None:
    x = np.full(1_000_000, 0.1, np.float32)
    (y,) = run("RunningSum", {"x": x}, attributes(0, (0, 0)), native=True)
    np.testing.assert_allclose(y, np.float64(x[0]) * np.arange(1, 1_000_001), rtol=1e-7)


@pytest.mark.parametrize("axis", [2, -3])
def test_another_axis_is_refused(axis: int) -> None:
    with pytest.raises(
        Exception, match=r"RunningSum_float: the axis must be one of the tensor \(inputs: \[2, 3\]\)"
    ):
        run("RunningSum", {"x": np.ones((2, 3))}, attributes(axis, (0, 0)), native=True)
