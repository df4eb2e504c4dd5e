"""Hand-made models and the runtimes that judge them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime as ort
from onnx import helper, numpy_helper

Array = np.ndarray


def info(name: str, shape: Sequence[int | str | None] | None, dtype: int = onnx.TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def build(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Mapping[str, Array] | None = None,
    *,
    opset: int = 21,
    ir_version: int | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(a), n) for n, a in (initializers or {}).items()]
    return helper.make_model(
        helper.make_graph(nodes, "test", inputs, outputs, tensors),
        opset_imports=[helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)],
        ir_version=ir_version or max(7, helper.OP_SET_ID_VERSION_MAP["ai.onnx", opset]),
        functions=functions,
    )


def run(model: onnx.ModelProto, feed: Mapping[str, Array]) -> list[Array]:
    """Return the outputs that stock ONNX Runtime gives, unoptimised so that it judges the graph as it is."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {name: np.asarray(array) for name, array in feed.items()})


def reference(model: onnx.ModelProto, feed: Mapping[str, Array]) -> list[Array]:
    return onnx.reference.ReferenceEvaluator(model).run(None, dict(feed))


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def mlp(opset: int = 21) -> onnx.ModelProto:
    """x [N, 3] -> Gemm -> Relu -> Gemm -> y [N, 2]."""
    return build(
        [
            helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], name="fc1"),
            helper.make_node("Relu", ["h"], ["a"], name="act"),
            helper.make_node("Gemm", ["a", "w2", "b2"], ["y"], name="fc2"),
        ],
        [info("x", ["N", 3])],
        [info("y", ["N", 2])],
        {"w1": normal(3, 4), "b1": normal(4, seed=1), "w2": normal(4, 2, seed=2), "b2": normal(2, seed=3)},
        opset=opset,
    )


def running_statistics(model: ir.Model) -> list[tuple[ir.Value, ir.Value]]:
    """Running statistics of the BatchNormalization nodes, each with the output that has it after the update."""
    nodes = [node for node in model.graph if node.op_type == "BatchNormalization" and len(node.outputs) == 3]
    return [(node.inputs[i + 2], node.outputs[i]) for node in nodes for i in (1, 2)]
