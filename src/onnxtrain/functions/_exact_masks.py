"""Removes multiplications by masks from gradients before the gradients are differentiated again."""

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
    """Makes the gradients of Relu, Clip and Hardtanh select with Where, so that they can be differentiated again.

    Multiplying by a mask is faster, but gives NaN (0 * inf) if a later differentiation has infinite cotangents.

    Args:
        model: a model with gradients, before its functions are inlined. It is modified in place.

    Returns:
        The same model.
    """
    # Multiplying by a mask is correct for finite cotangents, such as those after a matrix product. Differentiating the
    # multiplication multiplies a second cotangent by the mask, which comes from the other end of the gradient and may
    # be infinite, e.g. after 1 / x at zero.
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
    """Returns the dtype of the composite's function called `name`; None if the composite has no such function."""
    if domain != DOMAIN:
        return None
    return next(
        (dtype for dtype, function_name in composite.names_by_dtype.items() if function_name == name), None
    )
