"""Lowers batch, layer, group and RMS norms, softmax and log_softmax.

In float64, norms are decomposed, because ONNX's attribute epsilon is float32, and GroupNormalization computes in
float32.
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
    """Lowers to y, None for the two saved statistics, and the updated running statistics."""
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
    """Returns y and the updated running mean and variance.

    The mean and the variance are None if the op does not update them.
    """
    op = low.op
    if low.uses_result(1) or low.uses_result(2):
        raise low.unsupported("uses of the saved statistics")
    scale = weight if weight is not None else _channel_constant(low, x, 1)
    shift = bias if bias is not None else _channel_constant(low, x, 0)
    if low.is_double:
        return _decomposed_batch_norm(
            low, x, scale, shift, running_mean, running_var, training, momentum, eps
        )
    if not training:
        return op.BatchNormalization(x, scale, shift, running_mean, running_var, epsilon=eps), None, None
    if running_mean is None or running_var is None:
        # PyTorch decomposes an instance norm into a batch norm with batch size 1.
        if low.fake(0).shape[0] == 1 and low.fake(0).dim() > 2:
            return _instance_norm(low, x, scale, shift, eps), None, None
        # ONNX's op requires running statistics, so it gets arbitrary [channels] tensors. Nothing reads their updates.
        # `_training_batch_norm` needs values that are neither inputs nor constants, hence computed from x.
        statistics = op.Slice(op.Reshape(x, [-1]), [0], op.dim(x, 1))
        return _training_batch_norm(low, x, scale, shift, statistics, op.Neg(statistics), eps)[0], None, None
    if momentum == 0:
        # The running statistics do not change, and nothing reads the updates.
        unused = op.Mul(running_mean, 0.5), op.Mul(running_var, 0.5)
        return _training_batch_norm(low, x, scale, shift, *unused, eps)[0], None, None
    # PyTorch updates the running variance with the unbiased variance of the batch, ONNX with the biased one. To correct
    # this, the node runs with momentum 1/2 on scaled statistics, and its results are scaled back:
    # (1 - m) running + m batch = 2 m (running (1 - m) / m + batch) / 2.
    bessel = _bessel(low, x)
    scaled_mean = op.Mul(running_mean, (1 - momentum) / momentum)
    scaled_var = op.Div(op.Mul(running_var, (1 - momentum) / momentum), bessel)
    y, mean, var = _training_batch_norm(low, x, scale, shift, scaled_mean, scaled_var, eps)
    factor = 2 * momentum
    var_factor = op.Mul(bessel, factor) if isinstance(bessel, ir.Value) else factor * bessel
    return y, op.Mul(mean, factor), op.Mul(var, var_factor)


def _decomposed_batch_norm(
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
    """Returns the results of `_batch_norm`, computed with elementwise ops and reductions."""
    op, rank = low.op, len(low.fake(0).shape)
    # Statistics are reduced over the batch axis and the spatial axes.
    axes = [0, *range(2, rank)]
    if not training:
        assert running_mean is not None
        assert running_var is not None
        mean, var = (_broadcastable(low, value, rank) for value in (running_mean, running_var))
        y = op.Div(op.Sub(x, mean), op.Sqrt(op.Add(var, eps)))
        return _scaled(low, y, scale, bias, rank), None, None
    y, mean, var = _standardized(low, x, axes, eps)
    y = _scaled(low, y, scale, bias, rank)
    if running_mean is None or running_var is None or momentum == 0:
        return y, None, None
    var = op.Mul(var, _bessel(low, x))
    updated = [
        op.Add(op.Mul(old, 1 - momentum), op.Mul(low.op.stop_gradient(op.Squeeze(new, axes)), momentum))
        for old, new in ((running_mean, mean), (running_var, var))
    ]
    return y, updated[0], updated[1]


def _standardized(
    low: Lowering, x: ir.Value, axes: list[int], eps: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Returns (x - mean) / sqrt(var + eps), the mean, and the biased variance. The latter two keep the reduced axes."""
    op = low.op
    mean = op.ReduceMean(x, axes, keepdims=1)
    deviation = op.Sub(x, mean)
    var = op.ReduceMean(op.Mul(deviation, deviation), axes, keepdims=1)
    return op.Div(deviation, op.Sqrt(op.Add(var, eps))), mean, var


def _scaled(low: Lowering, y: ir.Value, scale: ir.Value, bias: ir.Value, rank: int) -> ir.Value:
    """Scales and shifts each channel: returns y * scale + bias.

    Args:
        low: the lowering.
        y: [batch, channels, *spatial].
        scale: [channels].
        bias: [channels].
        rank: the rank of `y`.
    """
    scale, bias = (_broadcastable(low, value, rank) for value in (scale, bias))
    return low.op.Add(low.op.Mul(y, scale), bias)


def _broadcastable(low: Lowering, vector: ir.Value, rank: int) -> ir.Value:
    """Reshapes [channels] to [channels, 1, ...], which broadcasts to [batch, channels, *spatial] of this rank."""
    return low.op.Unsqueeze(vector, list(range(1, rank - 1))) if rank > 2 else vector


def _training_batch_norm(
    low: Lowering, x: ir.Value, scale: ir.Value, bias: ir.Value, mean: ir.Value, var: ir.Value, eps: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Emits BatchNormalization in training mode, with a momentum of 1/2.

    `mean` and `var` must be neither graph inputs nor constants, because ONNX Runtime overwrites their memory.

    Returns:
        y, (mean + batch mean) / 2 and (var + biased batch variance) / 2. For another momentum, the caller scales `mean`
        and `var`, and scales the results back.
    """
    y, new_mean, new_var = low.op.BatchNormalization(
        x, scale, bias, mean, var, epsilon=eps, momentum=0.5, training_mode=1, _outputs=3
    )
    return y, new_mean, new_var


def _channel_constant(low: Lowering, x: ir.Value, number: int) -> ir.Value:
    """Returns a tensor [channels] filled with `number`."""
    channels = low.fake(0).shape[1]
    if isinstance(channels, int):
        return low.op.const([float(number)] * channels, low.dtype)
    value: ir.Value = low.op.Expand(low.op.const(float(number), low.dtype), low.op.dim(x, 1))
    value.shape = ir.Shape([str(channels)])
    return value


_FEW_PIXELS = 1024
"""Number of pixels up to which ONNX Runtime's InstanceNormalization is as exact as PyTorch's."""


def _instance_norm(low: Lowering, x: ir.Value, scale: ir.Value, shift: ir.Value, eps: float) -> ir.Value:
    """Standardizes each channel of a single sample, then applies `scale` and `shift`, [channels] each."""
    op, (_, channels, *sizes) = low.op, low.fake(0).shape
    if all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= _FEW_PIXELS:
        return op.InstanceNormalization(x, scale, shift, epsilon=eps)
    # ONNX Runtime's InstanceNormalization (1.32) adds float32 numbers one by one.
    if isinstance(channels, int):
        return op.GroupNormalization(x, scale, shift, epsilon=eps, num_groups=channels)
    y, *_ = _standardized(low, op.Reshape(x, [0, 0, -1]), [2], eps)
    return _scaled(low, op.reshape_like(y, x), scale, shift, len(low.fake(0).shape))


def _bessel(low: Lowering, x: ir.Value) -> ir.Value | float:
    """Returns Bessel's correction n / (n - 1), where n is the number of elements per channel."""
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
    # ONNX Runtime's LayerNormalization kernel fails for rows without elements.
    if any(isinstance(size, int) and size == 0 for size in shape):
        y = x if weight is None else op.Mul(x, weight)
        return y if bias is None else op.Add(y, bias), None, None
    if low.is_double:
        y, mean, var = _standardized(low, x, list(range(-len(shape), 0)), eps)
        y = y if weight is None else op.Mul(y, weight)
        y = y if bias is None else op.Add(y, bias)
        return y, mean, op.Reciprocal(op.Sqrt(op.Add(var, eps)))
    if weight is None:
        # ONNX's LayerNormalization requires a scale.
        weight = _layer_norm_ones(low, x, shape)
    inputs = (x, weight) if bias is None else (x, weight, bias)
    attributes = {"axis": -len(shape), "epsilon": eps}
    if low.uses_result(1) or low.uses_result(2):
        y, mean, inverse = op.LayerNormalization(*inputs, **attributes, _outputs=3)
        return y, mean, inverse
    return op.LayerNormalization(*inputs, **attributes), None, None


def _layer_norm_ones(low: Lowering, x: ir.Value, shape: list[Any]) -> ir.Value:
    """Returns a scale of ones for LayerNormalization, with the shape `shape` of the normalized last axes of `x`."""
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
        raise low.unsupported("uses of the saved statistics")
    op, rank = low.op, len(low.fake(0).shape)
    weight = weight if weight is not None else _channel_constant(low, x, 1)
    bias = bias if bias is not None else _channel_constant(low, x, 0)
    # For an unknown number of channels no fused op takes the place of ONNX Runtime's GroupNormalization, whose variance
    # is E[x²] - E[x]² in float32 (1.32): at a mean of 1000 and a variance of 1 the result is off by 20 %.
    if low.is_double or not isinstance(low.fake(0).shape[1], int):
        y, *_ = _standardized(low, op.Reshape(x, [0, group, -1]), [2], eps)
        return _scaled(low, op.reshape_like(y, x), weight, bias, rank), None, None
    if rank > 2:
        return op.GroupNormalization(x, weight, bias, epsilon=eps, num_groups=group), None, None
    # GroupNormalization requires at least one axis after the channels.
    planes = op.Unsqueeze(x, [2])
    planes.shape = ir.Shape([*(x.shape or ()), 1])
    y = op.GroupNormalization(planes, weight, bias, epsilon=eps, num_groups=group)
    y.shape = planes.shape
    return op.Squeeze(y, [2]), None, None


@lower("aten._softmax.default", "aten.softmax.int")
def softmax(low: Lowering, x: ir.Value, dim: int, half_to_float: Any = False) -> ir.Value:
    return _softmax_along(low, low.op.Softmax, x, dim)


@lower("aten._log_softmax.default", "aten.log_softmax.int")
def log_softmax(low: Lowering, x: ir.Value, dim: int, half_to_float: Any = False) -> ir.Value:
    # ONNX Runtime's float64 kernel returns finite numbers for rows with NaN.
    y = _softmax_along(low, low.op.LogSoftmax, x, dim)
    return with_nan(low, y, low.tensor(x, low.dtype), dim) if low.is_double and low.fake(0).dim() else y


def _softmax_along(low: Lowering, function: Write, x: ir.Value, dim: int) -> ir.Value:
    """Applies `function`, a softmax, along an axis. A scalar is reshaped to [1], and back."""
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
        raise low.unsupported("uses of the saved statistics")
    op = low.op
    eps = eps if eps is not None else torch.finfo(low.result[0].dtype).eps
    # ONNX has RMSNormalization since opset 23. `fuse_forward` fuses these nodes into one function.
    mean = op.ReduceMean(op.Mul(x, x), list(range(-len(shape), 0)), keepdims=1)
    y = op.Mul(x, op.Reciprocal(op.Sqrt(op.Add(mean, eps))))
    return (y if weight is None else op.Mul(y, weight)), None
