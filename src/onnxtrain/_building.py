"""Two settings of the interpreter for building graphs: no garbage collection, and room for deep calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


@contextmanager
def without_collection() -> Iterator[None]:
    """Pauses the cyclic garbage collector while a graph is built; also a decorator.

    A graph is made of objects that know each other and that nearly all stay: looking through them, again and again as
    they grow, takes a third of the time that building takes, and frees nothing.
    """
    if not gc.isenabled():  # by the user, or by an outer pause
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def with_room(function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls a function that calls many others, far down.

    CPython keeps frames in blocks of 16 KiB, and a block goes back to the system with the last frame in it: where a
    loop calls across the border of two blocks, each call takes two system calls and a page fault. PyTorch's captures
    spend up to a third of their time so. This frame says that it needs half a megabyte, for which it gets a block of
    one; the frames that follow have the rest.
    """
    return function(*args, **kwargs)


with_room.__code__ = with_room.__code__.replace(co_stacksize=2**16)
