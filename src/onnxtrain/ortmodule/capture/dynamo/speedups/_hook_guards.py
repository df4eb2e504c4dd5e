"""Leave out Dynamo's guards of hooks that other guards cover."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule._torch import GuardBuilder
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace

_WITH_KWARGS = "_with_kwargs"


def _skip_covered() -> Callable[[], None]:
    """Has Dynamo skip guards that a module has no hooks with keyword arguments; returns what takes that back."""
    before = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT

    # `module._forward_hooks_with_kwargs` only tells which of the hooks in `module._forward_hooks` take keyword
    # arguments. Dynamo (PyTorch 2.13) guards that both are empty, for each module: a third of its guards of hooks.
    @functools.wraps(before)
    def empty(self: Any, guard: Any) -> None:
        source = guard.originating_source
        name = getattr(source, "member", "")
        if name.endswith(_WITH_KWARGS):
            module = self.get(source.base)
            if not getattr(module, name.removesuffix(_WITH_KWARGS), True):
                return
        before(self, guard)

    return replace((GuardBuilder, "EMPTY_NN_MODULE_HOOKS_DICT", empty))


without_covered_hook_guards = ProcessWide(_skip_covered)
"""Keeps Dynamo from guarding the hooks of a module twice while it is open."""
