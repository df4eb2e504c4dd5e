"""Builds the network that is trained if no model is given: a multilayer perceptron."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxtrain._words import argument
from onnxtrain.errors import InputError

HiddenActivation: TypeAlias = Literal["relu", "leaky_relu", "elu", "gelu", "silu", "tanh"]
"""Activation of the hidden layers, with the formula and the settings of PyTorch's module of this name."""

_OPSET, _IR_VERSION = 21, 10

# Op and attributes. SiLU has no op before opset 24.
_OPS: dict[str, tuple[str, dict[str, Any]]] = {
    "relu": ("Relu", {}),
    "leaky_relu": ("LeakyRelu", {"alpha": 0.01}),
    "elu": ("Elu", {}),
    "gelu": ("Gelu", {}),
    "tanh": ("Tanh", {}),
}


def perceptron(
    features: int,
    hidden: Sequence[int],
    outputs: int,
    dtype: np.dtype[Any],
    seed: int,
    *,
    activation: HiddenActivation = "relu",
    dropout: float = 0.0,
    output: str = "scores",
) -> onnx.ModelProto:
    """Builds a multilayer perceptron: linear layers with an activation, and Dropout if asked for, between them.

    Weights and biases are initialized like those of PyTorch's `nn.Linear`: uniformly in `[-1 / sqrt(fan_in), 1 /
    sqrt(fan_in)]`. They are named as in an `nn.Sequential` of linear layers, activations and Dropout: "0.weight",
    "0.bias", "2.weight", ...

    Args:
        features: size of the input `x`, [batch, features].
        hidden: sizes of the hidden layers, e.g. (100,); () for a linear model.
        outputs: size of the output, [batch, outputs].
        dtype: dtype of input, output and parameters, float32 or float64.
        seed: seed of the initial values.
        activation: activation of the hidden layers.
        dropout: fraction of the activations that Dropout drops in training; 0 for no Dropout.
        output: name of the output.

    Raises:
        InputError: a size is not positive, the activation is unknown, or `dropout` is not in [0, 1).

    >>> [list(tensor.dims) for tensor in perceptron(4, (8,), 3, np.dtype(np.float32), 0).graph.initializer]
    [[8, 4], [8], [3, 8], [3]]
    """
    sizes = [*_positive("inputs", [features]), *_positive("hidden", hidden), *_positive("outputs", [outputs])]
    if activation not in get_args(HiddenActivation):
        raise InputError(
            f"Building a network: {argument('activation')} is {activation!r}; pass one of "
            f"{', '.join(get_args(HiddenActivation))}."
        )
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(
            f"Building a network: {argument('dropout')} must be a number in [0, 1), received {dropout!r}."
        )
    rng = np.random.default_rng(seed)
    nodes: list[onnx.NodeProto] = []
    initializers = []
    value, module = "x", 0
    for layer, (before, after) in enumerate(pairwise(sizes), start=1):
        last = layer == len(sizes) - 1
        bound = 1 / math.sqrt(before)
        for part, shape in (("weight", (after, before)), ("bias", (after,))):
            array = rng.uniform(-bound, bound, shape).astype(dtype)
            initializers.append(numpy_helper.from_array(array, f"{module}.{part}"))
        result = output if last else f"{module}.output"
        inputs = [value, f"{module}.weight", f"{module}.bias"]
        nodes.append(helper.make_node("Gemm", inputs, [result], name=str(module), transB=1))
        value, module = result, module + 1
        if last:
            break
        nodes += _activation(activation, value, f"{module}.output", str(module))
        value, module = f"{module}.output", module + 1
        if dropout:
            ratio = numpy_helper.from_array(np.array(dropout, np.float32), f"{module}.ratio")
            constant = helper.make_node("Constant", [], [ratio.name], value=ratio)
            result = f"{module}.output"
            nodes += [
                constant,
                helper.make_node("Dropout", [value, ratio.name], [result], name=str(module)),
            ]
            value, module = result, module + 1
    # A symbolic batch size, so that the model runs for any number of samples.
    element_type = helper.np_dtype_to_tensor_dtype(dtype)
    graph = helper.make_graph(
        nodes,
        "perceptron",
        [helper.make_tensor_value_info("x", element_type, ["batch", features])],
        [helper.make_tensor_value_info(output, element_type, ["batch", outputs])],
        initializers,
    )
    opset = helper.make_opsetid("", _OPSET)
    return helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION, producer_name="onnxtrain")


def _activation(activation: str, value: str, result: str, name: str) -> list[onnx.NodeProto]:
    if activation == "silu":
        return [
            helper.make_node("Sigmoid", [value], [f"{name}.sigmoid"], name=f"{name}.sigmoid"),
            helper.make_node("Mul", [value, f"{name}.sigmoid"], [result], name=name),
        ]
    op, attributes = _OPS[activation]
    return [helper.make_node(op, [value], [result], name=name, **attributes)]


def _positive(name: str, sizes: Iterable[int]) -> list[int]:
    """Returns sizes as a list of int. Raises InputError if they are no list, or one is not a positive integer."""
    found = [sizes] if isinstance(sizes, int | str) else list(sizes)
    if isinstance(sizes, int | str) or any(
        isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1 for n in found
    ):
        example = "(128, 64)" if name == "hidden" else "4"
        shown = found[0] if name != "hidden" else sizes
        raise InputError(
            f"Building a network: {argument(name)} must be positive, e.g. {example}, received {shown!r}."
        )
    return [int(n) for n in found]
