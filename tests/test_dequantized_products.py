"""Products of activations with weights behind DequantizeLinear: in floating point, or as ONNX Runtime runs the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import CheckpointState, Module, generate_artifacts
from onnxtrain.autodiff import differentiate
from onnxtrain.lora import LoraConfig

SIZE, OUT = 64, 48
RANGES = {"INT4": (-8, 8), "UINT4": (0, 16), "INT8": (-128, 128), "UINT8": (0, 256)}


class Net:
    """Two products with dequantized weights, Tanh between them, and the same in float64.

    Args:
        kind: dtype of the codes.
        block: number of rows that share a scale; 0 for a scale per column.
        product: "MatMul", or "Gemm", with a bias and factors.
    """

    def __init__(self, kind: str, block: int, product: str) -> None:
        rng = np.random.default_rng(0)
        self.product = product
        low, high = RANGES[kind]
        nodes, tensors, self.weights, self.biases = [], [], [], []
        value = "x"
        for index, (rows, columns) in enumerate([(SIZE, OUT), (OUT, SIZE)], 1):
            shape = [-(-rows // block), columns] if block else [columns]
            step = np.float32(1.2 / (high - low))
            scale = rng.uniform(0.2 * step, step, shape).astype(np.float32)
            codes = rng.integers(low, high, (rows, columns))
            zero = rng.integers(low, high, shape) if kind.startswith("U") else None
            zero_type = TensorProto.DataType.Value(kind)
            names = [f"q{index}", f"s{index}"] + ([f"z{index}"] if zero is not None else [])
            tensors += [
                helper.make_tensor(names[0], zero_type, codes.shape, codes.ravel()),
                numpy_helper.from_array(scale, names[1]),
            ]
            if zero is not None:
                tensors.append(helper.make_tensor(names[2], zero_type, shape, zero.ravel()))
            attributes = {"axis": 0, "block_size": block} if block else {"axis": 1}
            nodes.append(helper.make_node("DequantizeLinear", names, [f"w{index}"], **attributes))
            spread = (lambda a: np.repeat(a, block, 0)[:rows]) if block else (lambda a: a)  # noqa: B023
            centred = codes - (0 if zero is None else spread(zero))
            self.weights.append(torch.tensor(centred * spread(scale.astype(np.float64))))
            bias = rng.standard_normal(columns).astype(np.float32)
            self.biases.append(torch.tensor(bias.astype(np.float64)))
            inputs, factors = [value, f"w{index}"], {}
            if product == "Gemm":
                tensors.append(numpy_helper.from_array(bias, f"b{index}"))
                inputs.append(f"b{index}")
                factors = {"alpha": 0.75, "beta": 0.5} if index == 2 else {}
            output = "y" if index == 2 else "h"
            nodes.append(helper.make_node(product, inputs, [output], name=f"fc{index}", **factors))
            if index == 1:
                nodes.append(helper.make_node("Tanh", ["h"], ["t"]))
            value = "t"
        graph = helper.make_graph(
            nodes,
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", SIZE])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", SIZE])],
            tensors,
        )
        self.model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
        self.x = rng.standard_normal((16, SIZE)).astype(np.float32)
        self.target = rng.standard_normal((16, SIZE)).astype(np.float32)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the loss in float64."""
        (first, second), (b1, b2) = self.weights, self.biases
        if self.product == "MatMul":
            y = torch.tanh(x @ first) @ second
        else:
            y = 0.75 * (torch.tanh(x @ first + b1) @ second) + 0.5 * b2
        return (y - torch.tensor(self.target.astype(np.float64))).square().mean()

    def deployed(self) -> float:
        """Computes the loss of the file in a session without options."""
        (y,) = ort.InferenceSession(self.model.SerializeToString()).run(None, {"x": self.x})
        return float(((y.astype(np.float64) - self.target) ** 2).mean())


NETS: Any = [
    pytest.param("INT4", 32, "MatMul", id="int4"),
    pytest.param("UINT4", 16, "MatMul", id="uint4"),
    pytest.param("INT4", 32, "Gemm", id="int4-gemm"),
    pytest.param("INT8", 0, "MatMul", id="int8-per-column"),
    pytest.param("UINT8", 32, "Gemm", id="uint8-gemm"),
]


@pytest.mark.parametrize(("kind", "block", "product"), NETS)
def test_activations_are_what_their_mode_says(kind: str, block: int, product: str, tmp_path: Path) -> None:
    """ "float" is float64 but for rounding, "deployed" is the file in a plain session; in training and evaluation."""
    net = Net(kind, block, product)
    exact, deployed = float(net.exact(torch.tensor(net.x.astype(np.float64)))), net.deployed()
    # ONNX Runtime 1.20 fuses the products of 4 bits alone; of those without it both modes are the same.
    rounds = abs(deployed - exact) > 1e-5 * exact
    assert rounds or "8" in kind
    for activations, expected in (("float", exact), ("deployed", deployed)):
        generate_artifacts(
            net.model, loss="mse", artifact_directory=tmp_path, activations=activations,
            lora=LoraConfig(r=2),
        )  # fmt: skip
        state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
        assert float(module(net.x, net.target)) == pytest.approx(expected, rel=2e-6)
        module.eval()
        assert float(module(net.x, net.target)) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize(("kind", "block", "product"), NETS)
def test_differentiated_products_are_float(kind: str, block: int, product: str) -> None:
    """Value and gradient of the input are those of float64; no product rounds activations to int8."""
    net = Net(kind, block, product)
    x = torch.tensor(net.x.astype(np.float64), requires_grad=True)
    loss = net.exact(x)
    loss.backward()
    with_loss = onnx.ModelProto()
    with_loss.CopyFrom(net.model)
    with_loss.graph.node.extend(
        [
            helper.make_node("Sub", ["y", "target"], ["d"]),
            helper.make_node("Mul", ["d", "d"], ["e"]),
            helper.make_node("ReduceMean", ["e"], ["loss"], keepdims=0),
        ]
    )
    with_loss.graph.input.append(helper.make_tensor_value_info("target", TensorProto.FLOAT, ["n", SIZE]))
    step = differentiate(with_loss, of="loss", wrt=["x"])
    session = ort.InferenceSession(step.SerializeToString())
    got = session.run(["loss", "x_grad"], {"x": net.x, "target": net.target})
    assert float(got[0]) == pytest.approx(float(loss.detach()), rel=2e-6)
    assert x.grad is not None
    np.testing.assert_allclose(got[1], x.grad, rtol=1e-4, atol=1e-6 * float(x.grad.abs().max()))
