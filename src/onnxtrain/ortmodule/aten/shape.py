"""Views and what else moves elements."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.ortmodule._lowering import Lowering, lower


@lower("aten.t.default")
def t(low: Lowering, x: ir.Value) -> ir.Value:
    return low.op.Transpose(x, perm=[1, 0]) if len(low.fake(0).shape) == 2 else x


@lower("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
def view(low: Lowering, x: ir.Value, size: Any) -> ir.Value:
    return low.op.Reshape(x, low.ints(size), allowzero=1)  # type: ignore[no-any-return]


@lower("getitem")
def getitem(low: Lowering, values: Any, index: int) -> Any:
    return values[index]
