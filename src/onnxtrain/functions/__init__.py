"""Composite training ops as model-local functions of domain `onnxtrain`."""

from ._composite import COMPOSITES, DOMAIN, CompositeOp, composite
from .activation import (
    gelu_gradient,
    gelu_tanh_gradient,
    log_softmax_gradient,
    mish_gradient,
    softmax_gradient,
)
from .loss import softmax_cross_entropy_gradient

__all__ = [
    "COMPOSITES",
    "DOMAIN",
    "CompositeOp",
    "composite",
    "gelu_gradient",
    "gelu_tanh_gradient",
    "log_softmax_gradient",
    "mish_gradient",
    "softmax_cross_entropy_gradient",
    "softmax_gradient",
]
