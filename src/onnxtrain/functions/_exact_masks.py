"""Masked cotangents in a gradient that is differentiated once more."""

from __future__ import annotations

import onnx_ir as ir

from ._composite import DOMAIN, CompositeOp
from .activation import (
    clip_gradient,
    clip_gradient_of_finite,
    hardtanh_gradient,
    hardtanh_gradient_of_finite,
    relu_gradient,
    relu_gradient_of_finite,
)

__all__ = ["with_exact_masks"]

_EXACT: dict[CompositeOp, CompositeOp] = {
    clip_gradient_of_finite: clip_gradient,
    hardtanh_gradient_of_finite: hardtanh_gradient,
    relu_gradient_of_finite: relu_gradient,
}


def with_exact_masks(model: ir.Model) -> ir.Model:
    """Returns `model`, which is changed: its gradients of Relu, Clip and Hardtanh choose, where some multiplied.

    A mask as a factor is right for a finite cotangent, such as a gradient has behind a matrix product. The derivative
    of the factor multiplies a second cotangent by the same mask. That one comes from the other end of the gradient,
    where it may be infinite: behind 1 / x at zero, for example.

    Args:
        model: a graph with its gradients, before its functions are inlined.
    """
    for multiplying, choosing in _EXACT.items():
        for (domain, name, overload), function in list(model.functions.items()):
            dtype = _dtype_of(multiplying, domain, name)
            if dtype is not None:
                body = choosing.function_for(dtype, function.opset_imports[""])
                model.functions[domain, name, overload] = ir.Function(
                    domain, name, overload, graph=body.graph, attributes=list(body.attributes.values())
                )
    return model


def _dtype_of(composite: CompositeOp, domain: str, name: str) -> ir.DataType | None:
    """The dtype of a composite's function of this name; None if it is no function of it."""
    if domain != DOMAIN:
        return None
    return next((dtype for dtype, own in composite.names_by_dtype.items() if own == name), None)
