"""Skips Dynamo's guards on marked axes of parameters and buffers.

Dynamo (PyTorch 2.13) guards for each tensor that it has none of five attributes that `mark_dynamic` and its relatives
set, which takes as long as all other guards on a parameter. A mark changes what a capture does, but makes no graph
invalid. Arguments keep these guards: a call with a marked argument is captured anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule._torch import GuardManager
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide, replace

_OF_MODULES = ("]._parameters[", "]._buffers[")
"""Parts of the expressions by which guards name tensors of modules, e.g. `L['self']._parameters['weight']`."""


def _skip_marks() -> Callable[[], None]:
    """Makes Dynamo skip the guards on marked axes of parameters and buffers; returns the undo function."""
    before = GuardManager.add_dimension_marking_guard

    def add(
        self: Any,
        expected: dict[str, Any],
        absent: list[str],
        dependent: dict[str, Any],
        code: list[str],
        stack: Any,
    ) -> None:
        of_module = bool(code) and any(part in code[0] for part in _OF_MODULES)
        if expected or dependent or not of_module:
            before(self, expected, absent, dependent, code, stack)

    return replace((GuardManager, "add_dimension_marking_guard", add))


# PyTorch before 2.13 has other guards.
without_marking_guards = ProcessWide(
    _skip_marks if hasattr(GuardManager, "add_dimension_marking_guard") else replace
)
