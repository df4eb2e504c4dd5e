"""Skips Dynamo's guard on saved-tensor hooks, which concerns only graphs that contain the hooks.

AOTAutograd traces hooks that are FX graphs into its graphs, so Dynamo (PyTorch 2.13) guards on their ids. Each check
calls four Python functions. ORTModule passes saved tensors to whichever hooks are active in the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule._torch import GuardBuilder
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace


def _skip_guard() -> Callable[[], None]:
    """Makes Dynamo skip the guard on saved-tensor hooks; returns the undo function."""

    @functools.wraps(GuardBuilder.AUTOGRAD_SAVED_TENSORS_HOOKS)
    def skip(self: Any, guard: Any) -> None:
        pass

    return replace((GuardBuilder, "AUTOGRAD_SAVED_TENSORS_HOOKS", skip))


without_saved_tensors_guard = ProcessWide(_skip_guard)
