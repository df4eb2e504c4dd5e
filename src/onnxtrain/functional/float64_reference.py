"""Runs a model in float64 with the ONNX reference evaluator.

Finite differences need float64, but ONNX Runtime's CPU provider lacks float64 kernels for Conv, Erf, Gelu, pooling, ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxtrain.op_bodies import ops_without_kernel
from onnxtrain.passes import inline_schema_functions

Array = npt.NDArray[Any]
Run = Callable[[Sequence[str], Mapping[str, Array]], list[Array]]


class Erf(OpRun):
    """Computes the error function in float64.

    onnx's own implementation (1.23) rounds to float32, which makes finite differences useless.
    """

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


def expand_rounded(model: ir.Model) -> ir.Model:
    """Returns a copy of a canonical model in which Gelu nodes are expanded to their function bodies.

    For a Gelu node, onnx's reference evaluator would round to float32. Users' ops without a kernel are expanded, too.
    """
    # For a Gelu node, the reference evaluator would use onnx's Erf, which rounds, instead of the Erf above.
    own = ops_without_kernel()
    return inline_schema_functions(
        model, lambda node: node.op_type != "Gelu" and (node.domain, node.op_type) not in own
    )


def run_in_float64(proto: onnx.ModelProto) -> Run:
    """Returns a function that runs a model in float64 with the ONNX reference evaluator."""
    reference = ReferenceEvaluator(in_precision(proto), new_ops=[Erf])

    def run(outputs: Sequence[str], values: Mapping[str, Array]) -> list[Array]:
        results: Any = reference.run(list(outputs), {name: widen(array) for name, array in values.items()})
        return [np.asarray(result) for result in results]

    return run


def widen(array: Array) -> Array:
    """Casts floats to float64; returns integers and Booleans unchanged."""
    return array.astype(np.float64) if array.dtype.kind not in "iub" else array


def in_precision(proto: onnx.ModelProto, to: int = onnx.TensorProto.DOUBLE) -> onnx.ModelProto:
    """Returns a copy of a model with all float16, bfloat16 and float32 tensors converted to the dtype `to`.

    Args:
        proto: the model; it is not modified.
        to: target dtype, e.g. TensorProto.DOUBLE.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    narrow = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16} - {to}
    dtype = onnx.helper.tensor_dtype_to_np_dtype(to)

    def tensor(t: onnx.TensorProto) -> None:
        if t.data_type in narrow:
            t.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(t).astype(dtype), t.name))

    def graph(g: onnx.GraphProto) -> None:
        for initializer in g.initializer:
            tensor(initializer)
        for info in (*g.input, *g.output, *g.value_info):
            if info.type.tensor_type.elem_type in narrow:
                info.type.tensor_type.elem_type = to
        nodes(g.node)

    def nodes(items: Sequence[onnx.NodeProto]) -> None:
        for node in items:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    tensor(attribute.t)
                if attribute.HasField("g"):
                    graph(attribute.g)
                # A Cast to float32 would round, and ops would then get mixed float32 and float64 inputs.
                if node.op_type == "Cast" and attribute.name == "to" and attribute.i in narrow:
                    attribute.i = to
                # The schema fixes `value_float` as float32, so it is replaced by a tensor.
                if node.op_type == "Constant" and attribute.name == "value_float":
                    value = np.array(attribute.f, dtype)
                    attribute.CopyFrom(
                        onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(value))
                    )

    graph(copy.graph)
    for function in copy.functions:
        nodes(function.node)
    return copy
