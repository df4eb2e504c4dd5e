"""Stop capturing a function whose graphs no later call uses."""

from __future__ import annotations

import random
import re
import warnings
import weakref
from collections.abc import Mapping
from types import BuiltinMethodType, CodeType, ModuleType
from typing import Any

import torch

MOST_CALLS = 16
"""Calls in a row that capture one function, after which Python runs it."""

MOST_OBJECTS = 8
"""Captures of one function that got an object of the call, after which Python runs it."""


class CapturesInVain:
    """Tells which functions one ORTModule captures in each call.

    A graph holds for other calls unless something is new in each of them: a method of a list that the call has made,
    the length of a list that the module keeps, a string, a number that PyTorch takes as a constant.

    Attributes:
        calls: how often the ORTModule has been called.
    """

    def __init__(self) -> None:
        self.calls = 0
        # By code: how many calls in a row have captured it, and which call was the last one.
        self._streaks: weakref.WeakKeyDictionary[CodeType, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._of_objects: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()

    def are_over(self, code: CodeType, variables: Mapping[str, Any]) -> bool:
        """Notes that there is no graph for a call of a function, and says if Python is to run it.

        Args:
            code: code of the function.
            variables: its local variables at the beginning.
        """
        length, last = self._streaks.get(code, (0, 0))
        if last != self.calls:
            length = length + 1 if last == self.calls - 1 else 1
            self._streaks[code] = (length, self.calls)
            if length == MOST_CALLS + 1:
                _warn(code)
        # Within one call, too: a function that is called for each of 100 blocks.
        if any(map(_is_of_the_call, variables.values())):
            captures = self._of_objects[code] = self._of_objects.get(code, 0) + 1
            return captures > MOST_OBJECTS
        return length > MOST_CALLS


def _warn(code: CodeType) -> None:
    warnings.warn(
        f"ORTModule: {code.co_qualname} (line {code.co_firstlineno} of {code.co_filename}) was captured in each of "
        f"{MOST_CALLS} calls. From now on it runs in PyTorch, and the layers that it calls are captured by themselves. "
        "Something is new in each call: the length of a list that the module keeps, a string, a number that PyTorch "
        "takes as a constant (a bound of clamp, an exponent). TORCH_LOGS=recompiles in the environment names it. Keep "
        "lists outside of forward, and make numbers tensors",
        stacklevel=2,
    )


def _is_of_the_call(value: Any) -> bool:
    """True if Dynamo (PyTorch 2.13) guards by the id of a value that usually lives no longer than the call."""
    if isinstance(value, BuiltinMethodType):
        owner = value.__self__
        # Functions of classes and modules live on, those of pybind11 too. Dynamo has other guards for the others.
        is_method = hasattr(type(owner), value.__name__) and not isinstance(owner, type | ModuleType)
        return is_method and not isinstance(owner, torch.Tensor | random.Random)
    return isinstance(value, re.Match)
