"""Small networks to put losses on, their twins in PyTorch, and a way to run models."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import onnxblock

ELEM = {
    np.dtype(t): helper.np_dtype_to_tensor_dtype(np.dtype(t)) for t in (np.float16, np.float32, np.float64)
}


class Outputs(onnxblock.ForwardBlock):
    """Makes the results of a block the outputs of the model."""

    def __init__(self, block: onnxblock.Block) -> None:
        super().__init__()
        self.block = block

    def build(self, *names: str) -> Any:
        return self.block(*names)


class Training(onnxblock.TrainingBlock):
    """Makes the result of a block the loss of the training model."""

    def __init__(self, block: onnxblock.Block) -> None:
        super().__init__()
        self.block = block

    def build(self, *names: str) -> Any:
        return self.block(*names)


def built(block: onnxblock.TrainingBlock, model: onnx.ModelProto | None = None) -> onnxblock.TrainingBlock:
    """Append the block to the output `y` of a model, `mlp()` by default."""
    with onnxblock.base(mlp() if model is None else model):
        block("y")
    return block


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs a model on the stock runtime; returns its outputs by name."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(feeds)), strict=True))


def identity(shape: list[int | str], dtype: type = np.float32, opset: int = 21) -> onnx.ModelProto:
    """x -> y of the same shape."""
    x, y = (helper.make_tensor_value_info(name, ELEM[np.dtype(dtype)], shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", [x], [y])
    return _model(graph, opset)


def mlp(sizes: tuple[int, ...] = (6, 8, 4), opset: int = 13, seed: int = 0) -> onnx.ModelProto:
    """x [n, sizes[0]] -> y [n, sizes[-1]]: Gemm and Tanh in turn, with parameters `w0`, `b0`, `w1`, ..."""
    generator = np.random.default_rng(seed)
    nodes, parameters, value = [], [], "x"
    for i, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        for name, shape in ((f"w{i}", (rows, columns)), (f"b{i}", (columns,))):
            array = generator.normal(0, 0.5, shape).astype(np.float32)
            parameters.append(numpy_helper.from_array(array, name))
        last = i == len(sizes) - 2
        nodes.append(
            helper.make_node("Gemm", [value, f"w{i}", f"b{i}"], ["y" if last else f"h{i}"], f"gemm{i}")
        )
        if not last:
            nodes.append(helper.make_node("Tanh", [f"h{i}"], [f"a{i}"], f"tanh{i}"))
            value = f"a{i}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", sizes[0]])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", sizes[-1]])
    return _model(helper.make_graph(nodes, "mlp", [x], [y], parameters), opset)


def parameters_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The initializers of a model."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def torch_mlp(parameters: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The parameters of :func:`mlp` as float64 leaves."""
    return {
        name: torch.tensor(array, dtype=torch.float64, requires_grad=True)
        for name, array in parameters.items()
    }


def torch_forward(leaves: Mapping[str, torch.Tensor], x: np.ndarray) -> torch.Tensor:
    """Compute :func:`mlp` in float64."""
    value = torch.tensor(x, dtype=torch.float64)
    layers = len(leaves) // 2
    for i in range(layers):
        value = value @ leaves[f"w{i}"] + leaves[f"b{i}"]
        if i < layers - 1:
            value = torch.tanh(value)
    return value


def manifest_of(model: onnx.ModelProto) -> dict:
    """The manifest in the metadata of a model."""
    return json.loads({entry.key: entry.value for entry in model.metadata_props}["onnxtrain.manifest"])


def _model(graph: onnx.GraphProto, opset: int) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(
        graph, opset_imports=imports, ir_version=min(10, helper.find_min_ir_version_for(imports))
    )
