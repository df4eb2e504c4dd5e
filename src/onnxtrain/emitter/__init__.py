"""Writes ONNX nodes: `op.Mul(a, b)` appends a Mul node to a graph and returns its output value.

Gradient rules, losses, optimizers, onnxblock and ORTModule's lowerings build their graphs with an :class:`Emitter`.
"""

from onnxtrain.emitter._emitter import Emitter
from onnxtrain.emitter._node_writer import AttributeRef, Composite, Operand, Write
from onnxtrain.emitter._schemas import output_dtype, schema_of
from onnxtrain.emitter._values import computed_names, find_value, static_dims, values_by_name
from onnxtrain.passes import known_array

__all__ = [
    "AttributeRef",
    "Composite",
    "Emitter",
    "Operand",
    "Write",
    "computed_names",
    "find_value",
    "known_array",
    "output_dtype",
    "schema_of",
    "static_dims",
    "values_by_name",
]
