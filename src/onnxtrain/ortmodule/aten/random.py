"""Random numbers: drawn by PyTorch's generator at each call, so that a seed gives what it gives in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.ortmodule._lowering import Lowering, lower

Fill = Callable[[torch.Tensor], Any]


def _filled(low: Lowering, fill: Fill, generator: Any = None) -> ir.Value:
    """A random input that `fill` writes, into memory of the order that eager PyTorch has there."""
    if generator is not None:
        raise low.unsupported("a generator of its own")
    fake = low.result
    dtype, device = fake.dtype, fake.device
    order = _memory_order(fake)

    def draw(shape: Sequence[int]) -> torch.Tensor:
        tensor = torch.empty_permuted(tuple(shape), order, dtype=dtype, device=device)
        fill(tensor)
        return tensor

    return low.random_input(draw)


def _memory_order(fake: torch.Tensor) -> list[int]:
    """Returns the axes from the slowest in memory to the fastest."""
    if fake.is_contiguous():
        return list(range(fake.dim()))
    strides = fake.stride()
    return sorted(range(fake.dim()), key=lambda axis: -strides[axis])


def _numbers(low: Lowering, *values: Any) -> None:
    if any(isinstance(value, ir.Value) for value in values):
        raise low.unsupported("a distribution whose parameters depend on the input")


@lower("aten.bernoulli.p", "aten.bernoulli.float")
def bernoulli(low: Lowering, x: Any, p: Any = 0.5, generator: Any = None) -> ir.Value:
    """What `torch.nn.functional.dropout` draws."""
    _numbers(low, p)
    return _filled(low, lambda tensor: tensor.bernoulli_(p), generator)


@lower("aten.native_dropout.default")
def native_dropout(low: Lowering, x: ir.Value, p: float, train: bool | None) -> tuple[ir.Value, ir.Value]:
    raise low.unsupported("fused dropout, which draws its own numbers")


@lower("aten.rand.default", "aten.rand_like.default")
def rand(low: Lowering, like: Any, **kwargs: Any) -> ir.Value:
    return _filled(low, lambda tensor: tensor.uniform_())


@lower("aten.uniform.default")
def uniform(low: Lowering, x: Any, start: Any = 0.0, end: Any = 1.0, generator: Any = None) -> ir.Value:
    _numbers(low, start, end)
    return _filled(low, lambda tensor: tensor.uniform_(start, end), generator)


@lower("aten.randn.default", "aten.randn_like.default")
def randn(low: Lowering, like: Any, **kwargs: Any) -> ir.Value:
    return _filled(low, lambda tensor: tensor.normal_())


@lower("aten.normal.float_float")
def normal(low: Lowering, mean: Any, std: Any, size: Any, generator: Any = None, **kwargs: Any) -> ir.Value:
    _numbers(low, mean, std)
    return _filled(low, lambda tensor: tensor.normal_(mean, std), generator)


@lower("aten.normal_functional.default")
def normal_functional(
    low: Lowering, x: Any, mean: Any = 0.0, std: Any = 1.0, generator: Any = None
) -> ir.Value:
    _numbers(low, mean, std)
    return _filled(low, lambda tensor: tensor.normal_(mean, std), generator)


@lower("aten.exponential.default")
def exponential(low: Lowering, x: Any, rate: Any = 1.0, generator: Any = None) -> ir.Value:
    _numbers(low, rate)
    return _filled(low, lambda tensor: tensor.exponential_(rate), generator)


@lower("aten.randint.default", "aten.randint_like.default")
def randint(low: Lowering, *args: Any, **kwargs: Any) -> ir.Value:
    """`randint(high, size)` and `randint_like(tensor, high)`."""
    high = args[1] if "like" in str(low.node.target) else args[0]
    return _integers(low, 0, high)


@lower("aten.randint.low")
def randint_low(low: Lowering, start: Any, high: Any, size: Any, **kwargs: Any) -> ir.Value:
    return _integers(low, start, high)


@lower("aten.randint_like.low_dtype")
def randint_like_low(low: Lowering, like: Any, start: Any, high: Any, **kwargs: Any) -> ir.Value:
    return _integers(low, start, high)


def _integers(low: Lowering, start: Any, high: Any) -> ir.Value:
    _numbers(low, start, high)
    return _filled(low, lambda tensor: tensor.random_(start, high))


@lower("aten.randperm.default")
def randperm(low: Lowering, n: Any, **kwargs: Any) -> ir.Value:
    dtype, device = low.result.dtype, low.result.device
    return low.random_input(lambda shape: torch.randperm(shape[0], dtype=dtype, device=device))
