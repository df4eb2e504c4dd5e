"""Builds the demo's network with plain `onnx.helper`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_OPSET, _IR_VERSION = 21, 10


class _Builder:
    """Builds the nodes and float32 initializers of the demo's graph.

    Args:
        seed: seed of the random weights.
    """

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(seed)

    def parameter(self, name: str, value: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(value.astype(np.float32), name))
        return name

    def random(self, name: str, shape: tuple[int, ...], fan_in: int) -> str:
        """Adds a weight with He initialization, which preserves the variance of ReLU activations; returns its name."""
        return self.parameter(name, self._rng.standard_normal(shape) * math.sqrt(2 / fan_in))

    def node(self, op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=outputs[0], **attributes))
        return outputs[0]

    def block(self, x: str, name: str, channels: tuple[int, int]) -> str:
        """Appends a 3x3 convolution, BatchNormalization in training mode, and ReLU; returns the output's name.

        Args:
            x: name of the input.
            name: prefix of the names in the block, e.g. "block1".
            channels: numbers of input and output channels.
        """
        before, after = channels
        weight = self.random(f"{name}.weight", (after, before, 3, 3), 9 * before)
        x = self.node("Conv", [x, weight], [f"{name}.conv"], pads=[1, 1, 1, 1], kernel_shape=[3, 3])
        scale = self.parameter(f"{name}.norm.scale", np.ones(after))
        bias = self.parameter(f"{name}.norm.bias", np.zeros(after))
        mean = self.parameter(f"{name}.norm.mean", np.zeros(after))
        variance = self.parameter(f"{name}.norm.variance", np.ones(after))
        # The second and third outputs are the updated statistics, which exist only in training mode.
        outputs = [f"{name}.normalized", f"{name}.norm.new_mean", f"{name}.norm.new_variance"]
        x = self.node(
            "BatchNormalization", [x, scale, bias, mean, variance], outputs, training_mode=1, momentum=0.9
        )
        return self.node("Relu", [x], [f"{name}.relu"])


def digits_network(seed: int = 0) -> onnx.ModelProto:
    """Builds an untrained convolutional network for 8x8 grayscale images.

    Input `image`: float32 [batch, 1, 8, 8]; output `logits`: float32 [batch, 10].
    """
    net = _Builder(seed)
    x = net.block("image", "conv1", (1, 24))
    x = net.block(x, "conv2", (24, 32))
    x = net.node("MaxPool", [x], ["pool"], kernel_shape=[2, 2], strides=[2, 2])
    x = net.block(x, "conv3", (32, 64))
    x = net.node("GlobalAveragePool", [x], ["features"])
    x = net.node("Flatten", [x], ["flat"])
    weight = net.random("head.weight", (64, 10), 64)
    bias = net.parameter("head.bias", np.zeros(10))
    net.node("Gemm", [x, weight, bias], ["logits"])
    graph = helper.make_graph(
        net.nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        net.initializers,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR_VERSION,
        producer_name="onnxtrain demo",
    )
    # Otherwise, a mistake in this file would appear as a training error.
    onnx.checker.check_model(model, full_check=True)
    return model
