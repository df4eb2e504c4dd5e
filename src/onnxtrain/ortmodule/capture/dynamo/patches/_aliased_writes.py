"""Fixes Dynamo's record of whether a tensor requires a gradient, after a write to another tensor with the same memory.

Dynamo (PyTorch 2.13) records this once per tensor, and updates only the record of the tensor on which a method such as
`mul_` is called. After `y[0].mul_(weight)`, `y.requires_grad` would be False, and a custom autograd function that is
applied to `y` would lose its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxtrain.ortmodule._torch import TensorVariable
from onnxtrain.ortmodule.capture.dynamo._process_wide import ProcessWide

_READERS: dict[str, Callable[[Any], bool]] = {
    "requires_grad": lambda tensor: tensor.requires_grad,
    "has_grad_fn": lambda tensor: tensor.grad_fn is not None,
}
"""Names of attributes of Dynamo's variables, with functions that compute them from the variables' fake tensors."""


def _read_fake_tensors() -> Callable[[], None]:
    """Patches Dynamo to read the tensor attributes in `_READERS` from fake tensors; returns the undo function."""
    for name, read in _READERS.items():
        setattr(TensorVariable, name, _current(name, read))

    def undo() -> None:
        for name in _READERS:
            delattr(TensorVariable, name)

    return undo


def _current(name: str, read: Callable[[Any], bool]) -> property:
    """Returns a property that reads an attribute from a variable's fake tensor.

    If the variable has no fake tensor, the property returns the value that Dynamo recorded.
    """

    def get(self: Any) -> Any:
        fake = self.proxy.node.meta.get("example_value")
        return self.__dict__[name] if fake is None else read(fake)

    def set_recorded(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    return property(get, set_recorded)


aliased_writes = ProcessWide(_read_fake_tensors)
