"""Copies what must outlive the next draw: streams, data sets and transforms may fill one buffer again and again."""

from __future__ import annotations

import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxtrain.trainer.data._frames import is_frame, is_series

# Nothing writes to these.
_FIXED = (int, float, str, bytes, np.generic, type(None))


def held(value: Any) -> Any:
    """Returns a copy of a batch, a sample or an entry of one, with arrays in memory of its own.

    Lists, tuples and mappings are copied with what they hold; values that are no arrays, such as texts, are shared.

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
        # Entries of one kind: a list of token numbers is copied at once.
        return value.copy() if value and np.isscalar(value[0]) else list(map(held, value))
    # Tensors of PyTorch; a leaf that requires gradients has no plain copy.
    if hasattr(value, "detach"):
        return value.detach().clone()
    if is_frame(value) or is_series(value):
        # polars has no `copy`, and its frames share memory until one of them is written to.
        return value.copy() if hasattr(value, "copy") else value.clone()
    if isinstance(value, Mapping):
        return {name: held(entry) for name, entry in value.items()}
    if hasattr(value, "__array__") or isinstance(value, array.array | memoryview | bytearray):
        return np.array(value)
    return value
