"""Normalisations."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.ortmodule._lowering import Lowering, lower


@lower("aten.native_batch_norm.default")
def native_batch_norm(
    low: Lowering,
    x: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value | None,
    running_var: ir.Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    """BatchNormalization. In training, PyTorch's op also writes its arguments 3 and 4, the running statistics."""
    op = low.op
    if low.uses_result(1) or low.uses_result(2):
        raise low.unsupported("the saved statistics as results")
    one = weight if weight is not None else _channels(low, x, 1)
    zero = bias if bias is not None else _channels(low, x, 0)
    if not training:
        return op.BatchNormalization(x, one, zero, running_mean, running_var, epsilon=eps), None, None
    zeros = _channels(low, x, 0)
    # With momentum 0 the running statistics of the result are those of the batch; the variance is biased.
    y, mean, var = op.BatchNormalization(
        x, one, zero, zeros, zeros, epsilon=eps, momentum=0.0, training_mode=1, _outputs=3
    )
    for index, running, batch in ((3, running_mean, mean), (4, running_var, var)):
        if running is None:
            continue
        factor: Any = momentum
        if index == 4:
            factor = op.Mul(_bessel(low, x), op.const(momentum, running.dtype))
        batch.shape = running.shape
        updated = op.Add(op.Mul(running, 1.0 - momentum), op.Mul(low.tensor(batch, running.dtype), factor))  # type: ignore[arg-type]
        updated.shape = running.shape
        low.env[low.node.args[index]] = updated  # type: ignore[index]
    return y, None, None


def _channels(low: Lowering, x: ir.Value, number: int) -> ir.Value:
    """Returns a vector with a number for each channel."""
    channels = low.fake(0).shape[1]
    if isinstance(channels, int):
        return low.op.const([float(number)] * channels, low.dtype)
    value: ir.Value = low.op.Expand(low.op.const(float(number), low.dtype), low.op.dim(x, 1))
    value.shape = ir.Shape([str(channels)])
    return value


def _bessel(low: Lowering, x: ir.Value) -> ir.Value:
    """Returns n / (n - 1) for the n numbers that each channel has."""
    shape = low.fake(0).shape
    sizes = [shape[0], *shape[2:]]
    if all(isinstance(size, int) for size in sizes):
        n = math.prod(sizes)
        return low.op.const(n / (n - 1) if n > 1 else math.inf, low.dtype)
    op = low.op
    count = op.Cast(op.Div(op.Size(x), op.Squeeze(op.dim(x, 1))), to=low.dtype)
    return op.Div(count, op.Sub(count, 1.0))  # type: ignore[no-any-return]


@lower("aten.native_layer_norm.default")
def native_layer_norm(
    low: Lowering,
    x: ir.Value,
    shape: list[Any],
    weight: ir.Value | None,
    bias: ir.Value | None,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    op = low.op
    if weight is None:
        weight = op.Expand(op.const(1.0, low.dtype), low.ints(shape))
        weight.shape = ir.Shape([*(x.shape or ())][-len(shape) :])
    inputs = (x, weight) if bias is None else (x, weight, bias)
    attributes = {"axis": -len(shape), "epsilon": eps}
    if low.uses_result(1) or low.uses_result(2):
        y, mean, inverse = op.LayerNormalization(*inputs, **attributes, _outputs=3)
        return y, mean, inverse
    return op.LayerNormalization(*inputs, **attributes), None, None


@lower("aten.native_group_norm.default")
def native_group_norm(
    low: Lowering,
    x: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    n: Any,
    c: Any,
    hxw: Any,
    group: int,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    if low.uses_result(1) or low.uses_result(2):
        raise low.unsupported("the saved statistics as results")
    op, rank = low.op, len(low.fake(0).shape)
    weight = weight if weight is not None else _channels(low, x, 1)
    bias = bias if bias is not None else _channels(low, x, 0)
    if rank > 2:
        return op.GroupNormalization(x, weight, bias, epsilon=eps, num_groups=group), None, None
    planes = op.Unsqueeze(x, [2])
    planes.shape = ir.Shape([*(x.shape or ()), 1])
    y = op.GroupNormalization(planes, weight, bias, epsilon=eps, num_groups=group)
    y.shape = planes.shape
    return op.Squeeze(y, [2]), None, None


@lower("aten._softmax.default", "aten.softmax.int")
def softmax(low: Lowering, x: ir.Value, dim: int, half_to_float: Any = False) -> ir.Value:
    return _over_axis(low, low.op.Softmax, x, dim)


@lower("aten._log_softmax.default", "aten.log_softmax.int")
def log_softmax(low: Lowering, x: ir.Value, dim: int, half_to_float: Any = False) -> ir.Value:
    return _over_axis(low, low.op.LogSoftmax, x, dim)


def _over_axis(low: Lowering, function: Any, x: ir.Value, dim: int) -> ir.Value:
    x = low.tensor(x, low.dtype)
    if low.fake(0).dim() > 0:
        return function(x, axis=dim)  # type: ignore[no-any-return]
    vector = low.op.Reshape(x, [1])
    vector.shape = ir.Shape([1])
    return low.op.Reshape(function(vector, axis=0), low.op.const([]))  # type: ignore[no-any-return]


@lower("aten._fused_rms_norm.default")
def fused_rms_norm(
    low: Lowering, x: ir.Value, shape: list[Any], weight: ir.Value | None, eps: float | None
) -> tuple[ir.Value | None, ...]:
    """x / sqrt(mean(x²) + eps) * weight over the last axes."""
    if low.uses_result(1):
        raise low.unsupported("the saved statistics as results")
    op = low.op
    eps = eps if eps is not None else torch.finfo(low.result[0].dtype).eps
    mean = op.ReduceMean(op.Mul(x, x), list(range(-len(shape), 0)), keepdims=1)
    y = op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(mean, eps))))
    return (y if weight is None else op.Mul(y, weight)), None
