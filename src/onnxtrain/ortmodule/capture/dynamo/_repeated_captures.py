"""Stops the capture of functions whose graphs are never reused."""

from __future__ import annotations

import dataclasses
import random
import re
import warnings
import weakref
from collections.abc import Mapping
from types import BuiltinMethodType, CodeType, ModuleType
from typing import Any

import torch

MAX_CALLS = 16
"""Number of consecutive calls that capture a function, after which Python runs the function."""

MAX_OBJECT_CAPTURES = 8
"""Number of captures of a function with per-call objects among its variables, after which Python runs the function."""


@dataclasses.dataclass(frozen=True)
class _Streak:
    """Consecutive calls for which no graph of a function was valid. A call with a valid graph ends the streak.

    Attributes:
        captures: how many of these calls captured the function. In the other calls, PyTorch ran it.
        captured: the last call that captured the function, e.g. 3 for the third call to the ORTModule; 0 for none.
        missed: the last call without a valid graph, numbered like `captured`.
    """

    captures: int = 0
    captured: int = 0
    missed: int = 0


class RepeatedCaptures:
    """Detects functions that an ORTModule captures again in every call.

    No graph of such a function is reused, because a guard fails in every call. For example, Dynamo guards on a bound
    method of a list that the call has created, the length of a list that the module keeps, a string, or a number that
    PyTorch treats as a constant.

    Attributes:
        calls: number of calls to the ORTModule so far. The caller of the module increments it.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._streaks: weakref.WeakKeyDictionary[CodeType, _Streak] = weakref.WeakKeyDictionary()
        self._of_objects: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()

    def needs_capture(self, code: CodeType) -> bool:
        """True if a function must be captured now, even if another capture doesn't pay off yet.

        This is the case if the function was already captured in this call, or in more than `MAX_CALLS` consecutive
        calls. In the latter case, :meth:`record` ends its captures.
        """
        streak = self._streaks.get(code, _Streak())
        return streak.captured == self.calls or streak.captures > MAX_CALLS

    def wait(self, code: CodeType) -> None:
        """Records that no graph of a function is valid for the current call, and that PyTorch runs the function."""
        self._streaks[code] = self._continued(code)

    def _continued(self, code: CodeType) -> _Streak:
        """Returns a function's streak, extended by the current call, in which none of its graphs is valid."""
        streak = self._streaks.get(code, _Streak())
        captures = streak.captures if streak.missed >= self.calls - 1 else 0
        return dataclasses.replace(streak, captures=captures, missed=self.calls)

    def record(self, code: CodeType, variables: Mapping[str, Any]) -> bool:
        """Records that a function is about to be captured. Checks whether it was captured too often.

        Args:
            code: the code object of the function.
            variables: the function's local variables before it runs.

        Returns:
            True if the graphs of the function are not reused, so that Python must run the function instead.
        """
        streak = self._continued(code)
        if streak.captured != self.calls:
            streak = dataclasses.replace(streak, captures=streak.captures + 1, captured=self.calls)
            self._streaks[code] = streak
            if streak.captures == MAX_CALLS + 1:
                _warn(code)
        # Captures within one call count, too, e.g. of a function that is called for each of 100 blocks.
        if any(map(_is_per_call_object, variables.values())):
            captures = self._of_objects[code] = self._of_objects.get(code, 0) + 1
            return captures > MAX_OBJECT_CAPTURES
        return streak.captures > MAX_CALLS


def _warn(code: CodeType) -> None:
    warnings.warn(
        f"ORTModule: {code.co_qualname} (line {code.co_firstlineno} of {code.co_filename}) was captured again in each "
        f"of {MAX_CALLS} calls. From now on it runs in PyTorch, and the layers that it calls are captured separately. "
        "Something differs in each call, e.g. the length of a list that the module keeps, a string, or a number that "
        "PyTorch treats as a constant (a bound of clamp, an exponent). Set TORCH_LOGS=recompiles to see which. Keep "
        "lists outside of forward, and pass numbers as tensors",
        stacklevel=2,
    )


def _is_per_call_object(value: Any) -> bool:
    """True if Dynamo (PyTorch 2.13) guards on the id of a value that usually lives no longer than the call."""
    if isinstance(value, BuiltinMethodType):
        owner = value.__self__
        # Built-in functions of classes, modules and pybind11 live on. For methods of tensors and of `random.Random`
        # objects, Dynamo has other guards.
        is_method = hasattr(type(owner), value.__name__) and not isinstance(owner, type | ModuleType)
        return is_method and not isinstance(owner, torch.Tensor | random.Random)
    return isinstance(value, re.Match)
