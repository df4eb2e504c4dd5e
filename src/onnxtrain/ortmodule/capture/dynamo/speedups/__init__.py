"""Speeds up captures and guard checks. The patches in this package do not change the captured graphs.

`ENABLED = False` disables all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from onnxtrain import _building
from onnxtrain._building import with_room
from onnxtrain.ortmodule._torch import dynamo_config
from onnxtrain.ortmodule.capture.dynamo.speedups import _unused_imports
from onnxtrain.ortmodule.capture.dynamo.speedups._guard_profiling import without_guard_profiling
from onnxtrain.ortmodule.capture.dynamo.speedups._hook_guards import without_implied_hook_guards
from onnxtrain.ortmodule.capture.dynamo.speedups._known_breaks import KnownBreaks, breaking_early
from onnxtrain.ortmodule.capture.dynamo.speedups._marking_guards import without_marking_guards
from onnxtrain.ortmodule.capture.dynamo.speedups._saved_tensors_guard import without_saved_tensors_guard

ENABLED = True

_CACHED_CAPTURES = 4
"""Number of captures of one call for which PyTorch caches the results of operators on fake tensors.

The cache is empty at the start of each capture. It makes captures of repeated layers up to a fifth shorter. If breaks
end graphs after a few operators with symbolic sizes, it makes captures a tenth to a fifth longer (PyTorch 2.13).
"""


class Speedups:
    """Speeds up the captures of one call of an ORTModule: each capture reuses results of earlier ones."""

    def __init__(self) -> None:
        self._captures = 0
        self._breaks = KnownBreaks()

    def run(self, capture: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `capture`, which captures one frame, with the given arguments; returns its result."""
        if not ENABLED:
            return capture(*args, **kwargs)
        self._captures += 1
        is_cached = dynamo_config.fake_tensor_cache_enabled and self._captures <= _CACHED_CAPTURES
        with (
            without_older_objects(),
            dynamo_config.patch(fake_tensor_cache_enabled=is_cached),
            without_unused_imports(),
            without_guard_profiling(),
            without_implied_hook_guards(),
            without_saved_tensors_guard(),
            without_marking_guards(),
            breaking_early(self._breaks),
        ):
            return with_room(capture, *args, **kwargs)

    def attempt(self) -> AbstractContextManager[None]:
        """Context manager for one attempt to capture. If it raises, the graph breaks recorded in it are dropped."""
        return self._breaks.attempt()


def without_older_objects() -> AbstractContextManager[None]:
    """Context manager that restricts the garbage collector to objects created inside the `with` block."""
    return _building.without_older_objects() if ENABLED else contextlib.nullcontext()


def without_unused_imports() -> AbstractContextManager[None]:
    """Context manager that keeps Dynamo from importing modules that no capture for ONNX Runtime uses."""
    return _unused_imports.without_unused_imports() if ENABLED else contextlib.nullcontext()
