"""Elementwise arithmetic, comparisons and activations."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.ortmodule._lowering import Lowering, lower


@lower("aten.add.Tensor", "aten.add.Scalar")
def add(low: Lowering, a: Any, b: Any, alpha: Any = 1) -> ir.Value:
    a, b = low.tensors(a, b)
    if alpha != 1:
        b = low.op.Mul(b, low.tensor(alpha, low.dtype))
    return low.op.Add(a, b)  # type: ignore[no-any-return]


@lower("aten.sub.Tensor", "aten.sub.Scalar")
def sub(low: Lowering, a: Any, b: Any, alpha: Any = 1) -> ir.Value:
    a, b = low.tensors(a, b)
    if alpha != 1:
        b = low.op.Mul(b, low.tensor(alpha, low.dtype))
    return low.op.Sub(a, b)  # type: ignore[no-any-return]


@lower("aten.mul.Tensor", "aten.mul.Scalar")
def mul(low: Lowering, a: Any, b: Any) -> ir.Value:
    return low.op.Mul(*low.tensors(a, b))  # type: ignore[no-any-return]


@lower("aten.div.Tensor", "aten.div.Scalar")
def div(low: Lowering, a: Any, b: Any) -> ir.Value:
    return low.op.Div(*low.tensors(a, b))  # type: ignore[no-any-return]


@lower("aten.relu.default")
def relu(low: Lowering, x: ir.Value) -> ir.Value:
    return low.op.Relu(x)  # type: ignore[no-any-return]


@lower("aten.tanh.default")
def tanh(low: Lowering, x: ir.Value) -> ir.Value:
    return low.op.Tanh(x)  # type: ignore[no-any-return]


@lower("aten.detach.default")
def detach(low: Lowering, x: ir.Value) -> ir.Value:
    """An Identity with the mark that stops gradients (`onnxtrain.passes.is_stop_gradient`)."""
    result: ir.Value = low.op.Identity(x)
    node = result.producer()
    assert node is not None
    node.metadata_props["pkg.torch.onnx.fx_node"] = "aten.detach.default"
    return result
