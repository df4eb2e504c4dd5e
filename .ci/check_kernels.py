"""Checks an installed onnxtrain-kernels: trains a small network with the kernels and without, and compares.

    python .ci/check_kernels.py

It needs onnxtrain with the extra [build], and no compiler. `cibuildwheel` runs it for every wheel.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxtrain_kernels

from onnxtrain import generate_artifacts
from onnxtrain.api import CheckpointState, Module, Optimizer

NETWORK = """
    <ir_version: 10, opset_import: ["": 21]>
    network (float[n, 3, 8, 8] image) => (float[n, 5] scores)
    <float[4, 3, 3, 3] kernel, float[64, 5] weight>
    {
        features = Conv<pads = [1, 1, 1, 1]>(image, kernel)
        mean = ReduceMean<keepdims = 1>(features)
        centred = Sub(features, mean)
        active = Gelu(centred)
        pooled = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(active)
        row = Flatten(pooled)
        scores = MatMul(row, weight)
    }"""


def network() -> onnx.ModelProto:
    """Makes a convolutional network of which the kernels compute most."""
    model = onnx.parser.parse_model(NETWORK)
    random = np.random.default_rng(0)
    shapes = {"kernel": (4, 3, 3, 3), "weight": (64, 5)}
    del model.graph.initializer[:]
    for name, shape in shapes.items():
        array = 0.2 * random.standard_normal(shape, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def losses(kernels: str, folder: Path) -> list[float]:
    """Trains for ten steps, with the kernels ("on") or without ("off"); returns the loss of each step."""
    os.environ["ONNXTRAIN_KERNELS"] = kernels
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    random = np.random.default_rng(1)
    images, labels = random.standard_normal((16, 3, 8, 8), np.float32), random.integers(0, 5, 16)
    values = []
    for _ in range(10):
        values.append(float(module(images, labels)))
        optimizer.step()
        module.lazy_reset_grad()
    return values


def main() -> None:
    """Compares the losses of both."""
    level = onnxtrain_kernels.level()
    assert level, "the processor lacks the instructions of the lowest level"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        generate_artifacts(network(), loss="cross_entropy", optimizer="adamw", artifact_directory=folder)
        with_kernels, without = losses("on", Path(folder)), losses("off", Path(folder))
    np.testing.assert_allclose(with_kernels, without, rtol=1e-4)
    assert with_kernels[-1] < with_kernels[0], with_kernels
    print(
        f"onnxtrain-kernels, level {level}, onnxruntime {onnxruntime.__version__}: "
        f"loss {with_kernels[0]:.4f} to {with_kernels[-1]:.4f}, as without kernels"
    )


if __name__ == "__main__":
    main()
