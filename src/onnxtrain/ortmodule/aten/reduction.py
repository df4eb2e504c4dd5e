"""Reductions."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.ortmodule._lowering import Lowering, lower


@lower("aten.mean.dim", "aten.mean.default")
def mean(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> ir.Value:
    axes = low.ints(dim) if dim else None
    return low.op.ReduceMean(low.tensor(x, low.dtype), axes, keepdims=int(keepdim))  # type: ignore[no-any-return]


@lower("aten.sum.dim_IntList", "aten.sum.default")
def sum_(low: Lowering, x: ir.Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> ir.Value:
    axes = low.ints(dim) if dim else None
    return low.op.ReduceSum(low.tensor(x, low.dtype), axes, keepdims=int(keepdim))  # type: ignore[no-any-return]
