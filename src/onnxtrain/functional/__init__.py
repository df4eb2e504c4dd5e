"""Transforms an ONNX model into a model of its derivatives (JVP, VJP, Hessian-vector products), like `torch.func`.

Not to be confused with `onnxtrain.functions`, which holds composite ops.
"""

# Must be the first import: if onnx is not installed, the error then says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from ._gradient_check import GradientCheck, check_gradients
from ._op_check import check_op
from ._per_sample import per_sample_gradients
from ._products import hessian_vector_product, jvp, vjp

__all__ = [
    "GradientCheck",
    "check_gradients",
    "check_op",
    "hessian_vector_product",
    "jvp",
    "per_sample_gradients",
    "vjp",
]
