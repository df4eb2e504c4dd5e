"""Defines elementwise functions whose derivative is given explicitly, not derived from the nodes that compute them.

PyTorch has a formula per derivative, e.g. 1 - y² for tanh. Where ONNX has no operator for a function, the derivative of
its formula is often NaN or inexact at points where PyTorch's is finite.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.emitter import Emitter

from ._composite import composite


@composite("WithSlope", ["y", "x", "slope"])
def with_slope(op: Emitter, y: ir.Value, x: ir.Value, slope: ir.Value) -> ir.Value:
    """Returns y, declared as an elementwise function of x with the derivative `slope`, which has the shape of y."""
    return op.Identity(y)


@composite("WithSlopes", ["y", "a", "slope_a", "b", "slope_b"])
def with_slopes(
    op: Emitter, y: ir.Value, a: ir.Value, slope_a: ir.Value, b: ir.Value, slope_b: ir.Value
) -> ir.Value:
    """Returns y, declared as an elementwise function of a and b with the derivatives `slope_a` and `slope_b`."""
    return op.Identity(y)
