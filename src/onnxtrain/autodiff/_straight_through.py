"""Defines straight-through gradients: the backward pass treats rounding as the identity (Bengio et al., 2013)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.errors import NoGradientRule

from ._node import NodeView, where
from ._registry import Cotangents, local_rules, vjp
from .rules._windows import scatter_windows, windows_of
from .rules.math import cast_back
from .rules.quantized import scale_cotangent, sum_by_scale


@contextmanager
def straight_through_rules(wanted: bool = True) -> Iterator[None]:
    """Registers straight-through rules for rounding and quantization for the duration of a `with` block.

    Round, Ceil and Floor pass cotangents through unchanged, and so does a Cast of a rounded value to int32.
    QuantizeLinear does the same for values within the range of its integers, like PyTorch's fake quantization; its
    scale gets the gradient of Learned Step Size Quantization (Esser et al., 2020). For DynamicQuantizeLinear, the
    computed scale is treated as a constant. MatMulInteger and ConvInteger get the gradients of MatMul and Conv on the
    dequantized values.

    Args:
        wanted: False registers nothing.
    """
    with local_rules() if wanted else nullcontext():
        if wanted:
            _register()
        yield


def _register() -> None:
    """Registers the straight-through rules in the innermost `local_rules` block."""
    # No cleanup needed: `local_rules` drops the rules when its block ends.
    for name in ("Round", "Ceil", "Floor"):
        vjp(name, wrt=("X",))(lambda op, n, ct: ct)
    vjp("QuantizeLinear", wrt=("x", "y_scale"), straight_through=True)(_quantize)
    vjp("DynamicQuantizeLinear", wrt=("x",), outputs=("y", "y_scale"), straight_through=True)(
        _quantize_dynamically
    )
    vjp("DequantizeLinear", wrt=("x", "x_scale"), straight_through=True)(_dequantize)
    vjp("MatMulInteger", wrt=("A",), straight_through=True)(_matmul_integer)
    vjp("ConvInteger", wrt=("x",), straight_through=True)(_conv_integer)
    vjp("Cast", wrt=("input",), straight_through=_is_rounded)(_cast)


def _quantize(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """Straight-through VJP of QuantizeLinear: differentiates y = x / y_scale + y_zero_point, without rounding.

    Elements that are clipped to the range of y's dtype contribute no gradient to x or y_scale.

    Raises:
        NoGradientRule: the dtype of y is not an integer type.
    """
    # Only integers: the range check below needs evenly spaced values, unlike those of float8 types.
    dtype = n.out.y.dtype
    if dtype is None or not dtype.is_integer():
        raise NoGradientRule(
            f"differentiating QuantizeLinear ({where(n.node)}) straight through: its output is {dtype}; only integer "
            "dtypes are supported"
        )
    scale = _spread(op, n, n.y_scale)
    inside = op.Round(op.Div(n.x, scale))
    if n.y_zero_point is not None:
        inside = op.Add(inside, _spread(op, n, op.Cast(n.y_zero_point, to=n.y_scale.dtype)))
    low, high = (op.const(float(end), like=inside) for end in (dtype.min, dtype.max))
    within = op.And(op.GreaterOrEqual(inside, low), op.LessOrEqual(inside, high))
    # As in PyTorch's fake quantization, values outside of the range get no gradient.
    ct_x = op.Where(within, op.Div(ct, scale), op.const(0.0, like=ct))
    if not n.needs("y_scale"):
        return {"x": ct_x}
    # d(x / s)/ds = -(x / s) / s; `ct_x` already contains one factor 1 / s.
    slopes = op.Neg(op.Mul(ct_x, op.Div(n.x, scale)))
    return {"x": ct_x, "y_scale": sum_by_scale(op, n, slopes, n.y_scale)}


def _quantize_dynamically(
    op: Emitter, n: NodeView, cts: tuple[ir.Value | None, ir.Value | None]
) -> ir.Value | None:
    """VJP of DynamicQuantizeLinear: ct_x = ct_y / y_scale, treating the computed scale as a constant."""
    return None if cts[0] is None else op.Div(cts[0], n.out.y_scale)


def _dequantize(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """VJP of DequantizeLinear, y = (x - x_zero_point) * x_scale; the cotangent of an integer x is floating point."""
    ct_x = op.Mul(ct, _spread(op, n, n.x_scale)) if n.needs("x") else None
    return {"x": ct_x, "x_scale": scale_cotangent(op, n, ct) if n.needs("x_scale") else None}


def _matmul_integer(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of MatMulInteger, Y = (A - a_zero_point) · (B - b_zero_point), with respect to A."""
    b = _shifted(op, n.B, n.b_zero_point, ct)
    # If B is a vector, ct_A is the outer product of ct and B.
    if n.rank(n.B) == 1:
        return op.MatMul(op.Unsqueeze(ct, [-1]), op.Unsqueeze(b, [0]))
    if n.rank(n.B) != 2:
        raise NoGradientRule(
            f"differentiating MatMulInteger ({where(n.node)}) straight through: {n.B.name!r} is neither a matrix nor "
            "a vector"
        )
    return op.MatMul(ct, op.Transpose(b, perm=[1, 0]))


def _conv_integer(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of ConvInteger with respect to x: scatters ct · (w - w_zero_point) into the windows of x."""
    shape = n.static(n.w)
    zero = n.w_zero_point
    # A vector holds one zero point per output channel, the first axis of the weight.
    if zero is not None and n.rank(zero) == 1:
        zero = op.Reshape(zero, [-1] + [1] * (len(shape) - 1))
    weight = _shifted(op, n.w, zero, ct)
    windows = windows_of(op, n, n.x, shape[2:], n.out.y)
    return scatter_windows(op, ct, weight, windows, n.x, n.attr("group"))


def _shifted(op: Emitter, q: ir.Value, zero: ir.Value | None, like: ir.Value) -> ir.Value:
    """Returns q - zero, computed in the dtype of `like`. If `zero` is None, only casts `q` to that dtype."""
    value: ir.Value = op.Cast(q, to=like.dtype)
    value.shape = q.shape
    return value if zero is None else op.Sub(value, op.Cast(zero, to=like.dtype))


def _is_rounded(node: ir.Node) -> bool:
    """True for Cast(Round(x)) to int32, which is how biases are quantized: QuantizeLinear has no int32 output."""
    # Other casts to integers compute indices and masks, through which no gradient flows.
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node.outputs[0].dtype == ir.DataType.INT32 and source is not None and source.op_type == "Round"


def _cast(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of Cast: passes the cotangent through unchanged for an integer input, else applies the standard rule."""
    integer = n.input.dtype is not None and not n.input.dtype.is_floating_point()
    return ct if integer else cast_back(op, n, ct)


def _spread(op: Emitter, n: NodeView, value: ir.Value) -> ir.Value:
    """Expands a scale or zero point (per tensor, per axis or per block) to the shape of x."""
    # Dequantizing ones yields the scale of each element, and handles axis and block_size.
    ones = op.Expand(op.const(1, ir.DataType.INT8), op.shape_of(n.x))
    attributes = {name: n.attr(name) for name in ("axis", "block_size")}
    result: ir.Value = op.DequantizeLinear(ones, value, **attributes)
    result.shape = n.x.shape
    return result
