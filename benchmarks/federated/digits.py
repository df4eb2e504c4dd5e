"""Handwritten digits, split over clients by labels, and the network of these programs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

from onnxtrain import generate_artifacts

TEST = 397


def network() -> onnx.ModelProto:
    """64 pixels, 32 hidden units, 10 classes."""
    random = np.random.default_rng(0)

    def weight(name: str, outputs: int, inputs: int) -> onnx.TensorProto:
        bound = 1 / math.sqrt(inputs)
        return numpy_helper.from_array(random.uniform(-bound, bound, (outputs, inputs)).astype("f"), name)

    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "w1", "b1"], ["hidden"], transB=1),
            helper.make_node("Relu", ["hidden"], ["positive"]),
            helper.make_node("Gemm", ["positive", "w2", "b2"], ["logits"], transB=1),
        ],
        "digits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 10])],
        [
            weight("w1", 32, 64),
            numpy_helper.from_array(np.zeros(32, "f"), "b1"),
            weight("w2", 10, 32),
            numpy_helper.from_array(np.zeros(10, "f"), "b2"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def artifacts(folder: Path) -> Path:
    """Writes the network's artifacts."""
    generate_artifacts(
        network(),
        loss="cross_entropy",
        optimizer="sgd",
        artifact_directory=folder,
        additional_output_names=["logits"],
    )
    return folder


def samples() -> tuple[np.ndarray, np.ndarray]:
    """All samples in a drawn order; the last `TEST` are the server's."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return (x[order] / 16).astype("f"), y[order].astype(np.int64)


def split(labels: np.ndarray, clients: int, alpha: float, least: int = 1) -> list[np.ndarray]:
    """Rows of each client: labels in shares that are drawn from Dirichlet(alpha); at least so many rows each.

    A client of a thousand has few samples, so that rows are drawn with replacement where there are more clients than
    samples for them.
    """
    random = np.random.default_rng(1)
    found = []
    by_label = [np.flatnonzero(labels == label) for label in range(10)]
    for _ in range(clients):
        shares = random.dirichlet(np.full(10, alpha))
        size = max(least, int(random.lognormal(2.5, 0.7)))
        drawn = random.choice(10, size, p=shares)
        found.append(np.array([random.choice(by_label[label]) for label in drawn]))
    return found


def accuracy(outputs: list[np.ndarray], targets: list[np.ndarray]) -> float:
    """Share of right answers."""
    return float((outputs[0].argmax(1) == targets[0]).mean())
