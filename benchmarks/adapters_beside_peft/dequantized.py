"""Gives a net of PyTorch the rounded weights of a file.

A node of a quantized file belongs to the modules whose weights its twin in the float file multiplies with, and its
weight is what onnxruntime multiplies unit vectors with. So neither names nor code of onnxtrain are relied on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper

Array = np.ndarray[Any, Any]


def take_weights(net: Any, quantized: onnx.ModelProto, in_float: onnx.ModelProto) -> int:
    """Copies the weights of all MatMulNBits of a file into the modules of a net, in place; returns how many there are.

    Raises:
        ValueError: a node belongs to no module.
    """
    owners = _owners(net)
    floats = _products(in_float)
    arrays = {i.name: numpy_helper.to_array(i) for i in quantized.graph.initializer}
    nodes = [node for node in quantized.graph.node if node.op_type == "MatMulNBits"]
    embedding = net.get_input_embeddings()
    gathers = [node for node in quantized.graph.node if node.op_type == "GatherBlockQuantized"]
    for node in nodes:
        modules = owners.get(floats[node.output[0]].tobytes())
        if modules is None:
            raise ValueError(f"the weight of {node.name} is that of no module")
        rows = torch.from_numpy(_weight(node, arrays).T.copy())
        is_head = modules == [net.get_output_embeddings()]
        for module, part in zip(modules, rows.split([m.weight.shape[0] for m in modules]), strict=True):
            # A head that shares the weight of the embedding gets one of its own, unless the embedding is rounded, too.
            module.weight = torch.nn.Parameter(part.clone(), requires_grad=False)
        if is_head and gathers:
            embedding.weight = net.get_output_embeddings().weight
    return len(nodes)


def _owners(net: Any) -> dict[bytes, list[Any]]:
    """Returns the linear modules by the bytes of their weight; the builder multiplies three of attention as one."""
    owners: dict[bytes, list[Any]] = {}
    for module in net.modules():
        if isinstance(module, torch.nn.Linear):
            owners[_bytes([module])] = [module]
        if hasattr(module, "q_proj"):
            together = [module.q_proj, module.k_proj, module.v_proj]
            owners[_bytes(together)] = together
        # The builder divides the feed-forward layer of Phi-3 in two, which is one module.
    return owners


def _bytes(modules: list[Any]) -> bytes:
    """Returns the bytes of weights [in, out] side by side."""
    return torch.cat([module.weight.detach() for module in modules]).T.contiguous().numpy().tobytes()


def _products(model: onnx.ModelProto) -> dict[str, Array]:
    """Returns the weights [in, out] of all MatMuls with one in the file, by the name of the output."""
    arrays = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    transposed = {
        node.output[0]: arrays[node.input[0]].T
        for node in model.graph.node
        if node.op_type == "Transpose" and node.input[0] in arrays and arrays[node.input[0]].ndim == 2
    }
    known = arrays | transposed
    return {
        node.output[0]: np.ascontiguousarray(known[node.input[1]])
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in known
    }


def _weight(node: onnx.NodeProto, arrays: Mapping[str, Array]) -> Array:
    """Returns the weight [in, out] of a MatMulNBits: what onnxruntime makes of unit vectors."""
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    # Activations stay as they are.
    del alone.attribute[:]
    alone.attribute.extend(a for a in node.attribute if a.name != "accuracy_level")
    size = next(a.i for a in node.attribute if a.name == "K")
    del alone.input[:]
    alone.input.extend(["x", *node.input[1:]])
    tensors = [numpy_helper.from_array(arrays[name], name) for name in node.input[1:] if name]
    float32 = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [alone],
        "weight",
        [onnx.helper.make_tensor_value_info("x", float32, [size, size])],
        [onnx.helper.make_tensor_value_info(node.output[0], float32, None)],
        tensors,
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (result,) = session.run(None, {"x": np.eye(size, dtype=np.float32)})
    return np.asarray(result)
