"""Defines fusions of normalizations that models spell out in standard ops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import known_array, static_dims
from onnxtrain.functions import (
    floored_rms_normalization,
    group_normalization,
    instance_standardization,
    inverse_rms_normalization,
    reversible_instance_normalization,
)
from onnxtrain.fusion._pass import Fusion
from onnxtrain.fusion._patterns import (
    Match,
    Pattern,
    either,
    equal_to,
    number,
    op,
    optional_stop_gradient,
    stopped,
    value,
)

# Composite ops whose bodies compute in float32 support half precision (`functions/rms_norm.py`); the other norms don't.
_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _reduced(node: ir.Node) -> tuple[int, ...] | None:
    """Returns the non-negative axes that a node reduces; None if they are unknown or the node has keepdims=0."""
    source = node.inputs[0]
    if source is None or source.shape is None or node.attributes.get_int("keepdims", 1) != 1:
        return None
    rank = source.shape.rank()
    if len(node.inputs) == 1 or node.inputs[1] is None:
        return () if node.attributes.get_int("noop_with_empty_axes", 0) else tuple(range(rank))
    # Since opset 18, axes are an input; only constant axes are known.
    axes = known_array(node.inputs[1])
    return None if axes is None else tuple(sorted(axis % rank for axis in axes.ravel().tolist()))


def _over_the_last_axis(node: ir.Node) -> Mapping[str, Any] | None:
    axes, source = _reduced(node), node.inputs[0]
    return {} if source is not None and source.shape and axes == (source.shape.rank() - 1,) else None


def _over_each_series(node: ir.Node) -> Mapping[str, Any] | None:
    """Matches a reduction over the time axis of a batch of series, [batch, time, features]; binds `axes`.

    In general, it matches a reduction over all axes except the first and the last. A matrix has no such axes, and
    PyTorch reduces over both axes instead.
    """
    axes, source = _reduced(node), node.inputs[0]
    if not axes or source is None or source.shape is None:
        return None
    return {"axes": axes} if list(axes) == (list(range(1, source.shape.rank() - 1)) or [0, 1]) else None


def _square(x: Pattern) -> Pattern:
    return either(op.Mul(x, x), op.Pow(x, equal_to(2)))


def _per_feature(x: ir.Value, parameter: ir.Value) -> bool:
    """True if `parameter` has one entry for each element of the last axis of x, and the same dtype."""
    dims = static_dims(x)
    size = dims[-1] if dims else None
    return parameter.dtype == x.dtype and size is not None and static_dims(parameter) == (size,)


def _scaled(last: ir.Node, match: Match) -> bool:
    x, y = match["x"], last.outputs[0]
    return x.dtype in (*_WIDE, *_NARROW) and x.dtype == y.dtype and _per_feature(x, match["scale"])


def _standardized(last: ir.Node, match: Match) -> bool:
    return match["x"].dtype in _WIDE and match["x"].shape is not None


def _affine(last: ir.Node, match: Match) -> bool:
    parameters = [match["weight"], match["bias"]]
    return _standardized(last, match) and all(
        parameter.producer() is None and _per_feature(match["x"], parameter) for parameter in parameters
    )


def _grouped(last: ir.Node, match: Match) -> bool:
    """True if a match is a float32 GroupNorm with a scale and a bias per channel."""
    x, y = match["x"], last.outputs[0]
    if any(value.dtype != ir.DataType.FLOAT for value in (x, y, match["scale"], match["bias"])):
        return False
    dims = static_dims(x)
    if dims is None or len(dims) < 3 or dims[1] is None or x.shape != y.shape:
        return False
    planes = [match[name] for name in ("scale_plane", "bias_plane") if name in match]
    of_channels = all(static_dims(match[name]) == (dims[1],) for name in ("scale", "bias"))
    return of_channels and all(static_dims(plane) == (dims[1], *[1] * (len(dims) - 2)) for plane in planes)


def _into_groups(reshape: ir.Node) -> Mapping[str, Any] | None:
    """Matches a Reshape to `[batch, groups, -1]`; binds `num_groups`."""
    sizes = known_array(reshape.inputs[1])
    target = [] if sizes is None else sizes.ravel().tolist()
    is_grouping = len(target) == 3 and target[0] == 0 and target[1] > 0 and target[2] == -1
    return (
        {"num_groups": target[1]} if is_grouping and not reshape.attributes.get_int("allowzero", 0) else None
    )


def _unscaled(norm: ir.Node) -> Mapping[str, Any] | None:
    """Matches InstanceNormalization with a scale of ones and a bias of zeros; binds `epsilon`."""
    for parameter, wanted in zip(norm.inputs[1:], (1, 0), strict=True):
        array = known_array(parameter)
        if array is None or not (array == wanted).all():
            return None
    return {"epsilon": norm.attributes.get_float("epsilon", 1e-5)}


def _in_groups(norm: ir.Node) -> Mapping[str, Any] | None:
    """Matches GroupNormalization of opset 21, with per-channel scale and bias; binds `epsilon` and `num_groups`."""
    groups = norm.attributes.get_int("num_groups")
    return {"epsilon": norm.attributes.get_float("epsilon", 1e-5), "num_groups": groups} if groups else None


def _per_channel(name: str) -> Pattern:
    plane = op.Unsqueeze(value(name), ..., name=f"{name}_plane", shared=True)
    return either(plane, op.Cast(plane, shared=True))


def _one_per_row(shape: ir.Shape) -> ir.Shape:
    return ir.Shape([*shape[:-1], 1])


_x, _scale, _epsilon = value("x"), value("scale"), number("epsilon")

# x / max(factor * ||x||, floor) * scale, as in darts' RMSNorm.
_norm = op.ReduceL2(_x, ..., where=_over_the_last_axis)
_rms = either(
    op.Mul(_norm, number("factor")),
    op.Div(_norm, number("factor", of=lambda root: 1 / root if root else None)),
)
_floored = either(
    op.Max(_rms, number("floor")),
    op.Clip(_rms, number("floor")),
    op.Clip(_rms, number("floor"), equal_to(math.inf)),
)

# x / sqrt(mean(x²) + epsilon) * scale, as in torch.nn.RMSNorm and Llama.
_total = op.Add(op.ReduceMean(_square(_x), ..., where=_over_the_last_axis), _epsilon)
_root = either(op.Sqrt(_total), op.Pow(_total, equal_to(0.5)))
_inverse = either(op.Reciprocal(_root), op.Div(equal_to(1), _root), op.Pow(_total, equal_to(-0.5)))

# (x - mean) / stdev of each series, as in darts' RINorm, which detaches the statistics. Other nodes may read the
# detached statistics too, e.g. to undo the normalization at the end of the model.
_mean = stopped(op.ReduceMean(optional_stop_gradient(_x), ..., where=_over_each_series), "mean")
_centered = op.Sub(_x, _mean, name="centered", shared=True)
_variance = op.ReduceMean(_square(optional_stop_gradient(_centered)), ..., where=_over_each_series)
_stdev = stopped(op.Sqrt(op.Add(_variance, _epsilon)), "stdev")

# GroupNormalization as exporters emit it for opsets that lack it: InstanceNormalization with groups as channels.
_rows = op.InstanceNormalization(op.Reshape(_x, ..., where=_into_groups), ..., where=_unscaled)

NORMS = (
    Fusion(
        composite=group_normalization,
        pattern=op.GroupNormalization(_x, _scale, value("bias"), where=_in_groups),
        where=_grouped,
    ),
    Fusion(
        composite=group_normalization,
        pattern=op.Add(op.Mul(op.Reshape(_rows, ...), _per_channel("scale")), _per_channel("bias")),
        where=_grouped,
    ),
    Fusion(
        composite=floored_rms_normalization,
        pattern=op.Mul(op.Div(_x, _floored), _scale),
        where=_scaled,
        saved=_one_per_row,
    ),
    Fusion(
        composite=inverse_rms_normalization,
        pattern=op.Mul(either(op.Div(_x, _root), op.Mul(_x, _inverse)), _scale),
        where=_scaled,
        saved=_one_per_row,
    ),
    Fusion(
        composite=reversible_instance_normalization,
        pattern=op.Add(op.Mul(_centered, op.Div(value("weight"), _stdev, shared=True)), value("bias")),
        where=_affine,
        statistics=("mean", "stdev"),
        saved=lambda shape: shape,
    ),
    Fusion(
        composite=instance_standardization,
        pattern=op.Div(_centered, _stdev),
        where=_standardized,
        statistics=("mean", "stdev"),
    ),
)
"""Fusions of all normalizations. A fusion precedes the fusions that match only a part of its pattern."""
