"""Lowers normalisations.

In float64 they are written out: ONNX keeps epsilon in float32, and GroupNormalization computes in it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.emitter import Write
from onnxtrain.ortmodule.lowering._table import Lowering, lower
from onnxtrain.ortmodule.lowering.aten.order import with_nan


@lower("aten._native_batch_norm_legit_functional.default")
def functional_batch_norm(low: Lowering, *args: Any) -> tuple[ir.Value | None, ...]:
    """Returns y, two unused results, and the updated running statistics."""
    y, mean, var = _batch_norm(low, *args)
    return y, None, None, mean if mean is not None else args[3], var if var is not None else args[4]


@lower("aten._native_batch_norm_legit.no_stats")
def batch_norm_without_statistics(
    low: Lowering, x: ir.Value, weight: ir.Value | None, bias: ir.Value | None, training: bool, *args: Any
) -> tuple[ir.Value | None, ...]:
    return _batch_norm(low, x, weight, bias, None, None, training, *args)[0], None, None


@lower("aten._native_batch_norm_legit_no_training.default")
def batch_norm_in_inference(
    low: Lowering,
    x: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    mean: ir.Value,
    var: ir.Value,
    *args: Any,
) -> tuple[ir.Value | None, ...]:
    return _batch_norm(low, x, weight, bias, mean, var, False, *args)[0], None, None


def _batch_norm(
    low: Lowering,
    x: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value | None,
    running_var: ir.Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
    """Returns y, and the running statistics where training changes them (else None)."""
    op = low.op
    if low.uses_result(1) or low.uses_result(2):
        raise low.unsupported("readers of the saved statistics")
    one = weight if weight is not None else _channels(low, x, 1)
    zero = bias if bias is not None else _channels(low, x, 0)
    if low.is_double:
        return _exact_batch_norm(low, x, one, zero, running_mean, running_var, training, momentum, eps)
    if not training:
        return op.BatchNormalization(x, one, zero, running_mean, running_var, epsilon=eps), None, None
    if running_mean is None or running_var is None:
        # PyTorch decomposes an instance norm into a batch norm of one sample.
        if low.fake(0).shape[0] == 1 and low.fake(0).dim() > 2:
            return op.InstanceNormalization(x, one, zero, epsilon=eps), None, None
        # The updates of these statistics are not read. They are computed from x to be values of their own: see
        # `_in_training`.
        statistics = op.Slice(op.Reshape(x, [-1]), [0], op.dim(x, 1))
        return _in_training(low, x, one, zero, statistics, op.Neg(statistics), eps)[0], None, None
    if momentum == 0:
        # The momentum 0 leaves the statistics as they are: any updates will do, of values of their own.
        before = op.Mul(running_mean, 0.5), op.Mul(running_var, 0.5)
        return _in_training(low, x, one, zero, *before, eps)[0], None, None
    # ONNX updates with the biased variance, PyTorch with the variance times n / (n - 1). The node runs with momentum
    # 1/2 on statistics that are scaled before and behind it:
    # (1 - m) running + m batch = 2 m (running (1 - m) / m + batch) / 2.
    bessel = _bessel(low, x)
    before_mean = op.Mul(running_mean, (1 - momentum) / momentum)
    before_var = op.Div(op.Mul(running_var, (1 - momentum) / momentum), bessel)
    y, mean, var = _in_training(low, x, one, zero, before_mean, before_var, eps)
    scale = 2 * momentum
    factor = op.Mul(bessel, scale) if isinstance(bessel, ir.Value) else scale * bessel
    return y, op.Mul(mean, scale), op.Mul(var, factor)


def _exact_batch_norm(
    low: Lowering,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    running_mean: ir.Value | None,
    running_var: ir.Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
    """Returns the same as `_batch_norm`, written out in means and square roots."""
    op, rank = low.op, len(low.fake(0).shape)
    # Statistics of a channel are over batch and positions.
    axes = [0, *range(2, rank)]
    if not training:
        assert running_mean is not None
        assert running_var is not None
        center, spread = (_over_channels(low, value, rank) for value in (running_mean, running_var))
        y = op.Div(op.Sub(x, center), op.Sqrt(op.Add(spread, eps)))
        return _scaled(low, y, scale, bias, rank), None, None
    y, mean, var = _standardized(low, x, axes, eps)
    y = _scaled(low, y, scale, bias, rank)
    if running_mean is None or running_var is None or momentum == 0:
        return y, None, None
    # PyTorch updates buffers without gradients.
    var = op.Mul(var, _bessel(low, x))
    updated = [
        op.Add(op.Mul(old, 1 - momentum), op.Mul(low.op.stop_gradient(op.Squeeze(new, axes)), momentum))
        for old, new in ((running_mean, mean), (running_var, var))
    ]
    return y, updated[0], updated[1]


def _standardized(
    low: Lowering, x: ir.Value, axes: list[int], eps: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Returns (x - mean) / sqrt(variance + eps), the mean and the biased variance over some axes, which are kept."""
    op = low.op
    mean = op.ReduceMean(x, axes, keepdims=1)
    deviation = op.Sub(x, mean)
    var = op.ReduceMean(op.Mul(deviation, deviation), axes, keepdims=1)
    return op.Div(deviation, op.Sqrt(op.Add(var, eps))), mean, var


def _scaled(low: Lowering, y: ir.Value, scale: ir.Value, bias: ir.Value, rank: int) -> ir.Value:
    """Returns y times a scale plus a bias per channel."""
    scale, bias = (_over_channels(low, value, rank) for value in (scale, bias))
    return low.op.Add(low.op.Mul(y, scale), bias)


def _over_channels(low: Lowering, vector: ir.Value, rank: int) -> ir.Value:
    """Returns a number per channel in a shape that broadcasts to [batch, channels, *spatial]."""
    return low.op.Unsqueeze(vector, list(range(1, rank - 1))) if rank > 2 else vector


def _in_training(
    low: Lowering, x: ir.Value, scale: ir.Value, bias: ir.Value, mean: ir.Value, var: ir.Value, eps: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Returns y, and the averages of the given statistics with those of the batch, whose variance is biased."""
    # ONNX Runtime writes the updates over the statistics that it is given. These must therefore be values of their own,
    # neither inputs nor constants.
    y, new_mean, new_var = low.op.BatchNormalization(
        x, scale, bias, mean, var, epsilon=eps, momentum=0.5, training_mode=1, _outputs=3
    )
    return y, new_mean, new_var


def _channels(low: Lowering, x: ir.Value, number: int) -> ir.Value:
    """Returns a vector with one number for each channel."""
    channels = low.fake(0).shape[1]
    if isinstance(channels, int):
        return low.op.const([float(number)] * channels, low.dtype)
    value: ir.Value = low.op.Expand(low.op.const(float(number), low.dtype), low.op.dim(x, 1))
    value.shape = ir.Shape([str(channels)])
    return value


def _bessel(low: Lowering, x: ir.Value) -> ir.Value | float:
    """Returns n / (n - 1), where n is the number of elements of each channel."""
    shape = low.fake(0).shape
    sizes = [shape[0], *shape[2:]]
    if all(isinstance(size, int) for size in sizes):
        n = math.prod(sizes)
        return n / (n - 1) if n > 1 else math.inf
    op = low.op
    count = op.Cast(op.Div(op.Size(x), op.Squeeze(op.dim(x, 1))), to=low.dtype)
    return op.Div(count, op.Sub(count, 1.0))


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
    # ONNX Runtime's LayerNormalization kernel refuses rows without elements.
    if any(isinstance(size, int) and size == 0 for size in shape):
        y = x if weight is None else op.Mul(x, weight)
        return y if bias is None else op.Add(y, bias), None, None
    if low.is_double:
        y, mean, var = _standardized(low, x, list(range(-len(shape), 0)), eps)
        y = y if weight is None else op.Mul(y, weight)
        y = y if bias is None else op.Add(y, bias)
        return y, mean, op.Reciprocal(op.Sqrt(op.Add(var, eps)))
    if weight is None:
        # The scale of ONNX's LayerNormalization is not optional.
        weight = _ones(low, x, shape)
    inputs = (x, weight) if bias is None else (x, weight, bias)
    attributes = {"axis": -len(shape), "epsilon": eps}
    if low.uses_result(1) or low.uses_result(2):
        y, mean, inverse = op.LayerNormalization(*inputs, **attributes, _outputs=3)
        return y, mean, inverse
    return op.LayerNormalization(*inputs, **attributes), None, None


def _ones(low: Lowering, x: ir.Value, shape: list[Any]) -> ir.Value:
    """Returns the scale of a layer norm that has none, of the shape of the last axes of x."""
    if all(isinstance(size, int) for size in shape):
        return low.op.const(np.ones(shape), low.dtype)
    ones: ir.Value = low.op.Expand(low.op.const(1.0, low.dtype), low.ints(shape))
    ones.shape = ir.Shape([*(x.shape or ())][-len(shape) :])
    return ones


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
        raise low.unsupported("readers of the saved statistics")
    op, rank = low.op, len(low.fake(0).shape)
    weight = weight if weight is not None else _channels(low, x, 1)
    bias = bias if bias is not None else _channels(low, x, 0)
    # For an unknown number of channels no fused op takes the place of ONNX Runtime's GroupNormalization, whose variance
    # is E[x²] - E[x]² in float32 (1.32): at a mean of 1000 and a variance of 1 the result is off by 20 %.
    if low.is_double or not isinstance(low.fake(0).shape[1], int):
        y, *_ = _standardized(low, op.Reshape(x, [0, group, -1]), [2], eps)
        return _scaled(low, op.reshape_like(y, x), weight, bias, rank), None, None
    if rank > 2:
        return op.GroupNormalization(x, weight, bias, epsilon=eps, num_groups=group), None, None
    # GroupNormalization wants at least one axis behind the channels.
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
    # ONNX Runtime's float64 kernel returns numbers for rows with NaN.
    y = _over_axis(low, low.op.LogSoftmax, x, dim)
    return with_nan(low, y, low.tensor(x, low.dtype), dim) if low.is_double and low.fake(0).dim() else y


def _over_axis(low: Lowering, function: Write, x: ir.Value, dim: int) -> ir.Value:
    """Applies a softmax along an axis; a scalar, which has none, as a vector of one element."""
    x = low.tensor(x, low.dtype)
    if low.fake(0).dim() > 0:
        return function(x, axis=dim)
    vector = low.op.Reshape(x, [1])
    vector.shape = ir.Shape([1])
    return low.op.Reshape(function(vector, axis=0), low.op.const([]))


@lower("aten._fused_rms_norm.default")
def fused_rms_norm(
    low: Lowering, x: ir.Value, shape: list[Any], weight: ir.Value | None, eps: float | None
) -> tuple[ir.Value | None, ...]:
    if low.uses_result(1):
        raise low.unsupported("readers of the saved statistics")
    op = low.op
    eps = eps if eps is not None else torch.finfo(low.result[0].dtype).eps
    # ONNX has RMSNormalization from opset 23 on. `fuse_forward` makes one composite op of these nodes.
    mean = op.ReduceMean(op.Mul(x, x), list(range(-len(shape), 0)), keepdims=1)
    y = op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(mean, eps))))
    return (y if weight is None else op.Mul(y, weight)), None
