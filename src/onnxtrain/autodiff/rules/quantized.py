"""Differentiates DequantizeLinear, and declares why quantizing ops have no gradient by default."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff._broadcast import sum_to_shape_of
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import nondifferentiable, not_yet, vjp
from onnxtrain.emitter import Emitter

nondifferentiable("ConvInteger", "MatMulInteger", reason="its inputs and its output are integers")
not_yet(
    "DynamicQuantizeLinear",
    "QuantizeLinear",
    reason="it rounds: pass straight_through=True to ignore the rounding in the backward pass, or train the model "
    "before it is quantized",
)


@vjp("DequantizeLinear", wrt=("x_scale",))
def dequantize_linear(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """VJP of y = (x - x_zero_point) * x_scale with respect to x_scale, which is per tensor, per axis or per block."""
    return scale_cotangent(op, n, ct)


def scale_cotangent(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
    """Returns the cotangent of a DequantizeLinear's scale: the sum of ct * (x - x_zero_point) per scale."""
    # DequantizeLinear with scales of one computes x - x_zero_point, and handles axis and block_size.
    attributes = {name: n.attr(name) for name in ("axis", "block_size")}
    steps = op.DequantizeLinear(n.x, op.ones_like(n.x_scale), n.x_zero_point, **attributes)
    product = op.Mul(ct, op.Cast(steps, to=ct.dtype))
    return sum_by_scale(op, n, product, n.x_scale)


def sum_by_scale(op: Emitter, n: NodeView, value: ir.Value, scale: ir.Value) -> ir.Value:
    """Sums a value with the shape of x over the elements that share a scale."""
    if value.dtype != scale.dtype:
        value = op.Cast(value, to=scale.dtype)
    if n.attr("block_size"):
        return _sum_blocks(op, n, value, scale)
    spread = scale
    # A vector of scales belongs to `axis`: trailing axes of size one make it broadcast along that axis.
    if n.rank(scale) == 1:
        ones = n.rank(n.x) - 1 - n.axis(n.x, n.attr("axis"))
        spread = op.Unsqueeze(scale, list(range(1, ones + 1)))
        spread.shape = ir.Shape([*scale.shape, *[1] * ones])  # type: ignore[misc]
    return op.reshape_like(sum_to_shape_of(op, value, n.x, spread), scale)


def _sum_blocks(op: Emitter, n: NodeView, value: ir.Value, scale: ir.Value) -> ir.Value:
    """Sums a value with the shape of x over the blocks along `axis`; the last block may be shorter."""
    axis, block = n.axis(n.x, n.attr("axis")), n.attr("block_size")
    blocks, sizes = op.dim(scale, axis), op.shape_of(n.x)
    missing = op.Sub(op.Mul(blocks, op.const(block)), op.dim(n.x, axis))
    padded = op.pad(value, op.Concat(op.const([0]), missing, axis=0), [axis], n.rank(n.x))
    before, after = op.Slice(sizes, [0], [axis]), op.Slice(sizes, [axis + 1], [n.rank(n.x)])
    split = op.Reshape(padded, op.Concat(before, blocks, op.const([block]), after, axis=0), allowzero=1)
    return op.ReduceSum(split, [axis + 1], keepdims=0)
