"""Small `.onnx` models made by hand, without torch."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def _initializers(values: dict[str, np.ndarray]) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]


def parse_nodes(text: str) -> list[onnx.NodeProto]:
    """Parse nodes in ONNX's text format, e.g. "h = MatMul(x, w)  y = Tanh(h)"."""
    return list(onnx.parser.parse_graph(f"nodes () => () {{ {text} }}").node)


def make_model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int | str]],
    outputs: dict[str, list[int | str]],
    initializers: dict[str, np.ndarray],
    opset: int = 21,
    dtype: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """A model whose inputs and outputs all have one element type."""
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info(name, dtype, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, dims) for name, dims in outputs.items()],
        _initializers(initializers),
    )
    ir_version = helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def mlp(
    features: int = 4, hidden: int = 8, classes: int = 3, opset: int = 21, seed: int = 0
) -> onnx.ModelProto:
    """x [batch, features] -> tanh(x @ w1 + b1) @ w2 + b2, output `logits`."""
    rng = np.random.default_rng(seed)
    values = {
        "w1": rng.normal(0, 0.5, (features, hidden)),
        "b1": rng.normal(0, 0.1, hidden),
        "w2": rng.normal(0, 0.5, (hidden, classes)),
        "b2": rng.normal(0, 0.1, classes),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Tanh", ["h"], ["a"]),
        helper.make_node("MatMul", ["a", "w2"], ["m"]),
        helper.make_node("Add", ["m", "b2"], ["logits"]),
    ]
    values = {name: value.astype(np.float32) for name, value in values.items()}
    return make_model(nodes, {"x": ["batch", features]}, {"logits": ["batch", classes]}, values, opset)


def conv_bn(
    training: bool = True, channels: int = 4, classes: int = 3, applications: int = 1
) -> onnx.ModelProto:
    """x [batch, 2, 6, 6] -> conv, BatchNorm (`applications` times, one after the other), relu, global pool, linear."""
    rng = np.random.default_rng(0)
    values = {
        "conv.weight": rng.normal(0, 0.3, (channels, 2, 3, 3)),
        "bn.scale": rng.uniform(0.5, 1.5, channels),
        "bn.bias": rng.normal(0, 0.1, channels),
        "bn.mean": rng.normal(0, 0.1, channels),
        "bn.var": rng.uniform(0.5, 1.5, channels),
        "fc.weight": rng.normal(0, 0.5, (channels, classes)),
        "fc.bias": np.zeros(classes),
    }
    nodes = [helper.make_node("Conv", ["x", "conv.weight"], ["y0"], pads=[1, 1, 1, 1])]
    for index in range(applications):
        outputs = [f"y{index + 1}"] + ([f"mean{index}", f"var{index}"] if training else [])
        nodes.append(
            helper.make_node(
                "BatchNormalization",
                [f"y{index}", "bn.scale", "bn.bias", "bn.mean", "bn.var"],
                outputs,
                training_mode=int(training),
                momentum=0.8,
            )
        )
    nodes += [
        helper.make_node("Relu", [f"y{applications}"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "fc.weight", "fc.bias"], ["logits"]),
    ]
    values = {name: value.astype(np.float32) for name, value in values.items()}
    return make_model(nodes, {"x": ["batch", 2, 6, 6]}, {"logits": ["batch", classes]}, values)
