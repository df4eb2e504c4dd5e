"""Run a program on a module in eager PyTorch and on an ORTModule of its copy, and compare what the program returns."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import DebugOptions, FallbackPolicy, ORTModule


def strict(module: nn.Module) -> ORTModule:
    """Wrap a module so that a graph ONNX Runtime cannot run raises instead of running in PyTorch."""
    return ORTModule(module, DebugOptions(fallback_policy=FallbackPolicy.DISABLE))


class Of(nn.Module):
    """A function of this module and its inputs; tensors among the parts become buffers."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if type(part) is torch.Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def compare(
    plain: nn.Module,
    program: Callable[[nn.Module], Any],
    *,
    wrap: Callable[[nn.Module], ORTModule] = ORTModule,
    warns: str | None = None,
    ignore: str | None = None,
    exact: bool = False,
    **tolerance: Any,
) -> ORTModule:
    """Assert that a program returns the same for an ORTModule as for the module itself.

    Args:
        plain: the module. The ORTModule is made of a copy of it.
        program: is called with the ORTModule, then with the module, from the same state of PyTorch's generator.
            It returns tensors, None, numbers and texts, nested in lists, tuples and dictionaries.
        wrap: makes the ORTModule, e.g. `strict`.
        warns: pattern of a warning that the ORTModule has to give.
        ignore: pattern of the messages of warnings to ignore.
        exact: compare with the module in float64, regardless of dtypes. `program` converts its inputs.
        tolerance: of `assert_same`.

    Returns:
        The ORTModule, for its report.
    """
    ours = wrap(copy.deepcopy(plain))
    plain = copy.deepcopy(plain).double() if exact else plain
    generator = torch.get_rng_state()
    with warnings.catch_warnings():
        if ignore is not None:
            warnings.filterwarnings("ignore", ignore)
        with pytest.warns(UserWarning, match=warns) if warns else nullcontext():
            got = program(ours)
        torch.set_rng_state(generator)
        want = program(plain)
    assert_same(got, want, **tolerance, **({"check_dtype": False} if exact else {}))
    return ours


def assert_same(
    got: Any, want: Any, where: str = "result", *, rtol: float = 1e-4, atol: float = 1e-5, **options: Any
) -> None:
    """Assert that two nested results are equal, tensors up to rounding."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{where}: {got} is not a tensor"
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda m: f"{where}: {m}", **options)
    elif isinstance(want, dict):
        assert isinstance(got, dict), where
        assert got.keys() == want.keys(), where
        for name, value in want.items():
            assert_same(got[name], value, f"{where}[{name!r}]", rtol=rtol, atol=atol, **options)
    elif isinstance(want, list | tuple):
        assert isinstance(got, list | tuple), where
        assert len(got) == len(want), f"{where}: {got} is not {want}"
        for index, pair in enumerate(zip(got, want, strict=True)):
            assert_same(*pair, f"{where}[{index}]", rtol=rtol, atol=atol, **options)
    else:
        assert got == want, f"{where}: {got!r} is not {want!r}"


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def sum_of_squares(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss that a step has unless it says otherwise."""
    return sum(output.square().sum() for output in outputs)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradient of each parameter by name; None where there is none."""
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def step(
    module: nn.Module,
    *inputs: Any,
    loss: Callable[[list[torch.Tensor]], Any] = sum_of_squares,
    seed: int | None = None,
    differentiate_inputs: bool = True,
    used_later: bool = False,
    **backward: Any,
) -> dict[str, Any]:
    """Do one forward and backward pass; return everything in which two modules could differ.

    Args:
        module: its gradients are cleared first.
        inputs: of the module; it gets copies, so that it may write to them.
        loss: of the floating-point outputs that require a gradient.
        seed: of PyTorch's generator.
        differentiate_inputs: whether floating-point inputs require a gradient.
        used_later: whether the loss also depends on what the inputs hold after the call.
        backward: keyword arguments of `backward`.
    """
    if seed is not None:
        torch.manual_seed(seed)
    module.zero_grad()
    leaves = [
        x.detach().clone().requires_grad_(differentiate_inputs and (x.is_floating_point() or x.is_complex()))
        if isinstance(x, torch.Tensor)
        else x
        for x in inputs
    ]
    # A leaf that requires a gradient must not be written to; what is computed from it may.
    arguments = [x * 1 if isinstance(x, torch.Tensor) and x.requires_grad else x for x in leaves]
    result = module(*arguments)
    outputs = tensors(result)
    total = loss(scored) if (scored := [output for output in outputs if output.requires_grad]) else None
    if used_later:
        total = (0 if total is None else total) + sum(x.pow(3).sum() for x in tensors(arguments))
    if total is not None:
        total.backward(**backward)
    return {
        "results": _detached(result),
        "requires_grad": [output.requires_grad for output in outputs],
        "inputs": _detached(arguments),
        "gradients of inputs": [x.grad for x in leaves if isinstance(x, torch.Tensor)],
        "gradients": {name: None if g is None else g.detach() for name, g in gradients(module).items()},
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "generator": torch.rand(()),
    }


def _detached(value: Any) -> Any:
    """Copy a nested result: what is done to its tensors afterwards does not change the copy."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _detached(part) for name, part in value.items()}
    return [_detached(part) for part in value] if isinstance(value, list | tuple) else value


def compare_steps(
    plain: nn.Module,
    *batches: Any,
    loss: Callable[[list[torch.Tensor]], Any] = sum_of_squares,
    differentiate_inputs: bool = True,
    used_later: bool = False,
    backward: dict[str, Any] | None = None,
    **options: Any,
) -> ORTModule:
    """Assert that one `step` per batch does the same as in eager PyTorch; return the ORTModule.

    A batch is a tensor, the shape of a random one, or a list of inputs. `options` are those of `compare`.
    """
    drawn = [torch.randn(batch) if isinstance(batch, tuple) else batch for batch in batches]

    def program(module: nn.Module) -> list[dict[str, Any]]:
        return [
            step(
                module,
                *(batch if isinstance(batch, list) else [batch]),
                loss=loss,
                seed=seed,
                differentiate_inputs=differentiate_inputs,
                used_later=used_later,
                **backward or {},
            )
            for seed, batch in enumerate(drawn)
        ]

    return compare(plain, program, **options)


def pair(module: nn.Module) -> tuple[ORTModule, nn.Module]:
    """Return an ORTModule that must not leave a graph to PyTorch, and a plain copy of the module."""
    plain = copy.deepcopy(module)
    return strict(module), plain


def assert_same_step(ours: nn.Module, plain: nn.Module, *inputs: Any, **options: Any) -> None:
    """Assert that one `step` of two modules does the same; the inputs require no gradient."""
    generator = torch.get_rng_state()
    got = step(ours, *inputs, differentiate_inputs=False, **options)
    torch.set_rng_state(generator)
    assert_same(got, step(plain, *inputs, differentiate_inputs=False, **options))


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Return the norm of the difference of all values together, relative to that of the wanted ones."""
    difference = sum(float((a - b).square().sum()) for a, b in zip(got, want, strict=True)) ** 0.5
    return difference / sum(float(b.square().sum()) for b in want) ** 0.5
