"""Layers."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.ortmodule._lowering import Lowering, lower


@lower("aten.addmm.default")
def addmm(low: Lowering, c: ir.Value, a: ir.Value, b: ir.Value, beta: Any = 1, alpha: Any = 1) -> ir.Value:
    return low.op.Gemm(a, b, c, alpha=float(alpha), beta=float(beta))  # type: ignore[no-any-return]


@lower("aten.mm.default", "aten.bmm.default", "aten.matmul.default")
def matmul(low: Lowering, a: ir.Value, b: ir.Value) -> ir.Value:
    return low.op.MatMul(a, b)  # type: ignore[no-any-return]


@lower("aten.bernoulli.p", "aten.bernoulli.float")
def bernoulli(low: Lowering, x: ir.Value, p: float, generator: Any = None) -> ir.Value:
    """Drawn by PyTorch, as `torch.nn.functional.dropout` does in eager mode."""
    dtype = low.result.dtype
    return low.random_input(lambda shape: torch.empty(tuple(shape), dtype=dtype).bernoulli_(p))


@lower("aten.mse_loss.default")
def mse_loss(low: Lowering, x: ir.Value, y: ir.Value, reduction: int = 1) -> ir.Value:
    d = low.op.Sub(x, y)
    return low.op.ReduceMean(low.op.Mul(d, d), keepdims=0)  # type: ignore[no-any-return]
