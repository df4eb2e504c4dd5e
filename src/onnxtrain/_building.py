"""Changes settings of the interpreter while graphs are built: less garbage collection, and room for deep calls."""

from __future__ import annotations

import gc
import threading
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


_leaving_out = threading.Lock()
_user_freezes = False


@contextmanager
def without_older_objects() -> Iterator[None]:
    """Has the cyclic garbage collector scan only the objects that come into being while the context is open.

    A capture makes enough objects for the collector to scan all of the process once or twice: 0.2 to 0.4 s for those of
    PyTorch and its Dynamo, of which it frees nothing.
    """
    global _user_freezes
    # Within another such context there is nothing left to do. What the user has frozen must stay so. Counting it takes
    # up to 0.1 s, so that it is done once.
    if _user_freezes or not _leaving_out.acquire(blocking=False):
        yield
        return
    try:
        if gc.get_freeze_count():
            _user_freezes = True
            yield
            return
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()
    finally:
        _leaving_out.release()


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
