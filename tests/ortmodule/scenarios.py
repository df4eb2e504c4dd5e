"""Scenarios: a plain module and an ORTModule are treated alike, and what is observed must be the same.

A scenario takes the model and returns what it observed: numbers, tensors, modules, exceptions, nested at will.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

PUBLIC = [name for name in dir(nn.Module) if not name.startswith("_")]
SPECIAL = ["__call__", "__delattr__", "__dir__", "__getattr__", "__getstate__", "__repr__", "__setattr__"]
SPECIAL += ["__setstate__"]


class Net(nn.Module):
    """All that a module can own: containers, a shared child, buffers of each kind, frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.heads = nn.ModuleDict({"mean": nn.Linear(4, 2)})
        self.scales = nn.ParameterList([torch.full((4,), 0.5), torch.ones(4)])
        self.norm = nn.BatchNorm1d(4)
        self.again = self.layers[0]
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_parameter("nothing", None)
        self.register_buffer("shift", torch.arange(4.0))
        self.register_buffer("late", None)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        # No loop: a hook that breaks the graph inside of one leaves the function's own operators to PyTorch.
        x = torch.tanh(self.layers[0](x) * self.scales[0])
        x = torch.tanh(self.layers[1](x) * self.scales[1])
        x = self.norm(x + self.shift * self.frozen)
        return self.heads["mean"](self.again(x)) * factor


class Versioned(nn.Linear):
    """With extra state."""

    version = 3

    def get_extra_state(self) -> dict[str, int]:
        return {"version": self.version}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.version = state["version"]

    def extra_repr(self) -> str:
        return f"version={self.version}"


@dataclass(frozen=True)
class Scenario:
    """Something done to a model."""

    method: str
    run: Callable[[nn.Module], Any]
    make: Callable[[], nn.Module]

    @property
    def says(self) -> str:
        return inspect.cleandoc(self.run.__doc__ or "").rstrip(".")

    @property
    def name(self) -> str:
        return f"{self.method}-{self.run.__name__}"


SCENARIOS: list[Scenario] = []


def scenario(
    *methods: str, make: Callable[[], nn.Module] = Net
) -> Callable[[Callable[[nn.Module], Any]], Callable[[nn.Module], Any]]:
    """Files the function under the methods that it is about."""

    def register(run: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
        SCENARIOS.extend(Scenario(method, run, make) for method in methods)
        return run

    return register


def batch(rows: int = 3) -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * rows).reshape(rows, 4)


def attempt(function: Callable[[], Any]) -> Any:
    """The result, or the exception."""
    try:
        return function()
    except Exception as error:
        return error


def state(model: nn.Module) -> dict[str, Any]:
    """All tensors of a model, with their gradients, by name."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tensor, tensor.grad) for name, tensor in named.items()}


def observe(model: nn.Module, value: Any) -> Any:
    """The value in a form that compares: modules become their names within the model."""
    root = model.module if type(model) is not model.__class__ else model
    names = {id(module): name for name, module in root.named_modules()} | {id(model): ""}

    def view(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone(), value.requires_grad, value.__class__.__name__, value.is_shared()
        if isinstance(value, nn.Module):
            return "module", names.get(id(value), "elsewhere"), value.__class__.__name__
        if isinstance(value, BaseException):
            return "raised", type(value).__name__, str(value)
        if isinstance(value, Mapping):
            return [(view(key), view(item)) for key, item in value.items()]
        if isinstance(value, Set):
            return sorted(value)
        if isinstance(value, list | tuple | Iterator):
            return [view(item) for item in value]
        return value

    return view(value)
