"""Python's stack of frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["with_room"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def with_room(function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls a function that calls many others, far down.

    CPython keeps frames in blocks of 16 KiB, and a block goes back to the system with the last frame in it: where a
    loop calls across the border of two blocks, each call takes two system calls and a page fault. PyTorch's captures
    spend up to a third of their time so. This frame says that it needs half a megabyte, for which it gets a block of
    one; the frames that follow have the rest.
    """
    return function(*args, **kwargs)


with_room.__code__ = with_room.__code__.replace(co_stacksize=2**16)
