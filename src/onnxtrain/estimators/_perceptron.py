"""Builds the network that an estimator trains if no model is given: a multilayer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

_OPSET, _IR_VERSION = 21, 10


def perceptron(
    features: int, hidden: Sequence[int], outputs: int, dtype: np.dtype[Any], seed: int
) -> onnx.ModelProto:
    """Builds a multilayer perceptron: linear layers with ReLUs between them.

    Weights and biases are initialized like those of PyTorch's `nn.Linear`: uniformly in `[-1 / sqrt(fan_in), 1 /
    sqrt(fan_in)]`. They are named as in an `nn.Sequential` of linear layers and ReLUs: "0.weight", "0.bias",
    "2.weight", ...

    Args:
        features: size of the input `x`, [batch, features].
        hidden: sizes of the hidden layers, e.g. (100,); () for a linear model.
        outputs: size of the output `scores`, [batch, outputs].
        dtype: dtype of input, output and parameters, float32 or float64.
        seed: seed of the initial values.

    >>> [list(tensor.dims) for tensor in perceptron(4, (8,), 3, np.dtype(np.float32), 0).graph.initializer]
    [[8, 4], [8], [3, 8], [3]]
    """
    rng = np.random.default_rng(seed)
    nodes, initializers = [], []
    sizes = [features, *hidden, outputs]
    value = "x"
    for layer, (before, after) in enumerate(pairwise(sizes)):
        # Every second module of the `nn.Sequential` is a ReLU.
        name, last = str(2 * layer), layer == len(hidden)
        bound = 1 / math.sqrt(before)
        for part, shape in (("weight", (after, before)), ("bias", (after,))):
            array = rng.uniform(-bound, bound, shape).astype(dtype)
            initializers.append(numpy_helper.from_array(array, f"{name}.{part}"))
        output = "scores" if last else f"{name}.output"
        inputs = [value, f"{name}.weight", f"{name}.bias"]
        nodes.append(helper.make_node("Gemm", inputs, [output], name=name, transB=1))
        value = output
        if not last:
            value = f"{2 * layer + 1}.output"
            nodes.append(helper.make_node("Relu", [output], [value], name=str(2 * layer + 1)))
    # A symbolic batch size, so that the model runs for any number of samples.
    element_type = helper.np_dtype_to_tensor_dtype(dtype)
    graph = helper.make_graph(
        nodes,
        "perceptron",
        [helper.make_tensor_value_info("x", element_type, ["batch", features])],
        [helper.make_tensor_value_info("scores", element_type, ["batch", outputs])],
        initializers,
    )
    opset = helper.make_opsetid("", _OPSET)
    return helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION, producer_name="onnxtrain")
