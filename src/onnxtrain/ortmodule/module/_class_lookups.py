"""Give an ORTModule what Python looks up on the class: special methods (`len(model)`), and `type(model).name`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

# Special methods that concern the life of the wrapped object or its class, and not what the object does.
_NOT_FORWARDED = frozenset({"__del__", "__class_getitem__", "__set_name__"})

_USER_CLASS = "_ort_user_class"
_WRAPPED_CLASS = "_ort_wrapped_class"


_classes: weakref.WeakValueDictionary[tuple[int, int], type] = weakref.WeakValueDictionary()
"""By the ids of `cls` and `wrapped`. Weak, so that a class that is defined in a function can be dropped."""


def class_for(cls: type, wrapped: type) -> type:
    """Returns a subclass of `cls` with the special methods that the class `wrapped` adds to `torch.nn.Module`.

    Args:
        cls: ORTModule, or a subclass of it.
        wrapped: the class of the wrapped module.
    """
    # Python looks special methods up on the class, past `__getattribute__`. A class that has those of `wrapped`, and no
    # others, answers `hasattr(model, "__len__")`, `bool(model)` and `isinstance(model, Iterable)` as `wrapped` does.
    made = _classes.get((id(cls), id(wrapped)))
    if made is not None:
        return made
    names = {*dir(wrapped)} - {*dir(torch.nn.Module), *dir(cls), *_NOT_FORWARDED}
    if not names:
        return cls
    special = {name for name in names if _is_special(name) and callable(getattr(wrapped, name))}
    body = {"__slots__": (), "__module__": cls.__module__, "__doc__": cls.__doc__}
    # `type(model)` may have a metaclass of the user's, which must stay one of the bases.
    meta = type("_Forwarding", (_Forwarding, type(cls)), {}) if type(cls) is not type else _Forwarding
    forwarders = {name: _forwarder(name) for name in special}
    result: type = meta(
        cls.__name__, (cls,), {**body, _USER_CLASS: cls, _WRAPPED_CLASS: wrapped, **forwarders}
    )
    return _classes.setdefault((id(cls), id(wrapped)), result)


class _Forwarding(type):
    """Looks attributes of the class up on the wrapped class: transformers calls `type(self).method(self)`."""

    def __getattr__(cls, name: str) -> Any:
        if name == _WRAPPED_CLASS or _is_special(name):
            raise AttributeError(f"type object '{cls.__name__}' has no attribute '{name}'")
        return getattr(getattr(cls, _WRAPPED_CLASS), name)


def user_class(cls: type) -> type:
    """Returns the class that :func:`class_for` made `cls` from, or `cls` itself."""
    origin: type = vars(cls).get(_USER_CLASS, cls)
    return origin


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _forwarder(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    method.__name__ = method.__qualname__ = name
    return method
