"""Forwards lookups on the class of an ORTModule: special methods (`len(model)`), and `type(model).name`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

# Special methods for the lifetime of the wrapped object or for its class, which must not be forwarded.
_NOT_FORWARDED = frozenset({"__del__", "__class_getitem__", "__set_name__"})

_USER_CLASS = "_ort_user_class"
_WRAPPED_CLASS = "_ort_wrapped_class"


_classes: weakref.WeakValueDictionary[tuple[int, int], type] = weakref.WeakValueDictionary()
"""Cache of `class_for`, by the ids of its arguments. The references are weak, so that a class that is defined in a
function can be freed."""


def class_for(cls: type, wrapped: type) -> type:
    """Returns a subclass of `cls` with the special methods of `wrapped`, e.g. `__len__`; the result is cached.

    Attributes that `cls` lacks, other than special methods, are looked up on `wrapped`.

    Args:
        cls: ORTModule, or a subclass of it.
        wrapped: the class of the wrapped module.

    Returns:
        The subclass, or `cls` itself if all attributes of `wrapped` exist in `torch.nn.Module` or `cls`, too.
    """
    # Python looks up special methods on the class, without `__getattribute__`. A class with exactly the special methods
    # of `wrapped` gives the same `hasattr(model, "__len__")`, `bool(model)` and `isinstance(model, Iterable)`.
    made = _classes.get((id(cls), id(wrapped)))
    if made is not None:
        return made
    names = {*dir(wrapped)} - {*dir(torch.nn.Module), *dir(cls), *_NOT_FORWARDED}
    if not names:
        return cls
    special = {name for name in names if _is_special(name) and callable(getattr(wrapped, name))}
    body = {"__slots__": (), "__module__": cls.__module__, "__doc__": cls.__doc__}
    # If `cls` has a metaclass, the new metaclass must derive from it.
    meta = type("_Forwarding", (_Forwarding, type(cls)), {}) if type(cls) is not type else _Forwarding
    forwarders = {name: _forwarder(name) for name in special}
    result: type = meta(
        cls.__name__, (cls,), {**body, _USER_CLASS: cls, _WRAPPED_CLASS: wrapped, **forwarders}
    )
    return _classes.setdefault((id(cls), id(wrapped)), result)


class _Forwarding(type):
    """Metaclass that looks up missing class attributes on the wrapped class, e.g. for `type(self).method(self)`."""

    def __getattr__(cls, name: str) -> Any:
        if name == _WRAPPED_CLASS or _is_special(name):
            raise AttributeError(f"type object '{cls.__name__}' has no attribute '{name}'")
        return getattr(getattr(cls, _WRAPPED_CLASS), name)


def user_class(cls: type) -> type:
    """Returns the class from which :func:`class_for` derived `cls`, or `cls` itself if it was not derived."""
    origin: type = vars(cls).get(_USER_CLASS, cls)
    return origin


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _forwarder(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    method.__name__ = method.__qualname__ = name
    return method
