"""Derivatives of ONNX models as ONNX models: what `torch.func` and JAX offer for functions, for graphs."""

import onnxtrain._desk  # noqa: F401  # isort: skip

from ._gradient_check import check_gradients
from ._per_sample import per_sample_gradients
from ._products import hessian_vector_product, jvp, vjp

__all__ = ["check_gradients", "hessian_vector_product", "jvp", "per_sample_gradients", "vjp"]
