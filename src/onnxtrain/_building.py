"""Changes two settings of the interpreter while graphs are built: no garbage collection, and room for deep calls."""

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

    The collector would scan all objects of the growing graph again and again, which takes a third of the building time
    and frees nothing, as nearly all of them stay.
    """
    # Off already, by the user or by an outer pause: then it must stay off afterwards.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def with_room(function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls a function with deep recursion, such as a capture of PyTorch, in a block of frames that fits all of it.

    CPython (3.11) keeps frames in blocks of 16 KiB and returns a block to the system with its last frame. A loop that
    calls across the border of two blocks costs two system calls and a page fault per call: up to a third of the time of
    PyTorch's captures.
    """
    return function(*args, **kwargs)


# This frame claims a stack of half a megabyte, so that CPython allocates a block of a megabyte for it. The frames of
# the calls inside take the rest of that block.
with_room.__code__ = with_room.__code__.replace(co_stacksize=2**16)
