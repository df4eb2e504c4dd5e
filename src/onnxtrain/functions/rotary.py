"""Defines rotary position embeddings of halves (Su et al., "RoFormer", 2021), as Llama and GPT-NeoX compute them.

Shapes: x `[..., n]` with even n; cos and sin broadcast to the shape of x, and have n elements in their last axis.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter

from ._composite import composite


@composite("Rotary", ["x", "cos", "sin"])
def rotary(op: Emitter, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Computes x * cos + rotated(x) * sin, where rotated((low, high)) = (-high, low) for the halves of each row."""
    return op.Add(op.Mul(x, cos), op.Mul(rotated(op, x), sin))


@composite("RotaryGradient", ["ct", "cos", "sin"])
def rotary_gradient(op: Emitter, ct: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """VJP of Rotary: the cotangent of x."""
    low, high = _halves(op, op.Mul(ct, sin))
    return op.Add(op.Mul(ct, cos), op.Concat(high, op.Neg(low), axis=-1))


def rotated(op: Emitter, x: ir.Value) -> ir.Value:
    """Emits (-high, low) of the halves of each row (low, high)."""
    low, high = _halves(op, x)
    return op.Concat(op.Neg(high), low, axis=-1)


def _halves(op: Emitter, x: ir.Value) -> tuple[ir.Value, ...]:
    return op.Split(x, axis=-1, num_outputs=2, _outputs=2)
