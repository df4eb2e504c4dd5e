"""Skips Dynamo's measurement of its guards.

For each graph, Dynamo (PyTorch 2.13) measures how long its guards take, after flushing the processor's caches. This
takes 17 ms, and the result is only logged (https://github.com/pytorch/pytorch/pull/154764).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule._torch import dynamo_guards
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace


def _profile_for_the_log_only() -> Callable[[], None]:
    """Makes Dynamo measure the running time of guards only if it logs the result; returns the undo function."""
    before = dynamo_guards.profile_guard_manager  # type: ignore[attr-defined]

    def profile(*args: Any) -> float:
        return float(before(*args)) if dynamo_guards.guards_log.isEnabledFor(logging.DEBUG) else 0.0

    return replace((dynamo_guards, "profile_guard_manager", profile))


without_guard_profiling = ProcessWide(_profile_for_the_log_only)
