"""Trains the page's backbone on drawn things, and writes it and the training artifacts of a head.

    python web/photos/model/make.py web/photos/dist/model

The folder gets `backbone.onnx` (picture to features, float16 weights) and the artifacts of a linear head whose numbers
of classes and features are chosen at run time: see :func:`head`.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from drawings import SIZE, pictures
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import generate_artifacts
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.optimizers import AdamW

# Channels, kernel and stride of the convolutions.
LAYERS = [(24, 5, 2), (48, 3, 2), (80, 3, 2), (112, 3, 2)]
FEATURES = sum(channels for channels, _, _ in LAYERS[1:])
THINGS, PICTURES = 128, 56
STEPS, BATCH, LEARNING_RATE = 550, 64, 0.004
# Room of the head: features of most backbones, and classes.
MAX_FEATURES, MAX_CLASSES = 1280, 32
OPSET = 17


def value(name: str, *shape: int | str) -> onnx.ValueInfoProto:
    """Declares a float32 input or output."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    output: onnx.ValueInfoProto,
    weights: dict[str, np.ndarray],
) -> onnx.ModelProto:
    """Returns a checked model."""
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "photos", inputs, [output], tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(made, full_check=True)
    return made


def backbone_nodes() -> list[onnx.NodeProto]:
    """Returns the nodes from `image` [n, 3, 64, 64] to `pooled` [n, FEATURES]: the means of layers 2 to 4."""
    nodes, x, pooled = [], "image", []
    for number, (_, kernel, stride) in enumerate(LAYERS, start=1):
        sizes = {"kernel_shape": [kernel] * 2, "pads": [kernel // 2] * 4, "strides": [stride] * 2}
        names = [x, f"conv{number}.weight", f"conv{number}.bias"]
        nodes.append(helper.make_node("Conv", names, [f"conv{number}"], **sizes))
        nodes.append(helper.make_node("Relu", [f"conv{number}"], [f"relu{number}"]))
        x = f"relu{number}"
        if number > 1:
            nodes.append(helper.make_node("GlobalAveragePool", [x], [f"mean{number}"]))
            pooled.append(f"mean{number}")
    nodes.append(helper.make_node("Concat", pooled, ["means"], axis=1))
    nodes.append(helper.make_node("Flatten", ["means"], ["pooled"]))
    return nodes


def random_weights(seed: int) -> dict[str, np.ndarray]:
    """Draws the weights of the backbone."""
    rng, weights, before = np.random.default_rng(seed), {}, 3
    for number, (channels, kernel, _) in enumerate(LAYERS, start=1):
        shape = (channels, before, kernel, kernel)
        deviation = math.sqrt(2 / (before * kernel * kernel))
        weights[f"conv{number}.weight"] = (rng.standard_normal(shape) * deviation).astype(np.float32)
        weights[f"conv{number}.bias"] = np.zeros(channels, np.float32)
        before = channels
    return weights


def classifier(seed: int) -> onnx.ModelProto:
    """Returns the model that is trained to tell the things apart: `image` to `logits`."""
    rng = np.random.default_rng([seed, 1])
    nodes = [
        *backbone_nodes(),
        helper.make_node("LayerNormalization", ["pooled", "norm.scale", "norm.bias"], ["normed"]),
        helper.make_node("Gemm", ["normed", "head.weight", "head.bias"], ["logits"]),
    ]
    weights = {
        **random_weights(seed),
        "norm.scale": np.ones(FEATURES, np.float32),
        "norm.bias": np.zeros(FEATURES, np.float32),
        "head.weight": (rng.standard_normal((FEATURES, THINGS)) / math.sqrt(FEATURES)).astype(np.float32),
        "head.bias": np.zeros(THINGS, np.float32),
    }
    return model(nodes, [value("image", "n", 3, SIZE, SIZE)], value("logits", "n", THINGS), weights)


def backbone(weights: dict[str, np.ndarray], samples: np.ndarray) -> onnx.ModelProto:
    """Returns the model of the page: `image` [n, 3, 64, 64], RGB of 0 to 1, to `features` [n, FEATURES].

    Features have mean 0 and deviation 1 over the pictures `samples`. Weights are float16.
    """
    nodes = []
    for name in weights:
        nodes.append(helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT))
    nodes += backbone_nodes()
    half = {f"{name}.half": array.astype(np.float16) for name, array in weights.items()}
    image = value("image", "n", 3, SIZE, SIZE)
    plain = model(nodes, [image], value("pooled", "n", FEATURES), half)
    session = ort.InferenceSession(plain.SerializeToString())
    pooled = np.concatenate(
        [session.run(None, {"image": samples[i : i + 100]})[0] for i in range(0, len(samples), 100)]
    )
    nodes.append(helper.make_node("Sub", ["pooled", "mean"], ["centred"]))
    nodes.append(helper.make_node("Div", ["centred", "deviation"], ["features"]))
    half["mean"], half["deviation"] = pooled.mean(0), pooled.std(0) + 1e-3
    return model(nodes, [image], value("features", "n", FEATURES), half)


def train() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Trains the backbone; returns its weights and the first pictures that it saw."""
    images, labels = pictures(range(THINGS), PICTURES, seed=1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        generate_artifacts(
            classifier(0), loss="cross_entropy", optimizer=AdamW(weight_decay=0.01), artifact_directory=folder
        )
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        rng = np.random.default_rng(2)
        for step in range(STEPS):
            # Warm-up, then down to zero.
            part = step / STEPS
            optimizer.set_learning_rate(LEARNING_RATE * min(1, 20 * part + 0.05) * (1 - part))
            chosen = rng.integers(0, len(images), BATCH)
            batch = images[chosen]
            if step % 2:
                batch = np.ascontiguousarray(batch[..., ::-1])
            module(batch, labels[chosen])
            optimizer.step()
            module.lazy_reset_grad()
        module.export_model_for_inferencing(folder / "trained.onnx", ["logits"])
        tensors = {
            t.name: numpy_helper.to_array(t) for t in onnx.load(folder / "trained.onnx").graph.initializer
        }
    return {name: tensors[name] for name in random_weights(0)}, images[::8]


def head() -> onnx.ModelProto:
    """Returns a linear head for any number of features and classes up to MAX_FEATURES and MAX_CLASSES.

    `logits` = `features` · W + b + `mask`. Unused features are 0, and `mask` is -1e30 for unused classes, 0 for the
    others. The gradients of their weights are exactly 0, so the head learns as one of just the right size does.
    """
    nodes = [
        helper.make_node("Gemm", ["features", "head.weight", "head.bias"], ["scores"]),
        helper.make_node("Add", ["scores", "mask"], ["logits"]),
    ]
    inputs = [value("features", "n", MAX_FEATURES), value("mask", MAX_CLASSES)]
    weights = {
        "head.weight": np.zeros((MAX_FEATURES, MAX_CLASSES), np.float32),
        "head.bias": np.zeros(MAX_CLASSES, np.float32),
    }
    return model(nodes, inputs, value("logits", "n", MAX_CLASSES), weights)


def main(directory: Path) -> None:
    """Trains the backbone and writes all files."""
    weights, samples = train()
    directory.mkdir(parents=True, exist_ok=True)
    onnx.save(backbone(weights, samples), directory / "backbone.onnx")
    generate_artifacts(
        head(),
        loss="cross_entropy",
        optimizer=AdamW(weight_decay=0.01),
        artifact_directory=directory,
        profile="portable",
    )
    size = (directory / "backbone.onnx").stat().st_size
    print(f"The backbone, of {THINGS} drawn things, takes {size / 1024:.0f} KB.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
