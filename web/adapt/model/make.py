"""Trains a small language model on the documentation, quantizes it to 4 bits, and writes the artifacts of an adapter.

    python web/adapt/model/make.py web/adapt/dist/model [STEPS]

The model reads bytes: 64 numbers from 0 to 255. It is trained for STEPS steps, by default 320, on the pages in `docs/`,
starting from weights with which it predicts each byte from the one before.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from onnxtrain import Trainer, generate_artifacts
from onnxtrain.lora import LoraConfig
from onnxtrain.optimizers import AdamW

LENGTH, SIZE, WIDE, HEADS, LAYERS, TOKENS = 64, 192, 512, 4, 3, 256
BATCH, LEARNING_RATE, STEPS, HELD_OUT = 8, 1e-3, 320, 256
DOCS = Path(__file__).parents[3] / "docs"


def documentation() -> np.ndarray:
    """Returns the bytes of all pages: int64 [bytes]."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))).encode()
    return np.frombuffer(text, np.uint8).astype(np.int64)


def successors(text: np.ndarray) -> np.ndarray:
    """Returns the log-probabilities of the byte that follows each byte: float64 [256, 256]."""
    counts = np.full((TOKENS, TOKENS), 0.05)
    np.add.at(counts, (text[:-1], text[1:]), 1)
    return np.log(counts / counts.sum(1, keepdims=True))


class Network:
    """Builds the nodes and weights of a decoder-only transformer."""

    def __init__(self, text: np.ndarray) -> None:
        self.text = text
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def value(self, name: str, array: np.ndarray) -> str:
        """Adds a weight or a constant, and returns its name."""
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def op(self, kind: str, inputs: list[str], name: str, **attributes: object) -> str:
        """Adds a node, and returns the name of its output."""
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def product(self, x: str, name: str, weight: np.ndarray) -> str:
        """Adds a product with a weight matrix."""
        return self.op("MatMul", [x, self.value(f"{name}.weight", weight.astype(np.float32))], name)

    def linear(self, x: str, name: str, inputs: int, outputs: int, scale: float = 1) -> str:
        """Adds a product with a random weight matrix."""
        weight = self.random.normal(0, scale * inputs**-0.5, (inputs, outputs))
        return self.product(x, name, weight)

    def norm(self, x: str, name: str) -> str:
        """Adds a layer normalization."""
        scale = self.value(f"{name}.weight", np.ones(SIZE, np.float32))
        return self.op("LayerNormalization", [x, scale], name)

    def heads(self, x: str, name: str, order: list[int]) -> str:
        """Splits the last axis into heads."""
        split = self.op("Reshape", [x, "split"], f"{name}.split")
        return self.op("Transpose", [split], name, perm=order)

    def layer(self, x: str, name: str) -> str:
        """Adds attention to what is before, and two products with a GELU in between. Both begin as zero."""
        h = self.norm(x, f"{name}.norm1")
        q, k, v = (
            self.heads(self.linear(h, f"{name}.{part}", SIZE, SIZE), f"{name}.{part}.heads", order)
            for part, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3]))
        )
        scores = self.op("Mul", [self.op("MatMul", [q, k], f"{name}.scores"), "scale"], f"{name}.scaled")
        masked = self.op("Add", [scores, "mask"], f"{name}.masked")
        mixed = self.op("MatMul", [self.op("Softmax", [masked], f"{name}.weights"), v], f"{name}.mixed")
        joined = self.op("Transpose", [mixed], f"{name}.back", perm=[0, 2, 1, 3])
        joined = self.op("Reshape", [joined, "join"], f"{name}.joined")
        x = self.op("Add", [x, self.linear(joined, f"{name}.out", SIZE, SIZE, scale=0)], f"{name}.sum1")
        h = self.op(
            "Gelu", [self.linear(self.norm(x, f"{name}.norm2"), f"{name}.up", SIZE, WIDE)], f"{name}.gelu"
        )
        return self.op("Add", [x, self.linear(h, f"{name}.down", WIDE, SIZE, scale=0)], f"{name}.sum2")

    def model(self) -> onnx.ModelProto:
        """Builds the model. Input `tokens`: int64 [batch, 64]; output `logits`: float32 [batch, 64, 256]."""
        self.value("split", np.array([0, LENGTH, HEADS, SIZE // HEADS]))
        self.value("join", np.array([0, LENGTH, SIZE]))
        self.value("scale", np.float32((SIZE // HEADS) ** -0.5))
        self.value("mask", np.triu(np.full((LENGTH, LENGTH), -1e9, np.float32), 1))
        vectors = self.random.normal(0, 0.3, (TOKENS, SIZE)).astype(np.float32)
        table = self.value("tokens.weight", vectors)
        places = self.value("places.weight", self.random.normal(0, 0.02, (LENGTH, SIZE)).astype(np.float32))
        x = self.op("Add", [self.op("Gather", [table, "tokens"], "embedded"), places], "placed")
        for index in range(LAYERS):
            x = self.layer(x, f"layer{index}")
        # What such a network would take the first hundred steps to learn is the solution of a linear equation: the
        # documentation has fewer different bytes than a vector has numbers.
        used = np.unique(self.text)
        known = (vectors - vectors.mean(1, keepdims=True)) / vectors.std(1, keepdims=True)
        head = np.linalg.lstsq(known[used], successors(self.text)[used], rcond=None)[0]
        logits = self.product(self.norm(x, "norm"), "logits", head)
        graph = helper.make_graph(
            self.nodes,
            "bytes",
            [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", LENGTH])],
            [helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["batch", LENGTH, TOKENS])],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def windows(text: np.ndarray, count: int) -> np.ndarray:
    """Draws pieces of a text: int64 [count, 64]."""
    starts = np.random.default_rng(1).integers(0, len(text) - LENGTH, count)
    return text[starts[:, None] + np.arange(LENGTH)]


def main(directory: Path, steps: int) -> None:
    """Writes the artifacts."""
    logging.getLogger().setLevel(logging.WARNING)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.onnx"
        # The mask and the scale are no weights.
        frozen = ["mask", "scale"]
        text = documentation()
        trainer = Trainer(
            Network(text).model(),
            loss="causal_lm",
            optimizer=AdamW(betas=(0.9, 0.98), weight_decay=0.0),
            learning_rate=LEARNING_RATE,
            scheduler="cosine",
            warmup_ratio=0.05,
            frozen_params=frozen,
        )
        tokens, unseen = np.split(windows(text, BATCH * steps + HELD_OUT), [-HELD_OUT])
        trainer.fit(tokens, tokens, batch_size=BATCH, epochs=1, verbose=False)
        print(f"loss of the base model: {trainer.evaluate(unseen, unseen)['loss']:.2f}")
        trainer.export(base)
        quantizer = MatMulNBitsQuantizer(onnx.load(base), block_size=32, is_symmetric=True)
        quantizer.process()
        quantizer.model.save_model_to_file(str(base))
        generate_artifacts(
            base,
            loss="causal_lm",
            optimizer=AdamW(weight_decay=0.0),
            lora=LoraConfig(r=8, lora_alpha=16),
            profile="portable",
            artifact_directory=directory,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else STEPS)
