"""Special methods (`len(model)`, `model[0]`, `for layer in model`): Python looks them up on the class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["class_for", "user_class"]

# They concern the life of the wrapped object, or its class.
_NOT_FORWARDED = frozenset({"__del__", "__class_getitem__", "__set_name__"})

_USER_CLASS = "_ort_user_class"


@functools.cache
def class_for(cls: type, wrapped: type) -> type:
    """A subclass of `cls` with the special methods that `wrapped` has and `torch.nn.Module` has not.

    A subclass, not methods that may fail: `hasattr(model, "__len__")`, `bool(model)` and
    `isinstance(model, Iterable)` then answer as for the wrapped module.
    """
    names = {
        name
        for name in dir(wrapped)
        if name.startswith("__") and name.endswith("__") and callable(getattr(wrapped, name))
    }
    names -= {*dir(torch.nn.Module), *dir(cls), *_NOT_FORWARDED}
    if not names:
        return cls
    forwarders = {name: _forwarder(name) for name in names}
    body = {"__slots__": (), "__module__": cls.__module__, "__doc__": cls.__doc__, _USER_CLASS: cls}
    return type(cls.__name__, (cls,), {**body, **forwarders})


def user_class(cls: type) -> type:
    """The class that :func:`class_for` made `cls` from; `cls` itself if it did not."""
    origin: type = vars(cls).get(_USER_CLASS, cls)
    return origin


def _forwarder(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    method.__name__ = method.__qualname__ = name
    return method
