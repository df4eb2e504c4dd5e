"""Every operator that takes Python numbers, given numbers that were read from tensors, beside eager PyTorch.

The operators and their arguments are PyTorch's own test samples (`op_db`). Each number among them is the largest
element of a parameter, read by `item()`. Several operators share a program, as most of the time goes into captures.

With `ONNXTRAIN_AOT_EAGER=1` each program also runs under `torch.compile(backend="aot_eager")`, which must agree with
eager PyTorch but for the operators in `DIFFERENT_IN_AOT_EAGER`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.gradcheck import GradcheckError

from onnxtrain.ortmodule import ORTModule

SHARED = 8
"""Operators of one program."""

UNINITIALISED = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "resize_",
    "resize_as_",
)

WRONG_IN_PYTORCH = ("as_strided_scatter",)
"""Operators whose derivative in eager PyTorch (2.13) is wrong, and under ORTModule right."""


DIFFERENT_IN_AOT_EAGER = frozenset({
    "linalg.norm", "linalg.norm.subgradients_at_zero", "nn.functional.cosine_embedding_loss",
    "nn.functional.hinge_embedding_loss",
})  # fmt: skip
"""Operators that `aot_eager` (PyTorch 2.13) computes or differentiates otherwise than eager PyTorch."""


@functools.cache
def _operators() -> dict[str, Any]:
    """Returns PyTorch's descriptions of operators by name, e.g. `clamp` or `nn.functional.elu`."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        f"{op.name}.{op.variant_test_name}".rstrip("."): op
        for op in op_db
        if torch.float32 in op.dtypes and op.name not in {*UNINITIALISED, *WRONG_IN_PYTORCH}
    }


class Applied(nn.Module):
    """Applies an operator to a sample of its arguments.

    Args:
        op: PyTorch's description of it.
        sample: of its arguments; tensors become parameters, numbers the largest elements of parameters.
    """

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op = op.op
        self.tensors, self.numbers = nn.ParameterList(), nn.ParameterList()
        self.integers: list[bool] = []
        self.arguments = self._kept([sample.input, *sample.args])
        self.keywords = self._kept(dict(sample.kwargs))

    def _kept(self, value: Any) -> Any:
        """Keeps an argument and returns what stands for it; structures are kept part by part."""
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(map(self._kept, value))
        if isinstance(value, dict):
            return {key: self._kept(part) for key, part in value.items()}
        if isinstance(value, torch.Tensor):
            differentiable = value.is_floating_point() or value.is_complex()
            self.tensors.append(nn.Parameter(value.detach().clone(), requires_grad=differentiable))
            return _Place("tensor", len(self.tensors) - 1)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            self.numbers.append(nn.Parameter(torch.tensor([float(value), value - 1.0])))
            self.integers.append(isinstance(value, int))
            return _Place("number", len(self.numbers) - 1)
        return value

    def _given(self, value: Any) -> Any:
        if isinstance(value, _Place):
            if value.kind == "tensor":
                tensor = self.tensors[value.index]
                return tensor * 1 if tensor.requires_grad else tensor
            number = self.numbers[value.index].max().item()
            return int(number) if self.integers[value.index] else number
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)([self._given(part) for part in value])
        if isinstance(value, dict):
            return {key: self._given(part) for key, part in value.items()}
        return value

    def forward(self) -> list[torch.Tensor]:
        result = self.op(*self._given(self.arguments), **self._given(self.keywords))
        return [part for part in _flat(result) if isinstance(part, torch.Tensor)]


class _Place:
    """Stands for an argument that a module keeps as a parameter."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind, self.index = kind, index


class Together(nn.Module):
    def __init__(self, modules: list[Applied]) -> None:
        super().__init__()
        self.all = nn.ModuleList(modules)

    def forward(self) -> list[list[torch.Tensor]]:
        return [module() for module in self.all]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def _trained(model: Callable[[], Any], modules: list[Applied]) -> list[tuple[list[torch.Tensor], list[Any]]]:
    """Returns the results and gradients of each operator."""
    torch.manual_seed(0)
    results = model()
    scores = [
        (part.abs() if part.is_complex() else part).sum()
        for parts in results
        for part in parts
        if part.requires_grad
    ]
    sum(scores, torch.zeros(())).backward() if scores else None
    return [
        ([part.detach() for part in parts], [p.grad for p in module.parameters()])
        for parts, module in zip(results, modules, strict=True)
    ]


def _made(name: str) -> Applied | None:
    """Returns the first sample of an operator that has numbers and that eager PyTorch computes and differentiates."""
    op = _operators()[name]
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), 20):
        try:
            module = Applied(op, sample)
            results = _trained(lambda module=module: [module()], [module])[0][0]
        except Exception:  # samples of sparse tensors, and those that have no gradient
            continue
        if len(module.numbers) and results and all(part.layout == torch.strided for part in results):
            return Applied(op, sample)
    return None


def _differs(got: list[Any], expected: list[Any]) -> str | None:
    for one, other in itertools.zip_longest(got, expected):
        try:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)
        except AssertionError as error:
            return str(error)
    return None


def _names() -> list[list[str]]:
    names = sorted(_operators())
    return [names[first : first + SHARED] for first in range(0, len(names), SHARED)]


def _made_each(names: list[str]) -> dict[str, Applied]:
    return {name: module for name in names if (module := _made(name)) is not None}


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("names", _names(), ids=lambda names: names[0])
def test_numbers_read_from_tensors_are_arguments(names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators that are deprecated, and those that run in PyTorch
        modules, twins = _made_each(names), _made_each(names)
        expected = _trained(Together([*modules.values()]), [*modules.values()])
        found = _trained(ORTModule(Together([*twins.values()])), [*twins.values()])
        assert not _differences([*modules], found, expected)
        if os.environ.get("ONNXTRAIN_AOT_EAGER"):
            compiled = _by_aot_eager(names)
            different = {
                name
                for name, seen in compiled.items()
                if _differences([name], [seen], [expected[[*modules].index(name)]])
            }
            assert different == DIFFERENT_IN_AOT_EAGER & set(names)


def _by_aot_eager(names: list[str]) -> dict[str, Any]:
    """Returns the results and gradients of each operator, captured with its numbers in the graph where Dynamo can."""
    found = {}
    for name, module in _made_each(names).items():
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            try:
                compiled = torch.compile(Together([module]), backend="aot_eager")
                found[name] = _trained(compiled, [module])[0]
            except Exception:  # operators that cannot be captured so
                continue
    return found


def _differences(names: list[str], found: list[Any], expected: list[Any]) -> dict[str, str]:
    """Returns what differs, by the name of the operator."""
    return {
        name: difference
        for name, got, want in zip(names, found, expected, strict=True)
        for difference in [_differs([*got[0], *got[1]], [*want[0], *want[1]])]
        if difference is not None
    }


def test_derivative_of_pytorch_is_still_wrong() -> None:
    """Finite differences say so; else the operator belongs to the others."""
    x, part = (torch.rand(size, dtype=torch.double, requires_grad=True) for size in (4, 2))
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(lambda *given: torch.as_strided_scatter(*given, (2,), (2,), 0), (x, part))
