"""Turns an ONNX model into models of its derivatives (JVP, VJP, Hessian products), as `torch.func` does for functions.

The room `functions` is another one: it holds ops that a graph calls.
"""

# First of all imports: where onnx is missing, the error then says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from ._gradient_check import GradientCheck, check_gradients
from ._per_sample import per_sample_gradients
from ._products import hessian_vector_product, jvp, vjp

__all__ = ["GradientCheck", "check_gradients", "hessian_vector_product", "jvp", "per_sample_gradients", "vjp"]
