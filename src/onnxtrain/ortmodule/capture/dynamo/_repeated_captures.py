"""Stops the capture of functions whose graphs are never reused."""

from __future__ import annotations

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


class RepeatedCaptures:
    """Detects functions that an ORTModule captures again in every call.

    A graph is not reused if a guard fails in each call. Dynamo guards e.g. on a bound method of a list that the call
    has created, the length of a list that the module keeps, a string, or a number that PyTorch treats as a constant.

    Attributes:
        calls: number of calls of the ORTModule so far. The caller of the module increments it.
    """

    def __init__(self) -> None:
        self.calls = 0
        # Per code object: the number of consecutive calls that have captured it, and the number of the last such call.
        self._streaks: weakref.WeakKeyDictionary[CodeType, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._of_objects: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()

    def record(self, code: CodeType, variables: Mapping[str, Any]) -> bool:
        """Records that a function is about to be captured. Checks whether it was captured too often.

        Args:
            code: the code object of the function.
            variables: the function's local variables before it runs.

        Returns:
            True if the graphs of the function are not reused, so that Python must run the function instead.
        """
        length, last = self._streaks.get(code, (0, 0))
        if last != self.calls:
            length = length + 1 if last == self.calls - 1 else 1
            self._streaks[code] = (length, self.calls)
            if length == MAX_CALLS + 1:
                _warn(code)
        # Captures within one call count, too, e.g. of a function that is called for each of 100 blocks.
        if any(map(_is_per_call_object, variables.values())):
            captures = self._of_objects[code] = self._of_objects.get(code, 0) + 1
            return captures > MAX_OBJECT_CAPTURES
        return length > MAX_CALLS


def _warn(code: CodeType) -> None:
    warnings.warn(
        f"ORTModule: {code.co_qualname} (line {code.co_firstlineno} of {code.co_filename}) was captured in each of "
        f"{MAX_CALLS} calls. From now on it runs in PyTorch, and the layers that it calls are captured by themselves. "
        "Something is new in each call: the length of a list that the module keeps, a string, a number that PyTorch "
        "takes as a constant (a bound of clamp, an exponent). TORCH_LOGS=recompiles in the environment names it. Keep "
        "lists outside of forward, and make numbers tensors",
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
