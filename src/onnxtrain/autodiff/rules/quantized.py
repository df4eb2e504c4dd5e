"""Quantization."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff._broadcast import sum_to_shape_of
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, nondifferentiable, not_yet, vjp
from onnxtrain.emitter import Emitter

nondifferentiable("ConvInteger", "MatMulInteger", reason="its inputs and its result are integers")
not_yet(
    "DynamicQuantizeLinear",
    "QLinearConv",
    "QLinearMatMul",
    "QuantizeLinear",
    reason="rounding needs a straight-through policy; train the model before it is quantized",
)


@vjp("DequantizeLinear", wrt=("x_scale",))
def dequantize_linear(op: Emitter, n: NodeView, ct: ir.Value) -> Cotangents:
    """Output (x - x_zero_point) * x_scale, with a scale for all, per entry of `axis`, or per block of it."""
    attributes = {name: n.attr(name) for name in ("axis", "block_size")}
    steps = op.DequantizeLinear(n.x, op.ones_like(n.x_scale), n.x_zero_point, **attributes)
    product = op.Mul(ct, op.Cast(steps, to=ct.dtype))
    if product.dtype != n.x_scale.dtype:
        product = op.Cast(product, to=n.x_scale.dtype)
    if n.attr("block_size"):
        return _sum_blocks(op, n, product)
    scale = n.x_scale
    if n.rank(scale) == 1:
        ones = n.rank(n.x) - 1 - n.axis(n.x, n.attr("axis"))
        scale = op.Unsqueeze(scale, list(range(1, ones + 1)))
        scale.shape = ir.Shape([*n.x_scale.shape, *[1] * ones])
    return op.reshape_like(sum_to_shape_of(op, product, n.out.y, scale), n.x_scale)


def _sum_blocks(op: Emitter, n: NodeView, value: ir.Value) -> ir.Value:
    """Sums `value`, of the shape of x, over the blocks along the axis; the last block may be shorter."""
    axis, block = n.axis(n.x, n.attr("axis")), n.attr("block_size")
    blocks, sizes = op.dim(n.x_scale, axis), op.shape_of(n.x)
    missing = op.Sub(op.Mul(blocks, op.const(block)), op.dim(n.x, axis))
    padded = op.pad(value, op.Concat(op.const([0]), missing, axis=0), [axis], n.rank(n.x))
    before, after = op.Slice(sizes, [0], [axis]), op.Slice(sizes, [axis + 1], [n.rank(n.x)])
    split = op.Reshape(padded, op.Concat(before, blocks, op.const([block]), after, axis=0), allowzero=1)
    return op.ReduceSum(split, [axis + 1], keepdims=0)
