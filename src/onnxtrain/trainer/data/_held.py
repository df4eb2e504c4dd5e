"""Copies data that must survive the next read, because streams, datasets and transforms may reuse their buffers."""

from __future__ import annotations

import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.trainer.data._frames import is_frame, is_series

# Immutable types.
_FIXED = (int, float, str, bytes, np.generic, type(None))


def held(value: Any) -> Any:
    """Returns a deep copy of a batch, a sample, or an entry of either, for data that must survive the next read.

    Streams, datasets and transforms may reuse the buffers of their arrays. Lists, tuples and mappings are copied
    recursively. Other values that are not arrays, such as strings, are shared.

    >>> buffer = np.zeros(2)
    >>> kept = held((buffer, {"label": 1}))
    >>> buffer[:] = 5
    >>> kept
    (array([0., 0.]), {'label': 1})
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, _FIXED):
        return value
    if isinstance(value, tuple):
        return tuple(map(held, value))
    if isinstance(value, list):
        # A list of scalars, e.g. of token ids, is copied at once.
        return value.copy() if value and np.isscalar(value[0]) else list(map(held, value))
    # A PyTorch tensor; `clone` alone would keep the autograd graph.
    if hasattr(value, "detach"):
        return value.detach().clone()
    if is_frame(value) or is_series(value):
        # polars has no `copy`; its clones share memory until one of them is written to.
        return value.copy() if hasattr(value, "copy") else value.clone()
    if isinstance(value, Mapping):
        return {name: held(entry) for name, entry in value.items()}
    if hasattr(value, "__array__") or isinstance(value, array.array | memoryview | bytearray):
        return np.array(value)
    return value
