"""Shortens captures. Without these patches, a capture gives the same graphs and takes longer.

`ENABLED` switches all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from onnxtrain._building import without_older_objects
from onnxtrain.ortmodule._torch import dynamo_config
from onnxtrain.ortmodule.capture.dynamo.speedups._hook_guards import without_covered_hook_guards
from onnxtrain.ortmodule.capture.dynamo.speedups._known_breaks import KnownBreaks, ending_before
from onnxtrain.ortmodule.capture.dynamo.speedups._measurements import without_unread_measurements

ENABLED = True

_CACHED_CAPTURES = 4
"""Number of captures in one call for which PyTorch caches the results of operators on fake tensors.

The cache starts empty in each capture. It shortens captures of repeated layers by up to a fifth. If many breaks end
graphs after a few operators, with symbolic sizes, it makes captures a tenth to a fifth longer (PyTorch 2.13).
"""


class Speedups:
    """The speedups for the captures of one call of an ORTModule, which share what they have found out."""

    def __init__(self) -> None:
        self._captures = 0
        self._breaks = KnownBreaks()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Applies the speedups during one capture."""
        if not ENABLED:
            yield
            return
        self._captures += 1
        is_cached = dynamo_config.fake_tensor_cache_enabled and self._captures <= _CACHED_CAPTURES
        with (
            without_older_objects(),
            dynamo_config.patch(fake_tensor_cache_enabled=is_cached),
            without_unread_measurements(),
            without_covered_hook_guards(),
            ending_before(self._breaks),
        ):
            yield

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Forgets what was found out in an attempt that raises: the next attempt has other settings."""
        with self._breaks.attempt():
            yield
