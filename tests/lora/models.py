"""Small models for the tests of adapters, and LoRA written out in PyTorch, to compare with."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import onnx
import torch
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)
from torch import nn

from onnxtrain.lora import LoraConfig


class Net(nn.Module):
    """A language model without attention, whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 32)
        self.up = nn.Linear(32, 64)
        self.blocks = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
        self.lm_head = nn.Linear(32, 11, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.blocks(torch.tanh(self.up(self.embedding(tokens)))))


TOKENS = np.array([[1, 2, 3], [4, 5, 6]])


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def exported(module: nn.Module, *arguments: torch.Tensor) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        program = torch.onnx.export(
            module.eval(),
            arguments,
            dynamo=True,
            verbose=False,
            input_names=["tokens"],
            output_names=["logits"],
            dynamic_shapes=({0: "batch"},) * len(arguments),
        )
    assert program is not None
    return program.model_proto


def products(layers: Mapping[str, tuple[int, int]], seed: int = 0) -> onnx.ModelProto:
    """A chain of MatMuls with a Tanh behind each; layers by name, e.g. {"fc1": (8, 4)}."""
    rng = np.random.default_rng(seed)
    nodes, weights, value = [], [], "x"
    for name, shape in layers.items():
        weight = rng.normal(size=shape).astype(np.float32) / np.float32(np.sqrt(shape[0]))
        weights.append(onnx.numpy_helper.from_array(weight, f"{name}.weight"))
        nodes.append(
            onnx.helper.make_node(
                "MatMul", [value, f"{name}.weight"], [f"{name}_out"], name=f"/{name}/MatMul"
            )
        )
        nodes.append(onnx.helper.make_node("Tanh", [f"{name}_out"], [value := f"{name}_act"]))
    first, last = next(iter(layers.values())), list(layers.values())[-1]
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", first[0]])],
        [onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, ["n", last[1]])],
        weights,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def in_bits(
    model: onnx.ModelProto, bits: int, block_size: int = 16, symmetric: bool = True
) -> onnx.ModelProto:
    """The model with MatMulNBits, written by onnxruntime's quantizer."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    quantizer = MatMulNBitsQuantizer(
        copy,
        algo_config=DefaultWeightOnlyQuantConfig(block_size=block_size, is_symmetric=symmetric, bits=bits),
    )
    quantizer.process()
    result = quantizer.model.model
    assert any(node.op_type == "MatMulNBits" for node in result.graph.node)
    return result


class WithAdapter(nn.Module):
    """A layer and its adapter, as LoRA's authors write them."""

    def __init__(self, base: nn.Module, a: np.ndarray, b: np.ndarray, scaling: float) -> None:
        super().__init__()
        self.base, self.scaling = base, scaling
        self.a, self.b = nn.Parameter(torch.tensor(a).double()), nn.Parameter(torch.tensor(b).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scaling * (x @ self.a) @ self.b


def with_adapters(
    module: nn.Module, weights: Mapping[str, np.ndarray], config: LoraConfig
) -> dict[str, WithAdapter]:
    """Puts adapters into a module of float64, in place; returns them by path."""
    found = {}
    for path in dict.fromkeys(name.rpartition(".lora_")[0] for name in weights):
        parent, _, last = path.rpartition(".")
        owner = module.get_submodule(parent) if parent else module
        a, b = (weights[f"{path}.lora_{letter}.weight"] for letter in "AB")
        found[path] = WithAdapter(getattr(owner, last), a, b, config.scaling(path))
        setattr(owner, last, found[path])
    return found


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # ONNX Runtime warns of optional inputs.
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return session.run(None, feeds)[0]
