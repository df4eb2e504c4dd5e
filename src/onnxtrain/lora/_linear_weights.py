"""Reads weights that Cast, Transpose, DequantizeLinear and integer products read, and rounds them to integers again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxtrain.errors import GraphBuildError
from onnxtrain.lora._description import Array


def constant_value(value: ir.Value) -> Array:
    """Computes a value that depends on initializers alone, in float32."""
    if value.const_value is not None:
        return np.asarray(value.const_value.numpy(), np.float32)
    # The chain runs in onnx's evaluator, so that each op has the meaning of the standard.
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
        # DequantizeLinear of com.microsoft is that of the standard, which onnx's evaluator knows.
        proto.domain = ""
    graph = onnx.helper.make_graph(protos, "weight", [], [output], list(tensors.values()))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    (result,) = ReferenceEvaluator(model).run(None, {})
    return np.asarray(result, np.float32)


@dataclass(frozen=True)
class Codes:
    """The codes of a weight in int8 or uint8 among the inputs of a node, with scales for the whole or along one axis.

    Attributes:
        node: DequantizeLinear, QLinearConv, QLinearMatMul or QGemm.
        first: index of the codes among its inputs; scales and zero points follow.
        axis: axis of the weight along which scales differ, e.g. 1.
    """

    node: ir.Node
    first: int
    axis: int

    @classmethod
    def of(cls, node: ir.Node) -> Codes:
        """Finds the codes of a node."""
        if node.op_type == "DequantizeLinear":
            return cls(node, 0, node.attributes.get_int("axis", 1))
        # Output channels: of a convolution the first axis, of a matrix its columns.
        rows = node.op_type == "QLinearConv" or node.attributes.get_int("transB", 0) == 1
        return cls(node, 3, 0 if rows else 1)

    def arrays(self) -> list[Array | None]:
        """Returns codes, scales and zero points; None for what is left out or computed."""
        values = (*self.node.inputs, None)[self.first : self.first + 3]
        return [None if v is None or v.const_value is None else v.const_value.numpy() for v in values]

    def real(self) -> Array:
        """Computes the weight in float32: (code - zero point) · scale."""
        codes, scales, zeros = self.arrays()
        assert codes is not None
        assert scales is not None
        real: Array = codes.astype(np.float32) - (0 if zeros is None else self._spread(zeros, codes))
        return real * self._spread(scales, codes)

    def _spread(self, array: Array, codes: Array) -> Array:
        """Gives scales or zero points the rank of the codes, along their axis."""
        shape = [1] * codes.ndim
        if array.size > 1:
            shape[self.axis] = array.size
        return array.reshape(shape).astype(np.float32)


def quantised_linear(old: Codes, matrix: Array) -> dict[int, Array]:
    """Rounds a weight to int8 or uint8 with new scales.

    Args:
        old: the codes of the old weight.
        matrix: the new weight, float32.

    Returns:
        New arrays by the index of the input of the node: codes, scales, zero points.

    Raises:
        GraphBuildError: the node has a scale per block, or codes that are neither int8 nor uint8.
    """
    node = old.node
    codes, scales, zero_points = old.arrays()
    blocked = node.attributes.get_int("block_size", 0)
    kinds = (np.int8,) if zero_points is None else (np.int8, np.uint8)
    if codes is None or scales is None or blocked or codes.dtype not in kinds:
        raise GraphBuildError(
            f"merging adapters: the weight of {node.op_type} '{node.name}' is not int8 or uint8 with one scale per "
            "tensor or axis; pass requantize=False"
        )
    limits = np.iinfo(codes.dtype)
    axis = old.axis % matrix.ndim
    # One scale may be written as [] or [1].
    others = tuple(i for i in range(matrix.ndim) if i != axis) if scales.size > 1 else None
    if codes.dtype == np.int8 and (zero_points is None or not zero_points.any()):
        # Symmetric, from -127 to 127, as onnxruntime's quantizer rounds such weights.
        new = np.abs(matrix).max(axis=others, keepdims=True) / limits.max
        zeros = np.zeros_like(new)
    else:
        # Zero must be a code, as padding and ReLU rely on it.
        least = np.minimum(matrix.min(axis=others, keepdims=True), 0)
        new = (np.maximum(matrix.max(axis=others, keepdims=True), 0) - least) / (
            int(limits.max) - int(limits.min)
        )
        zeros = np.rint(limits.min - least / np.where(new == 0, 1, new))
    # A column of zeros has any scale but zero, by which nothing can be divided.
    new = np.where(new == 0, 1, new).astype(np.float32)
    rounded = np.clip(np.rint(matrix / new) + zeros, limits.min, limits.max).astype(codes.dtype)
    result: dict[int, Array] = {
        old.first: rounded,
        old.first + 1: new.reshape(scales.shape).astype(scales.dtype),
    }
    if zero_points is not None:
        result[old.first + 2] = zeros.reshape(zero_points.shape).astype(zero_points.dtype)
    return result
