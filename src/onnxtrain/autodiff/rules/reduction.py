"""Differentiates reductions and cumulative sums and products."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, defvjp, nondifferentiable, vjp
from onnxtrain.autodiff.rules._composite import composite_vjp
from onnxtrain.autodiff.rules._count import counting_dtype, divide_by_count
from onnxtrain.autodiff.rules.math import sign
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.functions import cumulative_product, cumulative_product_gradient


def keep_reduced(op: Emitter, n: NodeView, value: ir.Value) -> ir.Value:
    """Unsqueezes the reduced axes of a value that has the output's shape, so that it broadcasts against the input."""
    # Without axes, the output is a scalar or, with noop_with_empty_axes, has the input's shape: both broadcast.
    if n.attr("keepdims") or n.axes is None:
        return value
    return op.Unsqueeze(value, n.axes)


def expand_reduced(op: Emitter, n: NodeView, value: ir.Value) -> ir.Value:
    """Expands a value with the shape of the reduction's output to the shape of its input."""
    return op.Expand(keep_reduced(op, n, value), op.shape_of(n.data))


def _reduced_again(op: Emitter, n: NodeView, op_type: str, value: ir.Value) -> ir.Value:
    """Applies the reduction `op_type` to `value`, which has the input's shape, over the node's axes; keepdims is 1."""
    noop = n.attr("noop_with_empty_axes")
    return op.emit(op_type, value, n.axes, keepdims=1, noop_with_empty_axes=noop)


defvjp("ReduceSum", data=lambda op, n, ct: expand_reduced(op, n, ct))


@vjp("ReduceMean", wrt=("data",))
def reduce_mean(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of ReduceMean: every element gets ct divided by the number of averaged elements."""
    count = _reduced_count(n)
    if count is not None:
        return expand_reduced(op, n, divide_by_count(op, ct, count))
    wide = counting_dtype(ct)
    share = op.Cast(op.Size(n.data), to=wide)
    dims = static_dims(n.out.reduced)
    if dims is None or any(dim != 1 for dim in dims):
        # The ratio of the sizes, because the axes may only be known at run time.
        share = op.Div(share, op.Cast(op.Size(n.out.reduced), to=wide))
    return expand_reduced(op, n, divide_by_count(op, ct, share))


def _reduced_count(n: NodeView) -> int | None:
    """Returns the number of input elements per output element; None if it is only known at run time."""
    dims = static_dims(n.data)
    axes = np.empty(0, np.int64) if n.axes is None else n.constant(n.axes)
    if dims is None or axes is None:
        return None
    over_all = axes.size == 0 and not n.attr("noop_with_empty_axes")
    sizes = [dims[axis] for axis in (range(len(dims)) if over_all else axes.tolist())]
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def _reduce_extremum(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of ReduceMax and ReduceMin: elements that attain the extremum share ct evenly, as in torch.amax."""
    reached = op.Equal(n.data, keep_reduced(op, n, n.out.reduced))
    # Counted in a wide dtype: a float16 sum of ones saturates at 2048.
    count = _reduced_again(op, n, "ReduceSum", op.Cast(reached, to=counting_dtype(ct)))
    # Not Where: as in PyTorch, all elements of a row with NaN get a gradient of NaN. Nothing equals the extremum there.
    return op.Mul(op.Cast(reached, to=ct.dtype), divide_by_count(op, keep_reduced(op, n, ct), count))


vjp("ReduceMax", wrt=("data",))(_reduce_extremum)
vjp("ReduceMin", wrt=("data",))(_reduce_extremum)


@vjp("ReduceProd", wrt=("data",))
def reduce_prod(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of ReduceProd: every element gets ct times the product of all other elements, even if some are zero.

    Computed as the product of all nonzero elements, divided by the element if it is nonzero, times the product of the
    other zeros.
    """
    # The product of the other zeros is 0 if there are any. It is computed from these elements instead of a constant: if
    # there is just one, its derivative is not 0, and the second derivative needs it.
    zero = op.Equal(n.data, 0.0)
    nonzero = op.Where(zero, 1.0, n.data)
    # With a shape, LongSumsPass recognizes a long product.
    nonzero.shape = n.data.shape
    others = op.Div(_reduced_again(op, n, "ReduceProd", nonzero), nonzero)
    count = _reduced_again(op, n, "ReduceSum", op.Cast(zero, to=ct.dtype))
    total = _reduced_again(op, n, "ReduceSum", op.Where(zero, n.data, 0.0))
    one, two = (op.Equal(count, number) for number in (1.0, 2.0))
    # The product of the other zeros, for a zero element and for a nonzero element.
    from_zero = op.Where(one, 1.0, op.Where(two, op.Sub(total, n.data), 0.0))
    from_other = op.Where(op.Equal(count, 0.0), 1.0, op.Where(one, total, 0.0))
    return op.Mul(keep_reduced(op, n, ct), op.Mul(others, op.Where(zero, from_zero, from_other)))


# As in PyTorch, |x|'(0) = 0, and the gradient of the Euclidean norm is 0 at the zero vector.
defvjp("ReduceL1", data=lambda op, n, ct: op.Mul(keep_reduced(op, n, ct), sign(op, n.data, ct)))


@vjp("ReduceL2", wrt=("data",))
def reduce_l2(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of ReduceL2: ct_x = ct * x / norm, zero if the norm is zero."""
    none = op.Equal(n.out.reduced, 0.0)
    # Divide by 1 where the norm is zero: 0/0 is masked here, but would be NaN in the second derivative.
    ratio = op.Where(none, 0.0, op.Div(ct, op.Where(none, 1.0, n.out.reduced)))
    return op.Mul(n.data, keep_reduced(op, n, ratio))


defvjp("ReduceSumSquare", data=lambda op, n, ct: op.Mul(n.data, keep_reduced(op, n, op.Mul(ct, 2.0))))
defvjp("ReduceLogSum", data=lambda op, n, ct: expand_reduced(op, n, op.Div(ct, op.Exp(n.out.reduced))))


@vjp("ReduceLogSumExp", wrt=("data",))
def reduce_log_sum_exp(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of ReduceLogSumExp: ct_x = ct * softmax(x) = ct * exp(x - reduced)."""
    softmax = op.Exp(op.Sub(n.data, keep_reduced(op, n, n.out.reduced)))
    return op.Mul(keep_reduced(op, n, ct), softmax)


@vjp("CumSum", wrt=("x",))
def cum_sum(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of CumSum: the cumulative sum of ct in the opposite direction."""
    return op.CumSum(ct, n.inputs[1], exclusive=n.attr("exclusive"), reverse=1 - n.attr("reverse"))


@vjp("CumProd", wrt=("x",))
def cum_prod(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of y = CumProd(x): ct_x = R(ct * y) / x, where R is the cumulative sum in the opposite direction.

    The formula holds before the first zero along the axis. At the first zero, ct_x is R(ct * y'), where y' is CumProd
    of x with that zero replaced by 1. After the first zero, ct_x is 0.
    """
    # That 0 is computed as the first zero times a cotangent, so that the second derivative is correct.
    axis, exclusive, reverse = n.inputs[1], n.attr("exclusive"), n.attr("reverse")

    def back(value: ir.Value) -> ir.Value:
        return op.CumSum(value, axis, exclusive=exclusive, reverse=1 - reverse)

    # Zeros counted along the axis: 1 from the first zero on, 2 from the second zero on.
    zero = op.Equal(n.x, 0.0)
    zeros = op.CumSum(op.Cast(zero, to=ct.dtype), axis, reverse=reverse)
    first, second = (op.And(zero, op.Equal(zeros, number)) for number in (1.0, 2.0))

    def without(left_out: ir.Value) -> ir.Value:
        product = op.CumProd(op.Where(left_out, 1.0, n.x), axis, exclusive=exclusive, reverse=reverse)
        return back(op.Mul(ct, product))

    safe, at_first = op.Where(zero, 1.0, n.x), without(first)
    before = op.Div(back(op.Mul(ct, n.out.y)), safe)
    first_zero = op.CumSum(op.Where(first, n.x, 0.0), axis, reverse=reverse)
    after = op.Mul(first_zero, op.Where(second, without(op.Or(first, second)), op.Div(at_first, safe)))
    return op.Where(first, at_first, op.Where(op.Equal(zeros, 0.0), before, after))


@composite_vjp(cumulative_product, ("y",))
def _cumulative_product(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of a cumulative product along the first axis."""
    return op.call(cumulative_product_gradient, ct, n.x, n.out.y)


nondifferentiable("ArgMax", "ArgMin", reason="its output is an integer")
