"""The kernels of rotary position embeddings beside the bodies of their functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kernels.against_body import check, run

SIZES = [
    ([2, 4, 7, 10], [7, 10]),
    ([2, 7, 4, 36], [1, 7, 1, 36]),
    ([2, 7, 4, 36], [2, 1, 4, 36]),
    ([40, 64], [40, 64]),
    ([6], [6]),
    ([3, 5, 130], [130]),
    ([2, 9, 300, 128], [300, 128]),
    ([2, 0, 4, 6], [1, 4, 6]),
    ([3, 4, 0], [0]),
]


def given(x: Sequence[int], angles: Sequence[int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(x))
    return {"x": rng.normal(size=x), "cos": rng.normal(size=angles), "sin": rng.normal(size=angles)}


@pytest.mark.parametrize(("x", "angles"), SIZES, ids=str)
def test_rotary(x: Sequence[int], angles: Sequence[int]) -> None:
    inputs = given(x, angles)
    check("Rotary", inputs)
    ct = inputs.pop("x")
    check("RotaryGradient", {"ct": ct, **inputs})


def test_threads_change_nothing() -> None:
    inputs = given([3, 8, 200, 64], [200, 64])
    one, two = (run("Rotary", inputs, {}, native=True, threads=threads) for threads in (1, 2))
    assert one[0].tobytes() == two[0].tobytes()


@pytest.mark.parametrize(
    ("x", "cos", "sin", "message"),
    [
        ([2, 5], [2, 5], [2, 5], "rows must have two halves"),
        ([2, 4], [2, 4], [4], "cos and sin must have one shape"),
        ([2, 4], [3, 4], [3, 4], "must broadcast to x"),
        ([2, 4], [1], [1], "and have its last axis"),
        ([4], [1, 4], [1, 4], "must broadcast to x"),
    ],
    ids=str,
)
def test_other_shapes_are_refused(
    x: Sequence[int], cos: Sequence[int], sin: Sequence[int], message: str
) -> None:
    inputs = {name: np.ones(size) for name, size in (("x", x), ("cos", cos), ("sin", sin))}
    with pytest.raises(Exception, match=message):
        run("Rotary", inputs, {}, native=True)
