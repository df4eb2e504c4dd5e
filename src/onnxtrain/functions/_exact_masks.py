"""Rewrites gradients that mask cotangents by products, before they are differentiated once more."""

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

_EXACT: dict[CompositeOp, CompositeOp] = {
    clip_gradient_of_finite: clip_gradient,
    hardtanh_gradient_of_finite: hardtanh_gradient,
    relu_gradient_of_finite: relu_gradient,
}


def with_exact_masks(model: ir.Model) -> ir.Model:
    """Makes the gradients of Relu, Clip and Hardtanh in `model` select by Where instead of multiplying by a mask.

    Args:
        model: a graph with its gradients, before its functions are inlined. Changed in place, and returned.
    """
    # A mask as a factor suits finite cotangents, as a gradient has behind a matrix product. Differentiating the product
    # multiplies a second cotangent by the mask, which comes from the other end of the gradient and may be infinite,
    # e.g. behind 1 / x at zero.
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
    """Returns the dtype of a composite's function of this name; None if it is no function of the composite."""
    if domain != DOMAIN:
        return None
    return next(
        (dtype for dtype, function_name in composite.names_by_dtype.items() if function_name == name), None
    )
