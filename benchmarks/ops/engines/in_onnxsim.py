"""onnxsim 0.8.1: `graph_grad.build_backward` over all nodes, as its training loop calls it.

Needs `onnxsim==0.8.1 onnxruntime==1.31.1 onnxscript`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import helper
from onnxsim import graph_grad, qat_graph

PACKAGE = "onnxsim"


def gradient_model(model: onnx.ModelProto, of: str, names: list[str]) -> tuple[onnx.ModelProto, list[str]]:
    """Returns the model with gradients of a scalar, and their names."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    shapes: dict[str, Any] = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    for info in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        dims = info.type.tensor_type.shape.dim
        shapes[info.name] = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims]
    builder = qat_graph.GraphBuilder(prefix="backward_" if of == "loss" else "second_")
    builder.nodes, builder.initializer = list(model.graph.node), list(model.graph.initializer)
    seed = builder.const(np.array(1.0, np.float32), "seed")
    nodes = list(model.graph.node)
    found = graph_grad.build_backward(builder, nodes, shapes, {of: seed}, names)
    kinds = {info.name: info.type for info in (*model.graph.input, *inferred.graph.value_info)}
    results = [f"{name}_{'grad' if of == 'loss' else 'second'}" for name in names]
    outputs = list(model.graph.output)
    for name, result in zip(names, results, strict=True):
        builder.nodes.append(helper.make_node("Identity", [found[name]], [result]))
        info = onnx.ValueInfoProto(name=result)
        info.type.CopyFrom(kinds[name])
        outputs.append(info)
    graph = helper.make_graph(builder.nodes, "gradient", model.graph.input, outputs, builder.initializer)
    domains = {function.domain for function in builder.functions}
    imports = [*model.opset_import, *(helper.make_opsetid(domain, 1) for domain in domains)]
    result = helper.make_model(
        graph, opset_imports=imports, ir_version=model.ir_version, functions=builder.functions
    )
    if builder.functions:
        result = onnx.inliner.inline_local_functions(result)
    return result, results
