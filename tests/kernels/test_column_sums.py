"""The kernel of sums over the first axes beside its body, and beside float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kernels.against_body import check, needs_kernels, run

pytestmark = needs_kernels

SHAPES: list[tuple[list[int], int]] = [
    ([1, 8], 1),
    ([31, 9], 1),
    ([32, 16], 1),
    ([33, 17], 1),
    ([65, 127], 1),
    ([100, 128], 1),
    ([64, 129], 1),
    ([300, 1000], 1),
    ([3, 70_001], 1),
    ([20_001, 24], 1),
    ([4, 500, 64], 1),
    ([4, 30, 7, 9], 2),
    ([50, 3], 1),
    ([2, 3, 5, 1], 3),
    ([5, 4], 2),
    ([5, 0], 1),
]


def inputs_of(x: np.ndarray, columns: int) -> dict[str, np.ndarray]:
    """Returns the inputs: x, and the shape of blocks of one row."""
    kept = x.shape[x.ndim - columns :]
    return {"x": x, "shape": np.array([-1 if x.size else 0, 1, *kept], np.int64)}


@pytest.mark.parametrize(("shape", "columns"), SHAPES, ids=str)
def test_column_sum(shape: Sequence[int], columns: int) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    attributes = {"columns": columns, "allowzero": 1}
    inputs = inputs_of(x, columns)
    check("ColumnSum", inputs, attributes)
    one, two = (run("ColumnSum", inputs, attributes, native=True, threads=threads)[0] for threads in (1, 2))
    np.testing.assert_array_equal(one, two)
    exact = x.astype(np.float64).sum(tuple(range(x.ndim - columns)))
    scale = np.abs(x).astype(np.float64).sum(tuple(range(x.ndim - columns)))
    assert one.shape == exact.shape
    assert np.all(np.abs(one - exact) <= 5e-7 * scale)


def test_no_rows_sum_to_zero() -> None:
    (y,) = run(
        "ColumnSum", inputs_of(np.zeros((0, 9), np.float32), 1), {"columns": 1, "allowzero": 1}, native=True
    )
    np.testing.assert_array_equal(y, np.zeros(9, np.float32))


def test_no_error_accumulates() -> None:
    x = np.full((1_000_000, 8), 0.1, np.float32)
    (y,) = run("ColumnSum", inputs_of(x, 1), {"columns": 1, "allowzero": 1}, native=True)
    np.testing.assert_allclose(y, np.full(8, 1e6 * np.float64(x[0, 0])), rtol=2e-6)


def test_nan_and_infinity_stay_in_their_columns() -> None:
    x = np.ones((100, 20), np.float32)
    x[40, 3], x[50, 4], x[60:62, 5] = np.nan, np.inf, [np.inf, -np.inf]
    (y,) = run("ColumnSum", inputs_of(x, 1), {"columns": 1, "allowzero": 1}, native=True)
    expected = np.full(20, 100, np.float32)
    expected[3:6] = np.nan, np.inf, np.nan
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("columns", [-1, 3, 1 << 40])
def test_more_columns_than_axes_are_refused(columns: int) -> None:
    attributes = {"columns": columns, "allowzero": 1}
    with pytest.raises(Exception, match=r"ColumnSum_float: the columns must be axes of the tensor"):
        run("ColumnSum", inputs_of(np.ones((2, 3), np.float32), 1), attributes, native=True)
