"""Differentiates normalization layers and Dropout."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.autodiff._broadcast import sum_to_shape_of
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.autodiff.rules._composite import composite_vjp
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.errors import DifferentiationError
from onnxtrain.functions import (
    batch_normalization_gradient,
    floored_rms_normalization,
    floored_rms_normalization_gradient,
    group_normalization,
    group_normalization_gradient,
    instance_standardization,
    inverse_rms_normalization,
    inverse_rms_normalization_gradient,
    layer_normalization_gradient,
    reversible_instance_normalization,
    reversible_instance_normalization_gradient,
    reversible_instance_normalization_parameter_gradient,
    rms_normalization_gradient,
)

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@vjp(
    "BatchNormalization",
    wrt=("X", "scale", "B", "input_mean", "input_var"),
    outputs=("Y", "running_mean", "running_var"),
)
def batch_normalization(
    op: Emitter, n: NodeView, cts: tuple[ir.Value | None, ir.Value | None, ir.Value | None]
) -> Cotangents:
    """VJP of Y = (X - mean) / sqrt(var + epsilon) * scale + B.

    In training mode, mean and var are the batch statistics of X, otherwise they are inputs.
    """
    ct = cts[0]
    if n.attr("training_mode"):
        grads = _updated_statistics(op, n, cts[1:])
        if ct is not None:
            ct, x, scale = _to_float32(op, ct, n.X, n.scale)
            through_batch = op.call(
                batch_normalization_gradient, ct, x, scale, epsilon=n.attr("epsilon"), _outputs=3
            )
            grads["X"] = op.Add(through_batch[0], grads["X"]) if "X" in grads else through_batch[0]
            grads |= dict(zip(("scale", "B"), through_batch[1:], strict=True))
        return _needed_cotangents(op, n, grads)
    assert ct is not None
    ct, x, scale, mean, var = _to_float32(op, ct, n.X, n.scale, n.input_mean, n.input_var)
    per_channel = [-1] + [1] * (n.rank(n.X) - 2)
    others = [axis for axis in range(n.rank(n.X)) if axis != 1]
    inverse = op.Reciprocal(op.Sqrt(op.Add(var, n.attr("epsilon"))))
    factor = op.Mul(scale, inverse)
    grads = {"X": op.Mul(ct, op.Reshape(factor, per_channel)) if n.needs("X") else None}
    # With given statistics, all four cotangents follow from two sums per channel.
    if n.needs("B") or n.needs("input_mean"):
        grads["B"] = op.ReduceSum(ct, others, keepdims=0)
        grads["input_mean"] = op.Neg(op.Mul(factor, grads["B"]))
    # d/dvar (var + epsilon)^(-1/2) = -1/2 inverse³; grads["scale"] already contains one factor `inverse`.
    if n.needs("scale") or n.needs("input_var"):
        centered = op.Sub(x, op.Reshape(mean, per_channel))
        grads["scale"] = op.Mul(op.ReduceSum(op.Mul(ct, centered), others, keepdims=0), inverse)
        grads["input_var"] = op.Mul(op.Mul(grads["scale"], op.Mul(factor, inverse)), -0.5)
    return _needed_cotangents(op, n, grads)


def _updated_statistics(
    op: Emitter, n: NodeView, cts: tuple[ir.Value | None, ...]
) -> dict[str, ir.Value | None]:
    """Returns the cotangents of X and of the input statistics, given the cotangents of the running statistics.

    The running mean is momentum * input_mean + (1 - momentum) * mean(X); the running variance is computed likewise.
    """
    momentum, grads = n.attr("momentum"), dict[str, ir.Value | None]()
    (x,) = _to_float32(op, n.X)
    per_channel = [-1] + [1] * (n.rank(n.X) - 2)
    others = [axis for axis in range(n.rank(n.X)) if axis != 1]
    for name, ct in zip(("input_mean", "input_var"), cts, strict=True):
        if ct is None:
            continue
        (ct,) = _to_float32(op, ct)
        grads[name] = op.Mul(ct, momentum)
        count = op.CastLike(op.Div(op.Size(x), op.dim(x, 1)), x)
        each = op.Reshape(op.Mul(op.Div(op.CastLike(ct, x), count), 1 - momentum), per_channel)
        if name == "input_var":
            each = op.Mul(op.Mul(op.Sub(x, op.ReduceMean(x, others, keepdims=1)), 2.0), each)
        so_far = grads.get("X")
        grads["X"] = each if so_far is None else op.Add(so_far, each)
    if "X" in grads:
        grads["X"] = op.Expand(grads["X"], op.shape_of(x))
    return grads


@vjp("InstanceNormalization", wrt=("input", "scale", "B"))
def instance_normalization(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of InstanceNormalization, computed as GroupNormalization with one group per channel."""
    ct, x, scale = _to_float32(op, ct, n.input, n.scale)
    grads = op.call(
        group_normalization_gradient, ct, x, scale, epsilon=n.attr("epsilon"), num_groups=0, _outputs=3
    )
    return _needed_cotangents(op, n, dict(zip(("input", "scale", "B"), grads, strict=True)))


@composite_vjp(group_normalization, ("Y",), inputs=("X", "scale", "bias"))
@vjp("GroupNormalization", wrt=("X", "scale", "bias"))
def group_norm(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Y = x̂ * scale + bias, where x̂ is standardized over each channel group of each sample."""
    ct, x, scale = _to_float32(op, ct, n.X, n.scale)
    attributes = {"epsilon": n.attr("epsilon"), "num_groups": n.attr("num_groups")}
    grads = op.call(group_normalization_gradient, ct, x, scale, **attributes, _outputs=3)
    return _needed_cotangents(op, n, dict(zip(("X", "scale", "bias"), grads, strict=True)))


@vjp(
    "LayerNormalization",
    wrt=("X", "Scale", "B"),
    outputs=("Y", "Mean", "InvStdDev"),
    saves=("Mean", "InvStdDev"),
)
def layer_normalization(op: Emitter, n: NodeView, cts: tuple[ir.Value | None, ...]) -> Cotangents:
    """VJP of Y = x̂ * Scale + B, where x̂ is standardized over `axis` and all later axes."""
    axis = _first_axis(n)
    x, mean, inverse = n.X, n.out.Mean, n.out.InvStdDev
    # In ONNX, Mean and InvStdDev of a float64 LayerNormalization are float32.
    if x.dtype == ir.DataType.DOUBLE:
        mean, inverse = _statistics(op, n, axis)
    grads: dict[str, ir.Value | None] = {}
    ct, *of_statistics = cts
    if ct is not None:
        ct, wide, scale = _to_float32(op, ct, x, _expanded_scale(op, n, n.Scale, axis))
        ct_x, ct_scale, ct_bias = op.call(
            layer_normalization_gradient, ct, wide, scale, mean, inverse, _outputs=3
        )
        grads["X"] = ct_x
        grads["Scale"] = _sum_expanded(op, n, ct_scale, n.Scale, axis)
        grads["B"] = _sum_expanded(op, n, ct_bias, n.B, axis) if n.needs("B") else None
    if any(statistic is not None for statistic in of_statistics):
        (wide,) = _to_float32(op, x)
        more = _through_statistics(op, wide, mean, inverse, *of_statistics)
        grads["X"] = more if ct is None else op.Add(grads["X"], more)
    return _needed_cotangents(op, n, grads)


def _through_statistics(
    op: Emitter,
    x: ir.Value,
    mean: ir.Value,
    inverse: ir.Value,
    ct_mean: ir.Value | None,
    ct_inverse: ir.Value | None,
) -> ir.Value:
    """Returns ct_X from the cotangents of mean and r = InvStdDev: (ct_mean - ct_inverse r³ (x - mean)) / count."""
    # An empty batch has no statistics, and an integer division by zero crashes the process.
    count = op.Cast(op.Div(op.Size(x), op.Max(op.Size(mean), op.const(1))), to=x.dtype)
    zero = op.zeros_like(mean)
    terms = op.Expand(zero if ct_mean is None else op.Cast(ct_mean, to=x.dtype), op.shape_of(x))
    if ct_inverse is not None:
        factor = op.Mul(op.Cast(ct_inverse, to=x.dtype), op.Mul(op.Mul(inverse, inverse), inverse))
        terms = op.Sub(terms, op.Mul(factor, op.Sub(x, mean)))
    return op.Div(terms, count)


@vjp("RMSNormalization", wrt=("X", "scale"))
def rms_normalization(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of Y = X / sqrt(mean(X²) + epsilon) * scale, with the mean over `axis` and all later axes."""
    axis = _first_axis(n)
    ct, x, scale = _to_float32(op, ct, n.X, _expanded_scale(op, n, n.scale, axis))
    grads = op.call(rms_normalization_gradient, ct, x, scale, epsilon=n.attr("epsilon"), _outputs=2)
    return _needed_cotangents(op, n, {"X": grads[0], "scale": _sum_expanded(op, n, grads[1], n.scale, axis)})


@composite_vjp(floored_rms_normalization, ("y", "rms"), wrt=("x", "scale"), saves=("rms",))
def floored_rms_norm(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of y = x / max(rms, floor) * scale, where the second output is rms = factor * ||x|| over the last axis."""
    operands = _to_float32(op, ct, n.x, n.scale, n.out.rms, n.factor, n.floor)
    grads = op.call(floored_rms_normalization_gradient, *operands, _outputs=2)
    return _needed_cotangents(op, n, dict(zip(("x", "scale"), grads, strict=True)))


@composite_vjp(inverse_rms_normalization, ("y", "inverse"), wrt=("x", "scale"), saves=("inverse",))
def inverse_rms_norm(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of y = x * r * scale, where the second output is r = 1 / sqrt(mean(x²) + epsilon) over the last axis."""
    operands = _to_float32(op, ct, n.x, n.scale, n.out.inverse)
    grads = op.call(inverse_rms_normalization_gradient, *operands, _outputs=2)
    return _needed_cotangents(op, n, dict(zip(("x", "scale"), grads, strict=True)))


@composite_vjp(
    reversible_instance_normalization,
    ("y", "mean", "stdev", "centered"),
    wrt=("x", "weight", "bias"),
    saves=("stdev", "centered"),
)
def reversible_instance_norm(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of y = (x - mean) * (weight / stdev) + bias, treating mean and stdev as constants, as darts does."""
    ct, weight, stdev, centered = _to_float32(op, ct, n.weight, n.out.stdev, n.out.centered)
    rows = list(range(n.rank(n.x) - 1))
    # A frozen weight needs neither the sum over positions nor the standardized x.
    if not n.needs("weight"):
        ct_x = op.Mul(ct, op.Div(weight, stdev)) if n.needs("x") else None
        ct_bias = op.ReduceSum(ct, rows, keepdims=0) if n.needs("bias") else None
        return _needed_cotangents(op, n, {"x": ct_x, "bias": ct_bias})
    attributes = {"axes": [axis for axis in n.attr("axes") if axis in rows], "rows": rows}
    if not n.needs("x"):
        parameters = reversible_instance_normalization_parameter_gradient
        grads = op.call(parameters, ct, centered, stdev, **attributes, _outputs=2)
        return _needed_cotangents(op, n, dict(zip(("weight", "bias"), grads, strict=True)))
    gradient = reversible_instance_normalization_gradient
    grads = op.call(gradient, ct, centered, weight, stdev, **attributes, _outputs=3)
    return _needed_cotangents(op, n, dict(zip(("x", "weight", "bias"), grads, strict=True)))


@composite_vjp(instance_standardization, ("y", "mean", "stdev"), wrt=("x",), saves=("stdev",))
def instance_standard(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of y = (x - mean) / stdev, treating mean and stdev as constants, as darts does."""
    ct, stdev = _to_float32(op, ct, n.out.stdev)
    return _needed_cotangents(op, n, {"x": op.Div(ct, stdev)})


@vjp("MeanVarianceNormalization", wrt=("X",))
def mean_variance_normalization(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of Y = d / (s + 1e-9), where d = X - mean(X) and s = sqrt(mean(d²)) over `axes`.

    ct_x = (ct - mean(ct) - d * mean(ct * Y) / s) / (s + 1e-9).
    """
    # A rule, although the ONNX standard has a function body for this op: that body supports only float32.
    axes = n.attr("axes")
    wide, x, y = _to_float32(op, ct, n.X, n.out.Y)
    centered = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
    deviation = op.Sqrt(op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1))
    along = op.Div(op.ReduceMean(op.Mul(wide, y), axes, keepdims=1), op.Max(deviation, 1e-9))
    free = op.Sub(op.Sub(wide, op.ReduceMean(wide, axes, keepdims=1)), op.Mul(centered, along))
    result = op.Div(free, op.Add(deviation, 1e-9))
    return result if result.dtype == ct.dtype else op.Cast(result, to=ct.dtype)


@vjp("LpNormalization", wrt=("input",))
def lp_normalization(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of Y = X / |X|: ct_x = (ct - d|X| * sum(ct * Y)) / |X|, where d|X| = Y (p = 2) or sign(X) (p = 1).

    If the norm is zero, Y and ct_x are zero.
    """
    axis, y = n.attr("axis"), n.out.output
    reduce = op.ReduceL1 if n.attr("p") == 1 else op.ReduceL2
    norm = reduce(n.input, [axis], keepdims=1)
    slope = op.Sign(n.input) if n.attr("p") == 1 else y
    total = op.ReduceSum(op.Mul(ct, y), [axis], keepdims=1)
    positive = op.Greater(norm, 0.0)
    # Divide by 1 where the norm is zero: 0/0 is masked here, but would be NaN in the second derivative.
    ratio = op.Div(op.Sub(ct, op.Mul(slope, total)), op.Where(positive, norm, 1.0))
    return op.Where(positive, ratio, 0.0)


@vjp("LRN", wrt=("X",))
def local_response_normalization(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of Y = X D^-beta, where D = bias + alpha * mean(X²) over a zero-padded window of `size` channels.

    ct_x = ct D^-beta - 2 alpha beta X * mean(ct Y / D), where the mean is over the channels whose windows contain this
    channel: the mirrored window.
    """
    size, alpha, beta = n.attr("size"), n.attr("alpha"), n.attr("beta")
    # As in the schema, an even window has one more channel after than before.
    before, after = (size - 1) // 2, size // 2
    mean = _channel_window_mean(op, op.Mul(n.X, n.X), size, before, after)
    d = op.Add(op.Mul(mean, alpha), n.attr("bias"))
    spread = _channel_window_mean(op, op.Div(op.Mul(ct, n.out.Y), d), size, after, before)
    return op.Sub(
        op.Mul(ct, op.Pow(d, op.const(-beta, like=ct))), op.Mul(op.Mul(n.X, spread), 2 * alpha * beta)
    )


@vjp("Dropout", wrt=("data",), saves=("mask",))
def dropout(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of Dropout: ct * mask / (1 - ratio) in training mode, otherwise ct."""
    training = n.constant(n.training_mode)
    if n.training_mode is None or (training is not None and not training.any()):
        return ct
    ratio: Any = 0.5
    if n.ratio is not None:
        constant = n.constant(n.ratio)
        ratio = op.Cast(n.ratio, to=ct.dtype) if constant is None else float(constant.item())
    scale: Any = None
    if isinstance(ratio, float):
        scale = op.const(1 / (1 - ratio) if ratio < 1 else 0.0, like=ct)
    else:
        scale = op.Where(op.Less(ratio, 1.0), op.Reciprocal(op.Sub(1.0, ratio)), 0.0)
    # The mode is an input of the model: in inference mode there is no scaling, and the mask is all true.
    if training is None:
        scale = op.Where(n.training_mode, scale, op.const(1.0, like=ct))
    # Multiplying by the mask, as PyTorch does, is several times as fast as Where.
    return op.Mul(op.Mul(ct, scale), op.Cast(n.out.mask, to=ct.dtype))


def _to_float32(op: Emitter, *values: ir.Value) -> list[ir.Value]:
    """Casts all values to float32 if any of them is float16 or bfloat16, because sums need more precision."""
    if not any(value.dtype in _NARROW for value in values):
        return list(values)
    return [v if v.dtype == ir.DataType.FLOAT else op.Cast(v, to=ir.DataType.FLOAT) for v in values]


def _needed_cotangents(
    op: Emitter, n: NodeView, grads: dict[str, ir.Value | None]
) -> dict[str, ir.Value | None]:
    """Returns the needed cotangents, each cast to the dtype of its input."""
    result: dict[str, ir.Value | None] = {}
    for name, value in grads.items():
        if value is None or not n.needs(name):
            continue
        dtype = getattr(n, name).dtype
        result[name] = value if dtype in (None, value.dtype) else op.Cast(value, to=dtype)
    return result


def _first_axis(n: NodeView) -> int:
    """Returns the first of the normalized axes; non-negative unless the rank is unknown."""
    axis: int = n.attr("axis")
    return axis if n.X.shape is None else n.axis(n.X, axis)


def _expanded_scale(op: Emitter, n: NodeView, scale: ir.Value, axis: int) -> ir.Value:
    """Expands the scale to the shape of the normalized axes: `axis` and all later axes of X.

    Raises:
        DifferentiationError: the scale has more axes than there are normalized axes.
    """
    if n.X.shape is None or scale.shape is None:
        return op.Expand(scale, op.Shape(n.X, start=axis))
    rank = n.rank(n.X) - axis
    if n.rank(scale) > rank:
        raise DifferentiationError(
            f"differentiating {n.op_type} (node {n.node.name!r}): its scale has {n.rank(scale)} axes, more "
            f"than the {rank} normalized axes; use a separate Mul for the scaling"
        )
    dims = list(scale.shape or ())
    if dims == list(n.X.shape)[axis:] and all(isinstance(dim, int) or dim.value is not None for dim in dims):
        return scale
    return op.Expand(scale, op.Shape(n.X, start=axis))


def _sum_expanded(op: Emitter, n: NodeView, ct: ir.Value, primal: ir.Value, axis: int) -> ir.Value:
    """Returns the cotangent of `primal`, a scale or bias: sums `ct` over the axes along which it was broadcast.

    `ct` is the cotangent of the broadcast scale or bias, which has the shape of X from `axis` on.
    """
    # The composite's output has no shape yet; the shape decides whether the axes are known now or at run time.
    ct.shape = None if n.X.shape is None else ir.Shape(list(n.X.shape)[axis:])
    return sum_to_shape_of(op, ct, ct, primal)


def _statistics(op: Emitter, n: NodeView, axis: int) -> tuple[ir.Value, ir.Value]:
    """Returns the mean and 1 / sqrt(variance + epsilon) of X over `axis` and all later axes."""
    axes: Any = list(range(axis, 0 if n.X.shape is None else n.rank(n.X)))
    # A non-negative axis and an unknown rank: the axes are computed from the shape at run time.
    if n.X.shape is None and axis >= 0:
        axes = op.Range(axis, op.Size(op.Shape(n.X)), 1)
    mean = op.ReduceMean(n.X, axes, keepdims=1)
    centered = op.Sub(n.X, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    return mean, op.Reciprocal(op.Sqrt(op.Add(variance, n.attr("epsilon"))))


def _channel_window_mean(op: Emitter, value: ir.Value, size: int, before: int, after: int) -> ir.Value:
    """Returns, for each channel, the mean over a zero-padded window of `size` channels.

    The window contains `before` channels before the channel and `after` channels after it.
    """
    planes = op.Unsqueeze(op.merge_from(value, 2), [1])
    # ONNX Runtime doesn't pool empty planes: add one row and one column, and slice them off afterwards.
    sizes = static_dims(value)
    may_be_empty = sizes is None or not all(sizes[1:])
    if may_be_empty:
        planes = op.Pad(planes, [0, 0, 0, 0, 0, 0, 1, 1])
    mean = op.AveragePool(planes, kernel_shape=[size, 1], pads=[before, 0, after, 0], count_include_pad=1)
    if may_be_empty:
        mean = op.Slice(mean, [0, 0], [-1, -1], [2, 3])
    return op.reshape_like(mean, value)
