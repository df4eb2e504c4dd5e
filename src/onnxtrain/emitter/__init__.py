"""Writing ONNX nodes: `op.Mul(a, b)` appends a Mul node to a graph and returns its output value.

Everything that builds graphs (gradient rules, losses, optimizers, onnxblock) writes them with an :class:`Emitter`.
"""

from onnxtrain.emitter._emitter import AttributeRef, Composite, Emitter, Operand, Write
from onnxtrain.emitter._schemas import output_dtype, schema_of
from onnxtrain.emitter._values import find_value, static_dims, values_by_name

__all__ = [
    "AttributeRef",
    "Composite",
    "Emitter",
    "Operand",
    "Write",
    "find_value",
    "output_dtype",
    "schema_of",
    "static_dims",
    "values_by_name",
]
