"""Lowers losses that PyTorch keeps whole. `reduction` is 0 for none, 1 for the mean, 2 for the sum."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from torch import fx

from onnxtrain.ortmodule.lowering._table import Lowering, lower
from onnxtrain.ortmodule.lowering.aten.indexing import counted
from onnxtrain.ortmodule.lowering.aten.reduction import averaged
from onnxtrain.ortmodule.lowering.aten.shape import arange


@lower("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss(
    low: Lowering,
    scores: ir.Value,
    target: ir.Value,
    weight: ir.Value | None,
    reduction: int,
    ignore_index: int,
) -> tuple[ir.Value, None]:
    """Lowers to SoftmaxCrossEntropyLoss if `scores` come from a log_softmax, else to NegativeLogLikelihoodLoss.

    scores: [classes], [batch, classes] or [batch, classes, height, width].
    """
    # Eager PyTorch returns the total weight for its own backward, which ONNX's losses do not compute.
    if low.uses_result(1):
        raise low.unsupported("readers of the total weight")
    op = low.op
    attributes = {"reduction": ("none", "mean", "sum")[reduction], "ignore_index": ignore_index}
    target = counted(low, 1, target, ignore_index)
    # In float64 ONNX Runtime's log-softmax returns numbers for rows with NaN; `log_softmax` is lowered around that.
    logits = None if low.is_double else _logits(low.node.args[0])
    source = low.env[logits] if logits is not None else scores
    if low.fake(0).dim() == 1:
        # ONNX's losses have a batch axis.
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


def _logits(scores: Any) -> fx.Node | None:
    """Returns the node whose log-softmax over the classes `scores` are; None for other scores."""
    if not isinstance(scores, fx.Node) or str(scores.target) != "aten._log_softmax.default":
        return None
    source, dim, half_to_float = scores.args[:3]
    if half_to_float or not isinstance(source, fx.Node) or not isinstance(dim, int):
        return None
    rank = scores.meta["val"].dim()
    return source if dim % rank == min(1, rank - 1) else None


@lower("aten.mse_loss.default")
def mse_loss(low: Lowering, x: ir.Value, y: ir.Value, reduction: int = 1) -> ir.Value:
    d = _difference(low, x, y)
    return _reduced(low, low.op.Mul(d, d), reduction)


@lower("aten.smooth_l1_loss.default")
def smooth_l1_loss(
    low: Lowering, x: ir.Value, y: ir.Value, reduction: int = 1, beta: float = 1.0
) -> ir.Value:
    if beta < 0:
        raise low.unsupported(f"beta={beta}")
    op = low.op
    size = op.Abs(_difference(low, x, y))
    # Without this case the branch that is not taken divides by zero.
    if beta == 0:
        return _reduced(low, size, reduction)
    small = op.Mul(op.Mul(size, size), 0.5 / beta)
    return _reduced(low, op.Where(op.Less(size, beta), small, op.Sub(size, 0.5 * beta)), reduction)


@lower("aten.huber_loss.default")
def huber_loss(low: Lowering, x: ir.Value, y: ir.Value, reduction: int = 1, delta: float = 1.0) -> ir.Value:
    if delta <= 0:
        raise low.unsupported(f"delta={delta}")
    op = low.op
    size = op.Abs(_difference(low, x, y))
    large = op.Mul(op.Sub(size, 0.5 * delta), delta)
    return _reduced(
        low, op.Where(op.LessOrEqual(size, delta), op.Mul(op.Mul(size, size), 0.5), large), reduction
    )


_LEAST_VARIANCE = 9.999999960041972e-13
"""PyTorch's least divisor of the gradient of `binary_cross_entropy`: 1e-12 as float32, in float64 too."""


@lower("aten.binary_cross_entropy.default")
def binary_cross_entropy(
    low: Lowering, x: ir.Value, target: ir.Value, weight: ir.Value | None = None, reduction: int = 1
) -> ir.Value:
    """Lowers -(t log x + (1 - t) log(1 - x)), with logarithms of at least -100, as PyTorch has them.

    The gradient of x is (x - t) / max(x (1 - x), 1e-12), as in PyTorch, which has no other where x is 0 or 1.
    """
    op = low.op
    x, target = low.tensors(x, target)
    rest, other = op.Sub(1.0, x), op.Sub(1.0, target)
    # A product of both is negative, or NaN, outside of [0, 1].
    for name, share in (("input", op.Mul(x, rest)), ("target", op.Mul(target, other))):
        low.check(op.GreaterOrEqual(share, 0.0), f"all elements of {name} should be between 0 and 1")
    saturated = op.Less(op.Mul(x, rest), _LEAST_VARIANCE)
    log_x, log_rest = (
        op.Where(saturated, op.stop_gradient(log), log) for log in (_log(low, x), _log(low, rest))
    )
    loss = op.Neg(op.Add(op.Mul(target, log_x), op.Mul(other, log_rest)))
    slope = op.stop_gradient(op.Mul(op.Sub(x, target), 1 / _LEAST_VARIANCE))
    loss = op.Add(loss, op.Where(saturated, op.Mul(op.Sub(x, op.stop_gradient(x)), slope), 0.0))
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
    # One Softplus, which cannot overflow, instead of the dozen ops of PyTorch's decomposition.
    tail = op.Softplus(op.Neg(x))
    if pos_weight is not None:
        tail = op.Mul(op.Add(op.Mul(op.Sub(pos_weight, 1.0), target), 1.0), tail)
    loss = op.Add(op.Mul(op.Sub(1.0, target), x), tail)
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
    """Lowers the mean over the classes i other than the target t of weight_t max(0, margin - x_t + x_i)^p."""
    op = low.op
    axis = low.fake(0).dim() - 1
    if low.fake(1).dim() == 0:
        _refuse_one_loss_unreduced(low, reduction)
    target = counted(low, 1, target)
    place = op.Unsqueeze(target, [axis]) if low.fake(1).dim() == axis else target
    missed = op.Relu(op.Add(op.Sub(x, op.GatherElements(x, place, axis=axis)), low.tensor(margin, low.dtype)))
    missed = op.Mul(missed, missed) if p == 2 else missed
    missed = missed if weight is None else op.Mul(missed, op.Gather(weight, place))
    other = op.Not(op.Equal(arange(low, op.dim(x, axis)), place))
    loss = op.ReduceMean(op.Where(other, missed, 0.0), [axis], keepdims=low.fake(1).dim() - axis)
    return _reduced(low, loss, reduction)


@lower("aten.multilabel_margin_loss_forward.default")
def multilabel_margin_loss(
    low: Lowering, x: ir.Value, target: ir.Value, reduction: int
) -> tuple[ir.Value, ir.Value]:
    """Lowers to the loss and a mask of the targets.

    The loss is the sum over targets t and other classes i of max(0, 1 - x_t + x_i) / classes. The list of targets ends
    at the first negative number. x, target: [*batch, classes].
    """
    op = low.op
    axis = low.fake(0).dim() - 1
    if axis == 0:
        _refuse_one_loss_unreduced(low, reduction)
    # True up to the first negative number.
    listed = op.Equal(op.CumSum(op.Cast(op.Less(target, 0), to=ir.DataType.INT64), op.const(axis)), 0)
    place = op.Where(listed, target, 0)
    ones = op.Cast(listed, to=low.dtype)
    # A class may be listed several times.
    count = op.ScatterElements(op.Mul(ones, 0.0), place, ones, axis=axis, reduction="add")
    is_target = op.Greater(count, 0.0)
    chosen = op.Unsqueeze(op.GatherElements(x, place, axis=axis), [axis + 1])  # [*batch, targets, 1]
    missed = op.Relu(op.Add(op.Sub(op.Unsqueeze(x, [axis]), chosen), 1.0))
    counts = op.And(op.Unsqueeze(listed, [axis + 1]), op.Unsqueeze(op.Not(is_target), [axis]))
    means = op.ReduceMean(op.Where(counts, missed, 0.0), [axis + 1], keepdims=0)
    return _reduced(low, op.ReduceSum(means, [axis], keepdims=0), reduction), is_target


def _refuse_one_loss_unreduced(low: Lowering, reduction: int) -> None:
    if reduction == 0:
        raise low.unsupported("a single loss without reduction, whose shape PyTorch's meta tensors get wrong")


def _log(low: Lowering, x: ir.Value) -> ir.Value:
    """Returns the logarithm, at least -100."""
    op = low.op
    positive = op.Greater(x, 0.0)
    # The gradient of the logarithm at 0 is infinite, and 0 times infinity would be NaN behind the Where.
    safe = op.Log(op.Where(positive, x, op.const(1.0, low.dtype)))
    return op.Where(positive, op.Max(safe, -100.0), op.const(-100.0, low.dtype))


def _difference(low: Lowering, x: ir.Value, y: ir.Value) -> ir.Value:
    return low.op.Sub(*low.tensors(x, y))


def _reduced(low: Lowering, loss: ir.Value, reduction: int) -> ir.Value:
    if reduction == 0:
        return loss
    if reduction == 1:
        return averaged(low, loss, None, False)
    return low.op.ReduceSum(loss, keepdims=0)
