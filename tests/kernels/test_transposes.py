"""The kernel of Transpose beside its body."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from kernels.against_body import check, needs_kernels, run

pytestmark = needs_kernels

CASES = [
    ([7], [0]),
    ([1, 1], [1, 0]),
    ([], []),
    *(([5, 33, 70], list(perm)) for perm in itertools.permutations(range(3))),
    *(([3, 2, 17, 1, 20], list(perm)) for perm in itertools.permutations(range(5))),
    ([200, 130], [1, 0]),
    ([4, 300, 260], [0, 2, 1]),
    ([2, 3, 4, 5, 2, 6], [3, 0, 5, 1, 4, 2]),
    ([300, 2, 64], [1, 0, 2]),
    ([40, 3], [1, 0]),
    ([3, 40], [1, 0]),
    ([4, 0, 3], [2, 1, 0]),
]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("shape", "perm"), CASES, ids=str)
def test_transpose(shape: Sequence[int], perm: Sequence[int]) -> None:
    x = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)
    (y,) = run("Transpose", {"x": x}, {"perm": list(perm)}, native=True) if perm else (x,)
    np.testing.assert_array_equal(y, x.transpose(perm))
    if perm:
        check("Transpose", {"x": x}, {"perm": list(perm)})


@pytest.mark.parametrize("perm", [[0], [0, 0], [0, 2], [-1, 0], [0, 1, 2]])
def test_orders_that_are_no_permutation_are_refused(perm: list[int]) -> None:
    with pytest.raises(Exception, match="perm must name each axis once"):
        run("Transpose", {"x": np.ones((2, 3))}, {"perm": perm}, native=True)
