"""Groups small arrays into buckets, each of which is sent as one message."""

from __future__ import annotations

from collections.abc import Sequence

from onnxtrain.runtime.dtypes import Array


def group_arrays(arrays: Sequence[Array], limit: int) -> list[list[int]]:
    """Groups consecutive arrays into buckets, each of which is sent as one message.

    Args:
        arrays: the arrays. All arrays in a bucket have the same dtype.
        limit: maximum size of a bucket in bytes. An array above this limit gets a bucket of its own.

    Returns:
        The buckets, as lists of indices into `arrays`.

    >>> import numpy as np
    >>> group_arrays([np.zeros(2), np.zeros(1), np.zeros(9), np.zeros(1, np.float32)], 32)
    [[0, 1], [2], [3]]
    """
    groups: list[list[int]] = []
    # Number of bytes that still fit into the last group.
    room = 0
    for index, array in enumerate(arrays):
        same = bool(groups) and arrays[groups[-1][0]].dtype == array.dtype
        # A group is concatenated into a single array, which has one dtype.
        if same and array.nbytes <= room:
            groups[-1].append(index)
        else:
            groups.append([index])
            room = limit
        room -= array.nbytes
    return groups
