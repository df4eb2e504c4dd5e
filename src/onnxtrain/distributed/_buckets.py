"""Groups small arrays, so that one message carries many of them."""

from __future__ import annotations

from collections.abc import Sequence

from onnxtrain.runtime.dtypes import Array


def group_arrays(arrays: Sequence[Array], limit: int) -> list[list[int]]:
    """Groups the numbers of arrays: neighbours of one dtype together, up to `limit` bytes; larger arrays alone.

    >>> import numpy as np
    >>> group_arrays([np.zeros(2), np.zeros(1), np.zeros(9), np.zeros(1, np.float32)], 32)
    [[0, 1], [2], [3]]
    """
    groups: list[list[int]] = []
    # Bytes that still fit into the last group.
    room = 0
    for index, array in enumerate(arrays):
        same = bool(groups) and arrays[groups[-1][0]].dtype == array.dtype
        # Joined arrays are one array, which has one dtype.
        if same and array.nbytes <= room:
            groups[-1].append(index)
        else:
            groups.append([index])
            room = limit
        room -= array.nbytes
    return groups
