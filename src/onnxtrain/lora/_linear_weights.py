"""Reads weights through Cast, Transpose, DequantizeLinear and integer products, and quantizes them again."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.errors import GraphBuildError
from onnxtrain.lora._description import Array
from onnxtrain.passes.parameters.integer_weights import IntegerWeight, constant, integer_weight


def constant_value(value: ir.Value) -> Array:
    """Evaluates a value that depends only on initializers, e.g. a dequantized weight; returns a float32 array."""
    if value.const_value is not None:
        return np.asarray(value.const_value.numpy(), np.float32)
    # Evaluated by onnx's reference evaluator, so that each op follows the standard. Imported late: it reads the schemas
    # of all ops.
    from onnx.reference import ReferenceEvaluator

    nodes: list[ir.Node] = []
    tensors: dict[str, onnx.TensorProto] = {}
    pending = [value]
    while pending:
        source = pending.pop()
        producer = source.producer()
        if producer is not None:
            nodes.insert(0, producer)
            pending += [read for read in producer.inputs if read is not None]
        elif source.const_value is not None:
            tensors[str(source.name)] = onnx.numpy_helper.from_array(
                source.const_value.numpy(), str(source.name)
            )
    output = onnx.helper.make_tensor_value_info(str(value.name), onnx.TensorProto.FLOAT, None)
    protos = [ir.to_proto(node) for node in nodes]
    for proto in protos:
        # The evaluator only knows the standard DequantizeLinear, which computes the same as com.microsoft's.
        proto.domain = ""
    graph = onnx.helper.make_graph(protos, "weight", [], [output], list(tensors.values()))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    (result,) = ReferenceEvaluator(model).run(None, {})
    return np.asarray(result, np.float32)


def codes_of(node: ir.Node) -> IntegerWeight:
    """Returns the weight of a DequantizeLinear, QLinearConv, QLinearMatMul or QGemm that is to be requantized.

    Raises:
        GraphBuildError: the weight or its scale is not an initializer, there is one scale per block, or the weight is
            neither int8 nor uint8 with a zero point.
    """
    old = integer_weight(node)
    kinds = (np.int8,) if old is None or old.zero_point is None else (np.int8, np.uint8)
    if old is None or old.block_size or constant(old.value).dtype not in kinds:
        raise GraphBuildError(
            f"merging adapters: the weight of {node.op_type} '{node.name}' is not int8 or uint8 with one scale per "
            f"tensor or axis; pass {argument('requantize', False)}"
        )
    return old


def quantized_linear(old: IntegerWeight, matrix: Array) -> dict[int, Array]:
    """Quantizes a new weight to the integer dtype of the weight that it replaces, with new scales.

    Args:
        old: the quantized weight to replace.
        matrix: the new weight, float32, with the shape of `old`.

    Returns:
        New arrays for the inputs of `old.node`, by input index: the integers, their scales and, if `old` has a zero
        point, their zero points.
    """
    codes, scales = constant(old.value), constant(old.scale)
    zero_points = None if old.zero_point is None else constant(old.zero_point)
    limits = np.iinfo(codes.dtype)
    # A single scale may have shape [] or [1].
    others = tuple(i for i in range(matrix.ndim) if i != old.axis) if scales.size > 1 else None
    if codes.dtype == np.int8 and (zero_points is None or not zero_points.any()):
        # Symmetric, from -127 to 127, as in onnxruntime's quantizer.
        new = np.abs(matrix).max(axis=others, keepdims=True) / limits.max
        zeros = np.zeros_like(new)
    else:
        # Zero must be representable, because padding and ReLU rely on it.
        least = np.minimum(matrix.min(axis=others, keepdims=True), 0)
        new = (np.maximum(matrix.max(axis=others, keepdims=True), 0) - least) / (
            int(limits.max) - int(limits.min)
        )
        zeros = np.rint(limits.min - least / np.where(new == 0, 1, new))
    # For a column of zeros, any scale but zero will do.
    new = np.where(new == 0, 1, new).astype(np.float32)
    rounded = np.clip(np.rint(matrix / new) + zeros, limits.min, limits.max).astype(codes.dtype)
    # In all these ops, scale and zero point follow the codes.
    result: dict[int, Array] = {
        old.index: rounded,
        old.index + 1: new.reshape(scales.shape).astype(scales.dtype),
    }
    if zero_points is not None:
        result[old.index + 2] = zeros.reshape(zero_points.shape).astype(zero_points.dtype)
    return result
