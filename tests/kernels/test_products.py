"""Kernels of products beside their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kernels.against_body import check, needs_kernels, run

pytestmark = needs_kernels
SIZES = [
    (1, 1, 1),
    (12, 32, 32),
    (13, 300, 33),
    (3, 700, 1),
    (70, 5, 600),
    (200, 1, 40),
    (64, 3072, 128),
    (20, 1500, 70),
    (130, 900, 20),
    (40, 70, 6),
    (6, 1500, 100),
    (12, 600, 64),
    (200, 2000, 1),
    (120, 1300, 110),
    (500, 40, 530),
    (600, 1100, 40),
    (400, 600, 2100),
    (130, 2100, 520),
    (4, 0, 3),
    (0, 2, 3),
    (5, 2, 0),
]
"""Rows, depth, columns."""


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matrix_product(sizes: Sequence[int], transposed: Sequence[int]) -> None:
    (rows, depth, columns), rng = sizes, np.random.default_rng(5)
    a, b = rng.standard_normal((rows, depth)), rng.standard_normal((depth, columns))
    inputs = {"a": a.T.copy() if transposed[0] else a, "b": b.T.copy() if transposed[1] else b}
    check("MatrixProduct", inputs, dict(zip(("transA", "transB"), transposed, strict=True)))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("name", ["Linear", "LinearRelu"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_linear_layer(sizes: Sequence[int], name: str, transposed: int) -> None:
    (rows, depth, columns), rng = sizes, np.random.default_rng(5)
    weight = rng.standard_normal((columns, depth) if transposed else (depth, columns))
    inputs = {"x": rng.standard_normal((rows, depth)), "weight": weight, "bias": rng.standard_normal(columns)}
    check(name, inputs, {"transB": transposed})


def test_relu_of_what_is_no_number() -> None:
    x = np.zeros((30, 40))
    x[7, 3], x[9, 5] = np.nan, -np.inf
    inputs = {"x": x, "weight": np.ones((40, 50)), "bias": np.full(50, -1.0)}
    y = run("LinearRelu", inputs, {"transB": 0}, native=True)[0]
    np.testing.assert_array_equal(y, np.where(np.isnan(x.sum(1)), np.nan, 0)[:, None].repeat(50, 1))


@pytest.mark.parametrize("shape", [(4,), (5, 1), ()])
def test_bias_that_is_no_row_is_refused(shape: tuple[int, ...]) -> None:
    inputs = {"x": np.ones((2, 3)), "weight": np.ones((3, 5)), "bias": np.ones(shape)}
    with pytest.raises(Exception, match="a number for each column"):
        run("Linear", inputs, {"transB": 0}, native=True)


def test_rows_far_apart() -> None:
    rng = np.random.default_rng(5)
    inputs = {"a": rng.standard_normal((30, 8192)), "b": rng.standard_normal((8192, 40))}
    check("MatrixProduct", inputs, {"transA": 0, "transB": 0})


def test_what_is_no_number_stays_in_its_row() -> None:
    a, b = np.ones((30, 40)), np.ones((40, 50))
    a[7, 3], a[9, 5] = np.nan, np.inf
    y = run("MatrixProduct", {"a": a, "b": b}, {"transA": 0, "transB": 0}, native=True)[0]
    np.testing.assert_array_equal(y, np.where(np.isfinite(a.sum(1)), 40, a.sum(1))[:, None].repeat(50, 1))


def test_factors_that_do_not_fit_are_refused() -> None:
    inputs = {"a": np.ones((2, 3)), "b": np.ones((4, 5))}
    with pytest.raises(Exception, match="as many as the columns of A"):
        run("MatrixProduct", inputs, {"transA": 0, "transB": 0}, native=True)
