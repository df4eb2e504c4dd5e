"""Trains the demo's base model on scikit-learn's digits, and writes its training artifacts.

    python web/demo/model/make.py web/demo/dist/model

The folder gets the artifacts, and `digits.bin`: ten digits of each class, 256 bytes each, which the page mixes into its
batches so that the model does not forget the digits that the user has not drawn.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from preprocess import SIZE, preprocess
from scipy import ndimage
from sklearn.datasets import load_digits

from onnxtrain import generate_artifacts
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.optimizers import AdamW

EPOCHS, BATCH, LEARNING_RATE = 14, 64, 0.003
COPIES = 4
KEPT_PER_CLASS = 10


def network(seed: int = 0) -> onnx.ModelProto:
    """Builds the untrained network: three convolutions and a linear layer.

    Input `image`: float32 [batch, 1, 16, 16]; output `logits`: float32 [batch, 10].
    """
    # Strides instead of pooling, and no BatchNorm: statistics of the few drawings of one person would be poor, and the
    # WebGPU providers of ONNX Runtime fail on both in training.
    rng = np.random.default_rng(seed)
    nodes, initializers = [], []

    def parameter(name: str, shape: tuple[int, ...], deviation: float) -> str:
        value = (rng.standard_normal(shape) * deviation).astype(np.float32)
        initializers.append(numpy_helper.from_array(value, name))
        return name

    x, channels = "image", 1
    for number, (width, stride) in enumerate([(8, 1), (16, 2), (32, 2)], start=1):
        weight = parameter(f"conv{number}.weight", (width, channels, 3, 3), math.sqrt(2 / (9 * channels)))
        bias = parameter(f"conv{number}.bias", (width,), 0.0)
        sizes = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [stride, stride]}
        nodes.append(helper.make_node("Conv", [x, weight, bias], [f"conv{number}"], **sizes))
        nodes.append(helper.make_node("Relu", [f"conv{number}"], [f"relu{number}"]))
        x, channels = f"relu{number}", width
    features = channels * (SIZE // 4) ** 2
    weight = parameter("head.weight", (features, 10), math.sqrt(1 / features))
    bias = parameter("head.bias", (10,), 0.0)
    nodes.append(helper.make_node("Flatten", [x], ["flat"]))
    nodes.append(helper.make_node("Gemm", ["flat", weight, bias], ["logits"]))
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, SIZE, SIZE])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])
    graph = helper.make_graph(nodes, "handwriting", [image], [logits], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def strokes(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Turns an 8x8 digit into ink of 64x64 pixels, turned, sheared and thickened at random."""
    smooth = np.clip(ndimage.zoom(image, 8, order=3), 0, 1)
    angle, shear = rng.normal(0, 0.12), rng.normal(0, 0.15)
    matrix = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle) + shear, math.cos(angle)]])
    centre = np.full(2, 31.5)
    turned = ndimage.affine_transform(smooth, matrix, centre - matrix @ centre, order=1)
    # The digits are blurred by their scan; a threshold makes a stroke of them, the thicker the lower it is.
    return np.clip((turned - rng.uniform(0.3, 0.65)) * 6 + 0.5, 0, 1)


def samples(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images [n, 1, 16, 16] and labels [n] of all digits, each in several versions."""
    rng, digits = np.random.default_rng(seed), load_digits()
    images = [preprocess(strokes(image / 16, rng)) for image in np.repeat(digits.images, COPIES, axis=0)]
    return np.stack(images)[:, None], np.repeat(digits.target.astype(np.int64), COPIES)


def main(directory: Path) -> None:
    """Trains the model and writes the artifacts that go on from it."""
    images, labels = samples(seed=1)
    # The last fifth was written by other people than the rest.
    count = len(images) * 4 // 5
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        generate_artifacts(network(), loss="cross_entropy", optimizer=AdamW(), artifact_directory=folder)
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
        optimizer = Optimizer(folder / "optimizer_model.onnx", module)
        rng, steps = np.random.default_rng(2), EPOCHS * (count // BATCH)
        for step in range(steps):
            optimizer.set_learning_rate(LEARNING_RATE * (1 - step / steps))
            chosen = rng.integers(0, count, BATCH)
            module(images[chosen], labels[chosen])
            optimizer.step()
            module.lazy_reset_grad()
        module.export_model_for_inferencing(folder / "trained.onnx", ["logits"])
        generate_artifacts(
            folder / "trained.onnx",
            loss="cross_entropy",
            optimizer=AdamW(weight_decay=0.0),
            artifact_directory=directory,
            additional_output_names=["logits"],
            profile="portable",
        )
        session = ort.InferenceSession(folder / "trained.onnx")
        guesses = session.run(None, {"image": images[count:]})[0].argmax(1)
    kept = np.concatenate(
        [np.flatnonzero(labels[:count] == c)[:: COPIES * 7][:KEPT_PER_CLASS] for c in range(10)]
    )
    pixels = np.minimum(images[kept] * 256, 255).astype(np.uint8)
    (directory / "digits.bin").write_bytes(pixels.tobytes())
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"The base model reads {(guesses == labels[count:]).mean():.1%} of scikit-learn's digits of other writers; "
        f"its artifacts take {size / 1024:.0f} KB."
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
