"""Decomposes com.microsoft convolution ops into standard ops."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.autodiff._bodies import defbody
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff.rules.contrib._shared import CONV, MS, channels_first, channels_last, unsupported
from onnxtrain.autodiff.rules.contrib.activation import activated
from onnxtrain.emitter import Emitter


@defbody("FusedConv", MS, "X W B Z", "Y", activation="", activation_params=None, **CONV)
def fused_conv(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes FusedConv: Y = activation(Conv(X, W, B) + Z)."""
    return _fused_convolution(op, n, n.X, n.Z)


@defbody("NhwcConv", MS, "X W B", "Y", **CONV)
def nhwc_conv(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes NhwcConv: Y = Conv(X, W, B), with channels-last images and weights."""
    attributes = {name: n.attr(name) for name in CONV}
    rank = n.rank(n.X)
    y = op.Conv(channels_first(op, n.X, rank), channels_first(op, n.W, rank), n.B, **attributes)
    return channels_last(op, y, rank)


@defbody("NhwcFusedConv", MS, "X W B Z", "Y", activation="", activation_params=None, **CONV)
def nhwc_fused_conv(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes NhwcFusedConv: Y = activation(Conv(X, W, B) + Z), with channels-last images; W has Conv's layout."""
    rank = n.rank(n.X)
    z = None if n.Z is None else channels_first(op, n.Z, rank)
    return channels_last(op, _fused_convolution(op, n, channels_first(op, n.X, rank), z), rank)


def _fused_convolution(op: Emitter, n: NodeView, x: ir.Value, z: ir.Value | None) -> ir.Value:
    """Returns activation(Conv(x, W, B) + z) with the weights and attributes of the node."""
    y = op.Conv(x, n.W, n.B, **{name: n.attr(name) for name in CONV})
    y = y if z is None else op.Add(y, z)
    return activated(op, n, y, n.attr("activation"), n.attr("activation_params") or [])


@defbody(
    "ConvTransposeWithDynamicPads", MS, "X W Pads B", "Y",
    auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, output_padding=None, strides=None,
)  # fmt: skip
def conv_transpose_with_dynamic_pads(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes ConvTransposeWithDynamicPads: ConvTranspose without padding, then a Slice that removes the padding."""
    if n.attr("auto_pad") not in ("NOTSET", b"NOTSET"):
        raise unsupported(n, f"the padding {n.attr('auto_pad')}")
    names = ("dilations", "group", "kernel_shape", "output_padding", "strides")
    full: ir.Value = op.ConvTranspose(n.X, n.W, n.B, **{name: n.attr(name) for name in names})
    # Without the input `Pads`, there is no padding.
    if n.Pads is None:
        return full
    spatial = n.rank(n.X) - 2
    begins, ends = op.Split(n.Pads, axis=0, num_outputs=2, _outputs=2)
    ends = op.Sub(op.Shape(full, start=2), ends)
    return op.Slice(full, begins, ends, list(range(2, 2 + spatial)))
