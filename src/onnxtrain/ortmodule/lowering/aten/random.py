"""Lowers random ops to graph inputs that PyTorch's generator fills at each call, so seeds work as in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from torch.nn import functional

from onnxtrain.ortmodule._bernoulli import draws_masks, fill_mask
from onnxtrain.ortmodule._torch import get_dynamic_layer_stack_depth
from onnxtrain.ortmodule.lowering._table import (
    DRAWN_BETWEEN_PARTS,
    DTYPES,
    Lowering,
    UnsupportedATenOp,
    lower,
    memory_order,
)

Fill = Callable[[torch.Tensor], Any]
"""Fills a tensor with random numbers, in place."""


def _random_input(low: Lowering, fake: torch.Tensor, fill: Fill, generator: Any = None) -> ir.Value:
    """Adds a graph input that `fill` fills with random numbers at each call, in the memory layout of `fake`."""
    if generator is not None:
        raise low.unsupported("a generator other than PyTorch's default one")
    try:
        return low.random_input(_draw_function(fake, fill), fake)
    except UnsupportedATenOp as error:
        raise UnsupportedATenOp(f"{error}, {DRAWN_BETWEEN_PARTS}") from None


def _draw_function(fake: torch.Tensor, fill: Fill) -> Callable[[Sequence[int]], torch.Tensor]:
    """Returns a function that takes a shape and draws a tensor of random numbers with `fill`.

    Args:
        fake: fake tensor with the dtype, the device and the memory layout of the drawn tensors.
        fill: fills a tensor with random numbers, in place.
    """
    dtype, device = fake.dtype, fake.device
    # Random numbers are written in memory order, so equal results need the strides of eager PyTorch.
    order = memory_order(fake)

    def draw(shape: Sequence[int]) -> torch.Tensor:
        tensor = torch.empty_permuted(tuple(shape), order, dtype=dtype, device=device)
        fill(tensor)
        return tensor

    return draw


def _check_constant(low: Lowering, *values: Any) -> None:
    """Raises UnsupportedATenOp if a distribution's parameter is computed in the graph.

    Such a parameter is unknown when PyTorch draws the random numbers, which are inputs of the graph.
    """
    if any(isinstance(value, ir.Value) for value in values):
        raise low.unsupported("parameters of a distribution that are computed in the graph")


@lower("aten.bernoulli.p")
def bernoulli(low: Lowering, x: Any, p: Any = 0.5, generator: Any = None) -> ir.Value:
    _check_constant(low, p)
    return _random_input(low, low.result, lambda tensor: tensor.bernoulli_(p), generator)


_LIBRARY = torch.library.Library("onnxtrain", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "bernoulli_like(Tensor x, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)


@torch.library.register_fake("onnxtrain::bernoulli_like")  # type: ignore[untyped-decorator]
def _fake_bernoulli_like(x: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(x)


@lower("onnxtrain.bernoulli_like.default")
def bernoulli_like(low: Lowering, x: ir.Value, p: Any) -> ir.Value:
    # A custom op, because tracing `torch.empty_like(x).bernoulli_(p)` loses the memory order of `x`.
    _check_constant(low, p)
    return _keep_mask(low, low.result, p)


def _keep_mask(low: Lowering, like: torch.Tensor, p: float) -> ir.Value:
    """Adds a graph input for the mask that dropout draws; returns it in the dtype of `like`, a fake tensor."""
    if like.device.type == "cpu" and draws_masks():
        mask = _random_input(low, like.to(torch.bool), lambda tensor: fill_mask(tensor, p))
        return low.op.Cast(mask, to=DTYPES[like.dtype])
    return _random_input(low, like, lambda tensor: fill_keep_mask(tensor, p))


def fill_keep_mask(noise: torch.Tensor, p: float) -> torch.Tensor:
    """Fills a tensor with the mask that eager PyTorch's dropout draws: 1 with probability `p`, else 0.

    Returns:
        The same tensor.
    """
    # On GPUs, the dropout kernel draws in a different order than `bernoulli_`.
    if noise.is_cuda and noise.numel():
        return noise.copy_(torch.native_dropout(torch.ones_like(noise), 1 - p, True)[1])
    return noise.bernoulli_(p)


def fill_with_bernoulli(x: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    """Replaces `x.bernoulli_(p)` for tracing, and draws in the memory order of `x`, as eager PyTorch does."""
    return x.copy_(torch.ops.onnxtrain.bernoulli_like(x, p))


def _probability(p: float) -> float:
    """Returns a probability as a float. A symbol whose value depends on the data is returned unchanged."""
    # Dynamo makes the attribute `p` a symbol if two modules of a class differ in it. Dropout takes no symbols: PyTorch
    # has guarded the graph by the value.
    return float(p) if isinstance(p, torch.SymFloat) and p.node.has_hint() else p


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Replaces `dropout` with the ops that eager PyTorch runs on the CPU, and supports symbolic sizes."""
    p = _probability(p)
    # Only PyTorch's own operators know how vmap draws, e.g. one mask for all examples with `randomness="same"`.
    if not training or p == 0 or isinstance(p, torch.SymFloat) or get_dynamic_layer_stack_depth():
        return functional.dropout(x, p, training, inplace)
    # Eager PyTorch draws nothing if p == 1.
    if p == 1:
        return x.mul_(0.0) if inplace else x * 0.0
    noise = torch.ops.onnxtrain.bernoulli_like(x, 1 - p) / (1 - p)
    return x.mul_(noise) if inplace else x * noise


def _feature_dropout(
    function: Callable[..., torch.Tensor],
    rank: int,
    x: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """Replaces `dropout1d`, `dropout2d` or `dropout3d`, which drop whole channels.

    Args:
        function: the replaced function, which is called if there is nothing to draw or the rank of `x` is not `rank`.
        rank: rank of a batch, e.g. 4 for `dropout2d`.
        x: [batch, channels, *spatial].
        p: probability of zeroing a channel.
        training: True to apply dropout.
        inplace: True to write the result to `x`.
    """
    p = _probability(p)
    nothing_to_draw = not training or p == 0 or p == 1 or isinstance(p, torch.SymFloat)
    if nothing_to_draw or x.dim() != rank or get_dynamic_layer_stack_depth():
        return function(x, p, training, inplace)
    channels = x.new_empty((x.shape[0], x.shape[1], *[1] * (rank - 2)))
    noise = torch.bernoulli(channels, 1 - p) / (1 - p)
    return x.mul_(noise) if inplace else x * noise


DROPOUTS: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    functional.dropout1d: partial(_feature_dropout, functional.dropout1d, 3),
    functional.dropout2d: partial(_feature_dropout, functional.dropout2d, 4),
    functional.dropout3d: partial(_feature_dropout, functional.dropout3d, 5),
}
"""Replacements for dropout functions when a Dynamo graph is traced."""


@lower("aten.native_dropout.default")
def native_dropout(
    low: Lowering, x: ir.Value, p: Any, train: bool | None
) -> tuple[ir.Value, ir.Value | None]:
    """Lowers to x * bernoulli(1 - p) / (1 - p), and the mask of kept elements."""
    _check_constant(low, p)
    # Unlike `dropout`, PyTorch's CPU kernel draws for p = 0 and p = 1, too.
    draws = train is not False and (0 < p < 1 or low.fake(0).device.type == "cpu")
    if not draws and (train is False or p == 0):
        return x, low.op.Cast(low.op.ones_like(x), to=ir.DataType.BOOL) if low.uses_result(1) else None
    if not draws:
        return low.op.Mul(x, 0.0), low.op.Cast(low.op.zeros_like(x), to=ir.DataType.BOOL)
    noise = _keep_mask(low, low.result[0], 1 - p)
    kept = low.op.Cast(noise, to=ir.DataType.BOOL) if low.uses_result(1) else None
    # All of the noise is 0 for p = 1.
    return low.op.Mul(x, low.op.Div(noise, 1 - p) if p < 1 else noise), kept


@lower("aten.rand.default", "aten.rand_like.default")
def rand(low: Lowering, like: Any, **kwargs: Any) -> ir.Value:
    return _random_input(low, low.result, lambda tensor: tensor.uniform_())


@lower("aten.randn.default", "aten.randn_like.default")
def randn(low: Lowering, like: Any, **kwargs: Any) -> ir.Value:
    return _random_input(low, low.result, lambda tensor: tensor.normal_())


@lower("aten.normal.float_float")
def normal(low: Lowering, mean: Any, std: Any, size: Any, generator: Any = None, **kwargs: Any) -> ir.Value:
    _check_constant(low, mean, std)
    return _random_input(low, low.result, lambda tensor: tensor.normal_(mean, std), generator)


def _in_place_fill(method: str) -> Callable[..., ir.Value]:
    """Returns the lowering of a functionalized in-place method of `torch.Tensor`, e.g. "uniform_"."""

    def lowered(low: Lowering, x: Any, *parameters: Any, generator: Any = None) -> ir.Value:
        _check_constant(low, *parameters)
        return _random_input(low, low.result, lambda tensor: getattr(tensor, method)(*parameters), generator)

    return lowered


for _name in ("uniform", "exponential", "geometric", "log_normal", "cauchy"):
    lower(f"aten.{_name}.default")(_in_place_fill(f"{_name}_"))
lower("aten.normal_functional.default")(_in_place_fill("normal_"))


@lower("aten.randint.default", "aten.randint_like.default")
def randint(low: Lowering, *args: Any, **kwargs: Any) -> ir.Value:
    # The overloads are `randint(high, size)` and `randint_like(tensor, high)`.
    high = args[1] if "like" in str(low.node.target) else args[0]
    return _random_integers(low, 0, high)


@lower("aten.randint.low")
def randint_low(low: Lowering, start: Any, high: Any, size: Any, **kwargs: Any) -> ir.Value:
    return _random_integers(low, start, high)


@lower("aten.randint_like.low_dtype")
def randint_like_low(low: Lowering, like: Any, start: Any, high: Any, **kwargs: Any) -> ir.Value:
    return _random_integers(low, start, high)


def _random_integers(low: Lowering, start: Any, high: Any) -> ir.Value:
    """Adds a graph input of random integers, uniform in [start, high)."""
    _check_constant(low, start, high)
    return _random_input(low, low.result, lambda tensor: tensor.random_(start, high))


@lower("aten.randperm.default")
def randperm(low: Lowering, n: Any, **kwargs: Any) -> ir.Value:
    dtype, device = low.result.dtype, low.result.device
    return low.random_input(lambda shape: torch.randperm(shape[0], dtype=dtype, device=device), low.result)


@lower("aten.multinomial.default")
def multinomial(
    low: Lowering, weights: ir.Value, count: int, replacement: bool = False, *, generator: Any = None
) -> ir.Value:
    op = low.op
    if generator is not None:
        raise low.unsupported("a generator other than PyTorch's default one")
    # As in PyTorch's CPU kernels: without replacement, the indices of the largest weight / exponential noise; with
    # replacement, a search in the cumulative probabilities. Sampling has no gradient.
    weights = low.op.stop_gradient(weights)
    invalid = "invalid multinomial distribution ({})"
    not_negative, finite = op.GreaterOrEqual(weights, 0.0), op.Not(op.IsInf(weights))
    total = op.ReduceMax(weights, [-1], keepdims=0)
    if not replacement or count == 1:
        low.check(
            op.And(not_negative, finite), "probability tensor contains either `inf`, `nan` or element < 0"
        )
        low.check(op.Greater(total, 0.0), invalid.format("sum of probabilities <= 0"))
        noise = low.random_input(
            _draw_function(low.fake(0), lambda tensor: tensor.exponential_()), low.fake(0)
        )
        _, places = op.TopK(op.Div(weights, noise), [count], axis=-1, _outputs=2)
        return places
    low.check(not_negative, invalid.format("encountering probability entry < 0"))
    low.check(finite, invalid.format("encountering probability entry = infinity or NaN"))
    low.check(op.Greater(total, 0.0), invalid.format("sum of probabilities <= 0"))
    noise = low.random_input(
        lambda shape: torch.empty(tuple(shape), dtype=torch.float64).uniform_(), low.result.double()
    )
    sums = op.CumSum(weights, op.const(-1))
    # PyTorch compares float64 noise with probabilities in the dtype of the weights.
    cumulative = op.Cast(op.Div(sums, op.Gather(sums, [-1], axis=-1)), to=ir.DataType.DOUBLE)
    before = op.Less(op.Unsqueeze(cumulative, [-2]), op.Unsqueeze(noise, [-1]))
    return op.ReduceSum(op.Cast(before, to=ir.DataType.INT64), [-1], keepdims=0)
