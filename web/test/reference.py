"""Writes artifacts of small nets, feeds of 50 steps, and what Python computes with them, for the tests of the package.

    python web/test/reference.py build/web-reference

Each net has a folder with the artifacts and
    feeds.json, feeds.bin   the inputs and targets of each step, see `write_feeds`
    losses.json             per step the loss; after the last step the loss and the outputs of an evaluation
    trained                 the checkpoint after the last step, with optimizer state
    delta                   the same as a delta, with optimizer state
    exported.onnx           the trained model for inference
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

# Native kernels round in another order than the bodies, which all other hosts run.
os.environ["ONNXTRAIN_KERNELS"] = "off"

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from sklearn.datasets import load_digits
from torch import nn

from onnxtrain import generate_artifacts
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.lora import LoraConfig
from onnxtrain.optimizers import AdamW, ParameterGroup, SparseAdam

STEPS = 50
LEARNING_RATE = 0.01
SEED = 7
Feeds = dict[str, np.ndarray]


class Mlp(nn.Sequential):
    """A net of three layers for 64 features."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10))


class Dropped(nn.Sequential):
    """A net with Dropout, whose masks the portable profile draws from the seed and the numbers of step and run."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 10))


class Cnn(nn.Module):
    """Two convolutions with BatchNorm, for digits of 8x8 pixels.

    Without biases: BatchNorm subtracts them, so their gradients are rounding errors, which Adam would follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


class Transformer(nn.Module):
    """One block of attention and feed-forward; dropout multiplies by masks that the host draws and feeds."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, mask_a: torch.Tensor, mask_b: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        q, k, v = self.qkv(self.first(x)).view(-1, 8, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.softmax(q @ k.transpose(2, 3) / 8**0.5, -1) @ v
        x = x + self.out(mixed.permute(0, 2, 1, 3).reshape(-1, 8, 16)) * mask_a
        x = x + self.feed(self.second(x)) * mask_b
        return self.head(x.mean(1))


class Lstm(nn.Module):
    """An LSTM that reads a digit row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 24, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Embedding(nn.Module):
    """A table of words whose rows are averaged."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens).mean(1))


class Wide(nn.Sequential):
    """A base for adapters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 10))


def with_data_file(path: Path) -> None:
    """Moves the weights of a model into a file beside it, to which the models of a run can refer."""
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="net.onnx.data", size_threshold=1024)


def in_int4(path: Path) -> None:
    """Quantizes the large products of a model to 4 bits."""
    model = onnx.load(path)
    # The quantizer takes products of two tensors only.
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Gemm":
            nodes.append(node)
            continue
        x, name, bias = node.input
        array = np.ascontiguousarray(numpy_helper.to_array(weights[name]).T)
        weights[name].CopyFrom(numpy_helper.from_array(array, name))
        product = f"{node.output[0]}/product"
        nodes.append(helper.make_node("MatMul", [x, name], [product], product))
        nodes.append(helper.make_node("Add", [product, bias], node.output))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))


class Nets:
    """Makes the feeds of each net from one generator, so that every run of this script writes the same."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(5)
        digits = load_digits()
        self.images = (digits.images / 16).astype(np.float32)
        self.labels = digits.target.astype(np.int64)

    def digits(self, shape: tuple[int, ...], count: int = 32) -> Feeds:
        chosen = self.random.integers(0, len(self.labels), count)
        return {"x": self.images[chosen].reshape(count, *shape), "labels": self.labels[chosen]}

    def masked(self) -> Feeds:
        feeds = self.digits((8, 8), 16)
        for name in ("mask_a", "mask_b"):
            feeds[name] = ((self.random.random((16, 8, 16)) >= 0.1) / 0.9).astype(np.float32)
        return {name: feeds[name] for name in ("x", "mask_a", "mask_b", "labels")}

    def words(self) -> Feeds:
        labels = self.random.integers(0, 4, 16)
        return {"tokens": self.random.integers(0, 50, (16, 6)) + 50 * labels[:, None], "labels": labels}


def write_feeds(directory: Path, batches: list[Feeds]) -> None:
    """Writes the batches: feeds.json says what each step takes, feeds.bin holds the raw values step after step."""
    first = batches[0]
    listed = [{"name": n, "dtype": a.dtype.name, "shape": list(a.shape)} for n, a in first.items()]
    entry = {"steps": len(batches), "learning_rate": LEARNING_RATE, "seed": SEED, "feeds": listed}
    (directory / "feeds.json").write_text(json.dumps(entry))
    (directory / "feeds.bin").write_bytes(b"".join(a.tobytes() for feeds in batches for a in feeds.values()))


def write_net(
    directory: Path,
    net: nn.Module,
    batch: Callable[[], Feeds],
    change: Callable[[Path], None] = lambda path: None,
    **options: object,
) -> None:
    """Writes artifacts and feeds of a net, trains it in Python, and writes the results.

    `change` changes the exported file, from which the artifacts are made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    batches = [batch() for _ in range(STEPS)]
    inputs = [n for n in batches[0] if n != "labels"]
    axes = {name: {0: "batch"} for name in [*inputs, "logits"]}
    example = tuple(torch.from_numpy(batches[0][n]) for n in inputs)
    exported = directory / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.train(),
            example,
            exported,
            input_names=inputs,
            output_names=["logits"],
            dynamic_axes=axes,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            dynamo=False,
            opset_version=18,
        )
    change(exported)
    generate_artifacts(
        exported,
        loss="cross_entropy",
        artifact_directory=directory,
        additional_output_names=["logits"],
        profile="portable",
        **{"optimizer": AdamW(), "batch_norm": "training", **options},
    )
    write_feeds(directory, batches)
    state = CheckpointState.load_checkpoint(directory / "checkpoint")
    module = Module(directory / "training_model.onnx", state, directory / "eval_model.onnx", seed=SEED)
    optimizer = Optimizer(directory / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    losses = []
    for feeds in batches:
        losses.append(float(module(*feeds.values())[0]))
        optimizer.step()
        module.lazy_reset_grad()
    module.eval()
    loss, logits = module(*batches[0].values())
    results = {"losses": losses, "eval_loss": float(loss), "logits": np.ravel(logits).tolist()}
    (directory / "losses.json").write_text(json.dumps(results))
    state.properties["epoch"] = 3
    state.properties["note"] = "Größe 😀"
    for name, delta in (("trained", False), ("delta", True)):
        CheckpointState.save_checkpoint(
            state, directory / name, include_optimizer_state=True, trainable_only=delta
        )
    module.export_model_for_inferencing(directory / "exported.onnx", ["logits"])


def main(directory: Path) -> None:
    """Writes all nets below `directory`."""
    torch.manual_seed(3)
    # Says of the net with Dropout that it has no BatchNormalization.
    logging.getLogger("onnxtrain").setLevel(logging.ERROR)
    logging.getLogger("onnxruntime").setLevel(logging.ERROR)
    nets = Nets()
    write_net(directory / "mlp", Mlp(), lambda: nets.digits((64,)), batch_norm="as_exported")
    write_net(directory / "dropout", Dropped(), lambda: nets.digits((64,)))
    write_net(directory / "cnn", Cnn(), lambda: nets.digits((1, 8, 8)))
    write_net(directory / "transformer", Transformer(), nets.masked, batch_norm="as_exported")
    write_net(directory / "lstm", Lstm(), lambda: nets.digits((8, 8)), batch_norm="as_exported")
    write_net(
        directory / "embedding",
        Embedding(200, 16),
        nets.words,
        batch_norm="as_exported",
        sparse_gradients=["table.weight"],
        optimizer=AdamW(groups=[ParameterGroup("table.weight", optimizer=SparseAdam())]),
    )
    # The table is neither trained nor frozen, and too large for the models: they share a file of it.
    write_net(
        directory / "shared",
        Embedding(40_000, 112),
        nets.words,
        batch_norm="as_exported",
        requires_grad=["head.*"],
    )
    write_net(
        directory / "frozen",
        Cnn(),
        lambda: nets.digits((1, 8, 8)),
        requires_grad=["head.*"],
        frozen_params=["features.*"],
        batch_norm="inference",
    )
    for name, change in (("adapter", with_data_file), ("adapter-int4", in_int4)):
        write_net(
            directory / name,
            Wide(),
            lambda: nets.digits((64,)),
            change,
            batch_norm="as_exported",
            lora=LoraConfig(r=2),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
