"""Lowers convolutions."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.ortmodule.lowering._table import Lowering, lower, per_axis


@lower("aten.convolution.default")
def convolution(
    low: Lowering,
    x: ir.Value,
    weight: ir.Value,
    bias: ir.Value | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> ir.Value:
    """Lowers to Conv or ConvTranspose. x: [batch, channels, 1 to 3 spatial axes]."""
    rank = len(low.fake(0).shape) - 2
    stride, padding, dilation = (per_axis(n, rank) for n in (stride, padding, dilation))
    attributes = {"strides": stride, "pads": [*padding, *padding], "dilations": dilation, "group": groups}
    inputs = (x, weight) if bias is None else (x, weight, bias)
    if not transposed:
        return low.op.Conv(*inputs, **attributes)
    extra = per_axis(output_padding, rank)
    return low.op.ConvTranspose(*inputs, **attributes, output_padding=extra if any(extra) else None)
