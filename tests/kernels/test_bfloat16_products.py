"""Kernels of products in bfloat16 beside their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kernels import against_body
from kernels.against_body import SIZES, best_level, check, needs_kernels, run

pytestmark = needs_kernels

SHAPES: Sequence[tuple[Sequence[int], Sequence[int]]] = (
    ([1, 1], [1, 1]),
    ([2, 3], [3, 4]),
    ([13, 17], [17, 33]),
    ([12, 32], [32, 32]),
    ([25, 64], [64, 48]),
    ([37, 31], [31, 16]),
    ([1, 300], [300, 130]),
    ([300, 1], [1, 70]),
    ([70, 129], [129, 1]),
    ([5, 1030], [1030, 40]),
    ([33, 2500], [2500, 50]),
    ([1100, 40], [40, 160]),
    ([1025, 1027], [1027, 129]),
    ([0, 3], [3, 4]),
    ([2, 0], [0, 4]),
    ([2, 3], [3, 0]),
    ([7], [7]),
    ([7], [7, 5]),
    ([4, 7], [7]),
    ([7], [3, 7, 5]),
    ([3, 4, 7], [7]),
    ([2, 3, 5, 7], [7, 9]),
    ([5, 7], [4, 7, 9]),
    ([3, 5, 7], [3, 7, 9]),
    ([2, 1, 5, 7], [3, 7, 9]),
    ([40, 17, 19], [40, 19, 23]),
    ([6, 1, 20], [6, 20, 1]),
    ([6, 1, 20], [20, 9]),
    ([6, 1, 3, 20], [6, 20, 9]),
    ([0, 5, 7], [0, 7, 9]),
    ([3, 0, 7], [7, 9]),
)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers of float32, so that both dtypes round the same."""
    return rng.standard_normal(shape, np.float32)


def permuted(shape: Sequence[int], perm: Sequence[int]) -> list[int]:
    """The shape that becomes `shape` by `perm`."""
    source = [0] * len(shape)
    for axis, size in zip(perm, shape, strict=True):
        source[axis] = size
    return source


def of_rank(rank: int, rng: np.random.Generator) -> list[int]:
    """The last two axes exchanged, or for more than three of them any order."""
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    return swapped if rank < 4 else [int(axis) for axis in rng.permutation(rank)]


def check_matmul(a: Sequence[int], b: Sequence[int], which: str) -> None:
    """Of factors of these shapes, of which `which` have their axes in another order."""
    rng = np.random.default_rng(len(a) + 10 * len(b))
    attributes: dict[str, Any] = {}
    shapes = {"a": a, "b": b}
    for name, where in (("a", ("Left", "Both")), ("b", ("Right", "Both"))):
        if which in where:
            attributes[f"perm_{name}"] = perm = of_rank(len(shapes[name]), rng)
            shapes[name] = permuted(shapes[name], perm)
    inputs = {name: normal(rng, *shape) for name, shape in shapes.items()}
    check(f"MatMul{which and 'Permuted'}{which}Bfloat16", inputs, attributes)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
def test_matmul(a: Sequence[int], b: Sequence[int]) -> None:
    check_matmul(a, b, "")


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("which", ["Left", "Right", "Both"])
@pytest.mark.parametrize(("a", "b"), [pair for pair in SHAPES if min(map(len, pair)) > 1], ids=str)
def test_matmul_of_permuted_factors(a: Sequence[int], b: Sequence[int], which: str) -> None:
    check_matmul(a, b, which)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_every_level_of_the_processor(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the instructions for bfloat16, and in float32 where there are none."""
    monkeypatch.setenv("ONNXTRAIN_KERNELS_LEVEL", best_level(level))
    against_body._session.cache_clear()
    try:
        for a, b in SHAPES:
            check_matmul(a, b, "" if min(len(a), len(b)) < 2 else "Both")
        test_gemm((64, 300, 40), (1, 0), ["m", 1])
        test_what_is_not_finite_stays(True)
        test_factors_are_rounded_to_even()
    finally:
        against_body._session.cache_clear()


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_rounding(shape: Sequence[int]) -> None:
    x = normal(np.random.default_rng(3), *shape)
    x.ravel()[:4] = [np.inf, -np.inf, np.nan, 3.4e38][: x.size]
    body, kernel = (run("RoundToBfloat16", {"x": x}, {}, native=native)[0] for native in (False, True))
    np.testing.assert_array_equal(kernel, body)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("c", [None, [], [1], ["n"], [1, "n"], ["m", 1], ["m", "n"]], ids=str)
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("sizes", [(5, 7, 9), (64, 300, 40), (1, 1040, 33), (70, 0, 3), (0, 4, 3)], ids=str)
def test_gemm(sizes: tuple[int, int, int], transposed: tuple[int, int], c: list[int | str] | None) -> None:
    m, k, n = sizes
    rng = np.random.default_rng(1)
    names: dict[int | str, int] = {"m": m, "n": n, 1: 1}
    inputs = {
        "a": normal(rng, *((k, m) if transposed[0] else (m, k))),
        "b": normal(rng, *((n, k) if transposed[1] else (k, n))),
        "c": None if c is None else normal(rng, *(names[dim] for dim in c)),
    }
    alpha, beta = (1.0, 1.0) if c is None else (0.5, -1.25)
    attributes = {"alpha": alpha, "beta": beta, "transA": transposed[0], "transB": transposed[1]}
    check("GemmBfloat16", inputs, attributes)


@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_not_finite_stays(transposed: bool) -> None:
    """Infinities, numbers that round to them, and NaNs whose bits an addition would make an infinity or a zero."""
    rng = np.random.default_rng(2)
    a = normal(rng, 20, 40)
    a[3, 4], a[5, 6], a[7, 8], a[9, 10] = np.inf, -np.inf, np.nan, 3.4e38
    a[11, 12], a[13, 14] = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    b = np.abs(normal(rng, 40, 50))
    name, attributes = "MatMulBfloat16", {}
    if transposed:
        name, attributes = "MatMulPermutedBothBfloat16", {"perm_a": [1, 0], "perm_b": [1, 0]}
        a, b = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    body, kernel = (run(name, {"a": a, "b": b}, attributes, native=native)[0] for native in (False, True))
    for row in (7, 11, 13):
        assert np.isnan(kernel[row]).all()
    for row, value in ((3, np.inf), (5, -np.inf), (9, np.inf)):
        assert (kernel[row] == value).all()
    np.testing.assert_allclose(kernel, body, rtol=1e-4, atol=1e-5)


def test_factors_are_rounded_to_even() -> None:
    ties = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)]], np.float32)
    (found,) = run("MatMulBfloat16", {"a": ties.T, "b": np.ones((1, 1))}, {}, native=True)
    assert found.ravel().tolist() == [1, 1 + 2**-6, 1 + 2**-7, -1]


@pytest.mark.parametrize(("a", "b"), [((2, 3), (4, 5)), ((2, 3, 4), (3, 4, 5))], ids=str)
def test_factors_that_do_not_fit_are_refused(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    with pytest.raises(Exception, match=r"do not (fit together|broadcast)"):
        run("MatMulBfloat16", {"a": np.zeros(a), "b": np.zeros(b)}, {}, native=True)
