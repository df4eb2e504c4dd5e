"""Composite training ops as model-local functions of domain `onnxtrain`."""

from ._composite import COMPOSITES, DOMAIN, CompositeOp, composite
from .activation import softmax_gradient

__all__ = ["COMPOSITES", "DOMAIN", "CompositeOp", "composite", "softmax_gradient"]
