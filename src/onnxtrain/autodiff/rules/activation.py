"""Activation functions."""

from __future__ import annotations

from ...functions import softmax_gradient
from .._registry import defvjp

# relu'(0) = 0, as in torch.
defvjp("Relu", X=lambda op, n, ct: op.Where(op.Greater(n.out.Y, 0.0), ct, 0.0))
defvjp("Sigmoid", X=lambda op, n, ct: op.Mul(ct, op.Mul(n.out.Y, op.Sub(1.0, n.out.Y))))
defvjp("Tanh", input=lambda op, n, ct: op.Mul(ct, op.Sub(1.0, op.Mul(n.out.output, n.out.output))))
defvjp("Softmax", input=lambda op, n, ct: op.call(softmax_gradient, n.out.output, ct, axis=n.attr("axis")))
