"""Elementwise arithmetic and analytic functions."""

from __future__ import annotations

import onnx_ir as ir

from ...emitter import Emitter
from .._node import NodeView
from .._registry import defvjp, nondifferentiable, vjp

defvjp("Add", broadcasts=True, A=lambda op, n, ct: ct, B=lambda op, n, ct: ct)
defvjp("Sub", broadcasts=True, A=lambda op, n, ct: ct, B=lambda op, n, ct: op.Neg(ct))
defvjp("Mul", broadcasts=True, A=lambda op, n, ct: op.Mul(ct, n.B), B=lambda op, n, ct: op.Mul(ct, n.A))
defvjp(
    "Div",
    broadcasts=True,
    A=lambda op, n, ct: op.Div(ct, n.B),
    B=lambda op, n, ct: op.Neg(op.Mul(ct, op.Div(n.out.C, n.B))),
)
defvjp("Neg", X=lambda op, n, ct: op.Neg(ct))
# |x|'(0) = 0, as in torch: Sign(0) = 0.
defvjp("Abs", X=lambda op, n, ct: op.Mul(ct, op.Sign(n.X)))
defvjp("Sqrt", X=lambda op, n, ct: op.Div(op.Mul(ct, 0.5), n.out.Y))
defvjp("Reciprocal", X=lambda op, n, ct: op.Neg(op.Mul(ct, op.Mul(n.out.Y, n.out.Y))))
defvjp("Exp", input=lambda op, n, ct: op.Mul(ct, n.out.output))
defvjp("Log", input=lambda op, n, ct: op.Div(ct, n.input))
defvjp("Sin", input=lambda op, n, ct: op.Mul(ct, op.Cos(n.input)))
defvjp("Cos", input=lambda op, n, ct: op.Neg(op.Mul(ct, op.Sin(n.input))))

nondifferentiable("Sign", "Floor", "Ceil", "Round", reason="piecewise constant: its derivative is zero almost everywhere")


@vjp("Sum", wrt=("data_0",), broadcasts=True)
def sum_(op: Emitter, n: NodeView, ct: ir.Value) -> list[ir.Value]:
    """Sum of all arguments: each gets the cotangent."""
    return [ct] * len(n.inputs)
