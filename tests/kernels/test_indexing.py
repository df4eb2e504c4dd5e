"""Kernels of gradients of reading by indices beside their bodies."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.against_body import check, needs_kernels, run

pytestmark = needs_kernels


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("indices", [(), (1,), (7,), (3, 5), (0,), (40, 50)], ids=str)
@pytest.mark.parametrize("shape", [[1], [5], [4, 3], [3, 2, 9], [1000, 33], [4, 0]], ids=str)
def test_embedding_gradient(shape: list[int], indices: tuple[int, ...]) -> None:
    rng = np.random.default_rng(4)
    inputs = {
        "ct": rng.standard_normal((*indices, *shape[1:])),
        "indices": rng.integers(-shape[0], shape[0], indices),
        "shape": np.array(shape),
    }
    check("EmbeddingGradient", inputs)


@pytest.mark.parametrize("index", [4, -5])
def test_indices_beyond_the_rows_are_refused(index: int) -> None:
    inputs = {"ct": np.zeros((2, 3)), "indices": np.array([0, index]), "shape": np.array([4, 3])}
    with pytest.raises(Exception, match="an index is not one of the rows"):
        run("EmbeddingGradient", inputs, {}, native=True)
