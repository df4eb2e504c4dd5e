"""Gives the rows of a sparse matrix to a trainer, dense and batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxtrain.runtime.dtypes import Array


class SparseRows:
    """Map-style dataset of samples (row, target) or (row, target, weight), whose rows are dense arrays.

    Only the rows of one batch are dense at a time.

    Args:
        x: sparse matrix by rows (CSR), [samples, features].
        y: targets, [samples, ...].
        weight: sample weights, [samples]; None for equal weights.
    """

    def __init__(self, x: Any, y: Array, weight: Array | None) -> None:
        self._x = x
        self._others = [y] if weight is None else [y, weight]

    def __len__(self) -> int:
        """Returns the number of samples."""
        return int(self._x.shape[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Returns the sample with this index."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, ...]]:
        """Returns the samples with these indices, as PyTorch's loaders ask for them."""
        rows = self._x[indices].toarray()
        return list(zip(rows, *(other[indices] for other in self._others), strict=True))
