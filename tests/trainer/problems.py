"""Models with data that they can learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import models
from models import parse_nodes
from onnxtrain import Callback, Trainer

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Problem:
    """A model, the loss that suits it, and data."""

    model: onnx.ModelProto
    loss: str
    x: Array
    y: Array


class AtEachStep(Callback):
    """Calls `work(trainer, loss)` after each step and keeps what it returns."""

    def __init__(self, work: Callable[[Trainer, float], Any]) -> None:
        self.work = work
        self.seen: list[Any] = []

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        self.seen.append(self.work(trainer, loss))


def classes(samples: int = 60, seed: int = 0) -> Problem:
    """Classify by the largest of three features."""
    x = np.random.default_rng(seed).standard_normal((samples, 4)).astype(np.float32)
    return Problem(models.mlp(), "cross_entropy", x, x[:, :3].argmax(axis=1))


def images(samples: int = 30) -> Problem:
    """Three kinds of brightness for a net with BatchNormalization in training mode."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, samples)
    x = rng.standard_normal((samples, 2, 6, 6)) + labels[:, None, None, None] - 1
    return Problem(models.conv_bn(), "cross_entropy", x.astype(np.float32), labels)


def line(samples: int = 40, features: int = 3, batch: int | str = "batch") -> Problem:
    """A linear model `y = x w + b` for a linear truth with noise."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((samples, features)).astype(np.float32)
    y = (x @ np.arange(1, features + 1) + 0.5 + 0.1 * rng.standard_normal(samples))[:, None].astype(
        np.float32
    )
    values = {
        "w": rng.normal(0, 0.5, (features, 1)).astype(np.float32),
        "b": np.zeros(1, np.float32),
    }
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"])]
    model = models.make_model(nodes, {"x": [batch, features]}, {"y": [batch, 1]}, values)
    return Problem(model, "mse", x, y)


def two_inputs() -> onnx.ModelProto:
    """left [n, 2] and right [n, 3] -> sum [n, 1] and product [n, 2]."""
    rng = np.random.default_rng(0)
    values = {
        "wl": rng.standard_normal((2, 1)),
        "wr": rng.standard_normal((3, 1)),
        "v": rng.standard_normal(2),
    }
    nodes = parse_nodes(
        "a = MatMul(left, wl)  b = MatMul(right, wr)  sum = Add(a, b)  product = Mul(left, v)"
    )
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "two",
        [info("left", TensorProto.FLOAT, ["n", 2]), info("right", TensorProto.FLOAT, ["n", 3])],
        [info("sum", TensorProto.FLOAT, ["n", 1]), info("product", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def scalar_gain(function: str) -> onnx.ModelProto:
    """x [n, 1] -> function(x * gain), with gain = 0."""
    nodes = [helper.make_node("Mul", ["x", "gain"], ["z"]), helper.make_node(function, ["z"], ["y"])]
    return models.make_model(nodes, {"x": ["n", 1]}, {"y": ["n", 1]}, {"gain": np.zeros(1, np.float32)})
