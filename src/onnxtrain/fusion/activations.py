"""Defines fusions of activations that models spell out in standard ops."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.functions import silu
from onnxtrain.fusion._pass import Fusion
from onnxtrain.fusion._patterns import Match, equal_to, op, value


def _is_float(last: ir.Node, match: Match) -> bool:
    """True if the chain is in float32, the only dtype with a native kernel."""
    x = match["x"]
    # Without a kernel, the function would compute the same nodes.
    return x.dtype == ir.DataType.FLOAT and x.shape is not None


_x = value("x")

# x * sigmoid(x), and x / (1 + exp(-x)).
ACTIVATIONS = (
    Fusion(composite=silu, pattern=op.Mul(_x, op.Sigmoid(_x)), where=_is_float),
    Fusion(composite=silu, pattern=op.Div(_x, op.Add(op.Exp(op.Neg(_x)), equal_to(1.0))), where=_is_float),
)
