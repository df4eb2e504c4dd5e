"""Lowers losses. `reduction` is 0 for "none", 1 for "mean", 2 for "sum", as in ATen."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from torch import fx

from onnxtrain.emitter import Emitter
from onnxtrain.ortmodule.lowering import _formulas
from onnxtrain.ortmodule.lowering._table import Lowering, lower
from onnxtrain.ortmodule.lowering.aten.indexing import checked_indices
from onnxtrain.ortmodule.lowering.aten.reduction import reduce_mean
from onnxtrain.ortmodule.lowering.aten.shape import arange


@lower("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss(
    low: Lowering,
    log_probs: ir.Value,
    target: ir.Value,
    weight: ir.Value | None,
    reduction: int,
    ignore_index: int,
) -> tuple[ir.Value, None]:
    """Lowers to SoftmaxCrossEntropyLoss if `log_probs` is the result of log_softmax, else to NegativeLogLikelihoodLoss.

    log_probs: [classes], [batch, classes] or [batch, classes, height, width].
    """
    if low.uses_result(1):
        raise low.unsupported("uses of the second result, the total weight")
    op = low.op
    attributes = {"reduction": ("none", "mean", "sum")[reduction], "ignore_index": ignore_index}
    target = checked_indices(low, 1, target, ignore_index)
    # In float64, ONNX Runtime's log-softmax loses NaN. The lowering of `log_softmax` works around that.
    logits = None if low.is_double else _logits(low.node.args[0])
    source = low.env[logits] if logits is not None else log_probs
    if low.fake(0).dim() == 1:
        # ONNX's losses require a batch axis.
        source, target = op.Unsqueeze(source, [0]), op.Reshape(target, [1])
        source.shape, target.shape = ir.Shape([1, *low.shape(low.fake(0))]), ir.Shape([1])
    inputs = (source, target) if weight is None else (source, target, weight)
    if logits is None:
        loss = op.NegativeLogLikelihoodLoss(*inputs, **attributes)
    else:
        loss = op.SoftmaxCrossEntropyLoss(*inputs, **attributes)
    if low.fake(0).dim() == 1 and reduction == 0:
        loss.shape = ir.Shape([1])
        loss = op.Reshape(loss, op.const([]))
    return loss, None


def _logits(log_probs: Any) -> fx.Node | None:
    """Returns the node of the logits whose log_softmax over the class axis is `log_probs`.

    Returns None if `log_probs` is anything else.
    """
    if not isinstance(log_probs, fx.Node) or str(log_probs.target) != "aten._log_softmax.default":
        return None
    source, dim, half_to_float = log_probs.args[:3]
    if half_to_float or not isinstance(source, fx.Node) or not isinstance(dim, int):
        return None
    rank = log_probs.meta["val"].dim()
    return source if dim % rank == min(1, rank - 1) else None


@lower("aten.mse_loss.default")
def mse_loss(low: Lowering, x: ir.Value, y: ir.Value, reduction: int = 1) -> ir.Value:
    difference = _difference(low, x, y)
    return _reduced(low, low.op.Mul(difference, difference), reduction)


@lower("aten.smooth_l1_loss.default")
def smooth_l1_loss(
    low: Lowering, x: ir.Value, y: ir.Value, reduction: int = 1, beta: float = 1.0
) -> ir.Value:
    if beta < 0:
        raise low.unsupported(f"beta={beta}")
    op = low.op
    distance = op.Abs(_difference(low, x, y))
    # The quadratic branch below divides by beta.
    if beta == 0:
        return _reduced(low, distance, reduction)
    # The distance is capped, because the derivative of an infinite square is NaN.
    near = op.Min(distance, float(beta))
    small = op.Mul(op.Mul(near, near), 0.5 / beta)
    return _reduced(low, op.Where(op.Less(distance, beta), small, op.Sub(distance, 0.5 * beta)), reduction)


@lower("aten.huber_loss.default")
def huber_loss(low: Lowering, x: ir.Value, y: ir.Value, reduction: int = 1, delta: float = 1.0) -> ir.Value:
    if delta <= 0:
        raise low.unsupported(f"delta={delta}")
    op = low.op
    distance = op.Abs(_difference(low, x, y))
    large = op.Mul(op.Sub(distance, 0.5 * delta), delta)
    near = op.Min(distance, float(delta))
    small = op.Mul(op.Mul(near, near), 0.5)
    return _reduced(low, op.Where(op.Less(distance, delta), small, large), reduction)


_MIN_DIVISOR = 9.999999960041972e-13
"""Lower bound of the divisor in PyTorch's gradient of `binary_cross_entropy`: float32(1e-12), in float64 too."""


@lower("aten.binary_cross_entropy.default")
def binary_cross_entropy(
    low: Lowering, x: ir.Value, target: ir.Value, weight: ir.Value | None = None, reduction: int = 1
) -> ir.Value:
    """Lowers -(t log x + (1 - t) log(1 - x)), with both logarithms clamped to at least -100, as in PyTorch.

    The gradients ignore the clamping, as PyTorch's do: the derivative is (x - t) / max(x (1 - x), 1e-12) with respect
    to x, and log(1 - x) - log x with respect to t.
    """
    op = low.op
    x, target = low.wide(x, target)
    rest, other = op.Sub(1.0, x), op.Sub(1.0, target)
    # A product of both is negative, or NaN, outside of [0, 1].
    for name, share in (("input", op.Mul(x, rest)), ("target", op.Mul(target, other))):
        low.check(op.GreaterOrEqual(share, 0.0), f"all elements of {name} should be between 0 and 1")
    log_x, log_rest = op.Log(x), _formulas.log1p(op, op.Neg(x))
    clamped, clamped_rest = (op.Max(log, -100.0) for log in (log_x, log_rest))
    loss = op.Neg(op.Add(op.Mul(target, clamped), op.Mul(other, clamped_rest)))
    slope = op.Div(op.Sub(x, target), op.Max(op.Mul(x, rest), _MIN_DIVISOR))
    loss = low.with_slopes(loss, x, slope, target, op.Sub(log_rest, log_x))
    return _reduced(low, loss if weight is None else op.Mul(loss, weight), reduction)


@lower("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(
    low: Lowering,
    x: ir.Value,
    target: ir.Value,
    weight: ir.Value | None = None,
    pos_weight: ir.Value | None = None,
    reduction: int = 1,
) -> ir.Value:
    """Lowers (1 - t) x + (1 + (pos_weight - 1) t) log(1 + exp(-x))."""
    op = low.op
    x, target = low.tensors(x, target)
    # log(1 + exp(-x)), numerically stable.
    softplus = op.Softplus(op.Neg(x))
    if pos_weight is not None:
        softplus = op.Mul(op.Add(op.Mul(op.Sub(pos_weight, 1.0), target), 1.0), softplus)
    loss = op.Add(op.Mul(op.Sub(1.0, target), x), softplus)
    return _reduced(low, loss if weight is None else op.Mul(loss, weight), reduction)


@lower("aten.multi_margin_loss.default")
def multi_margin_loss(
    low: Lowering,
    x: ir.Value,
    target: ir.Value,
    p: float = 1,
    margin: float = 1,
    weight: ir.Value | None = None,
    reduction: int = 1,
) -> ir.Value:
    """Lowers multi_margin_loss, for inputs [*batch, classes] and target classes t.

    The loss of a sample is the sum of weight[t]·max(0, margin - x_t + x_i)^p over all classes i other than t, divided
    by the number of classes.
    """
    op = low.op
    axis = low.fake(0).dim() - 1
    if low.fake(1).dim() == 0:
        _check_reduced(low, reduction)
    target = checked_indices(low, 1, target)
    column = op.Unsqueeze(target, [axis]) if low.fake(1).dim() == axis else target
    missed = _positive_part(
        op, op.Add(op.Sub(x, op.GatherElements(x, column, axis=axis)), low.tensor(margin, low.dtype))
    )
    missed = op.Mul(missed, missed) if p == 2 else missed
    missed = missed if weight is None else op.Mul(missed, op.Gather(weight, column))
    other = op.Not(op.Equal(arange(low, op.dim(x, axis)), column))
    loss = op.ReduceMean(op.Where(other, missed, 0.0), [axis], keepdims=low.fake(1).dim() - axis)
    return _reduced(low, loss, reduction)


@lower("aten.multilabel_margin_loss_forward.default")
def multilabel_margin_loss(
    low: Lowering, x: ir.Value, target: ir.Value, reduction: int
) -> tuple[ir.Value, ir.Value]:
    """Lowers to the loss and a mask of the target classes.

    The loss is the sum of max(0, 1 - x_t + x_i) / classes over all pairs of a target class t and a non-target class i.
    A negative number ends the list of target classes of a sample. x, target: [*batch, classes].
    """
    op = low.op
    axis = low.fake(0).dim() - 1
    if axis == 0:
        _check_reduced(low, reduction)
    # True before the first negative number.
    listed = op.Equal(op.CumSum(op.Cast(op.Less(target, 0), to=ir.DataType.INT64), op.const(axis)), 0)
    class_indices = op.Where(listed, target, 0)
    ones = op.Cast(listed, to=low.dtype)
    # "add", because a class may be listed more than once.
    count = op.ScatterElements(op.Mul(ones, 0.0), class_indices, ones, axis=axis, reduction="add")
    is_target = op.Greater(count, 0.0)
    # Only as many columns as the longest list has: all pairs of classes would take memory quadratic in the classes.
    lengths = op.ReduceSum(op.Cast(listed, to=ir.DataType.INT64), [axis], keepdims=0)
    most = op.ReduceMax(op.Concat(op.Reshape(lengths, [-1]), [0], axis=0), [0], keepdims=1)
    listed, class_indices = (op.Slice(value, [0], most, [axis]) for value in (listed, class_indices))
    chosen = op.Unsqueeze(op.GatherElements(x, class_indices, axis=axis), [axis + 1])  # [*batch, targets, 1]
    missed = _positive_part(op, op.Add(op.Sub(op.Unsqueeze(x, [axis]), chosen), 1.0))
    is_pair = op.And(op.Unsqueeze(listed, [axis + 1]), op.Unsqueeze(op.Not(is_target), [axis]))
    means = op.ReduceMean(op.Where(is_pair, missed, 0.0), [axis + 1], keepdims=0)
    return _reduced(low, op.ReduceSum(means, [axis], keepdims=0), reduction), is_target


def _positive_part(op: Emitter, x: ir.Value) -> ir.Value:
    """Returns max(x, 0), and 0 for NaN, as PyTorch's margin losses do. Relu would return NaN."""
    return op.Where(op.Greater(x, 0.0), x, 0.0)


def _check_reduced(low: Lowering, reduction: int) -> None:
    """Raises UnsupportedATenOp for reduction="none" of an input without a batch axis."""
    if reduction == 0:
        raise low.unsupported('reduction="none" without a batch axis, for which PyTorch traces a wrong shape')


def _difference(low: Lowering, x: ir.Value, y: ir.Value) -> ir.Value:
    """Returns x - y in the result's dtype."""
    return low.op.Sub(*low.tensors(x, y))


def _reduced(low: Lowering, loss: ir.Value, reduction: int) -> ir.Value:
    """Returns the mean or sum of the losses, or the unreduced losses, depending on `reduction`."""
    if reduction == 0:
        return loss
    if reduction == 1:
        return reduce_mean(low, loss, None, False)
    return low.op.ReduceSum(loss, keepdims=0)
