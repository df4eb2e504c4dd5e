"""The nets of the tests of hosts: each as a model without loss, the arguments of its artifacts, and batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from models import parse_nodes
from onnxtrain.lora import LoraConfig
from onnxtrain.optimizers import AdamW, ParameterGroup, SparseAdam

BATCH = 8

STEPS = 50
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Net:
    """A net to train.

    Attributes:
        name: name of the folder of its artifacts.
        model: the net, without a loss.
        batch: makes one batch: an array per input, then per target.
        arguments: arguments of `generate_artifacts` beside loss and directory.
    """

    name: str
    model: Callable[[], onnx.ModelProto]
    batch: Callable[[np.random.Generator], list[np.ndarray]]
    arguments: dict[str, Any] = field(default_factory=dict)


def _model(
    text: str, x: tuple[int, list[int | str]], weights: dict[str, tuple[int, ...]], scale: float = 0.3
) -> onnx.ModelProto:
    """Parse a net with input `x` and output `logits`; weights are random, names that end in "ones" hold ones."""
    rng = np.random.default_rng(3)
    values = {
        name: np.ones(shape) if name.endswith("ones") else rng.normal(0, scale, shape)
        for name, shape in weights.items()
    }
    graph = helper.make_graph(
        parse_nodes(text),
        "net",
        [helper.make_tensor_value_info("x", *x)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 5])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def mlp() -> onnx.ModelProto:
    return _model(
        "a = Gemm(x, w1, b1)  h = Relu(a)  logits = Gemm(h, w2, b2)",
        (TensorProto.FLOAT, ["batch", 6]),
        {"w1": (6, 16), "b1": (16,), "w2": (16, 5), "b2": (5,)},
    )


def digits() -> onnx.ModelProto:
    """Two convolutions with BatchNormalization and max-pooling, of which one has windows that overlap."""
    return _model(
        """c1 = Conv<pads=[1,1,1,1]>(x, conv1_w)
        n1, m1, v1 = BatchNormalization<training_mode=1>(c1, bn1_ones, bn1_bias, bn1_mean, bn1_var_ones)
        r1 = Relu(n1)  p1 = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r1)
        c2 = Conv(p1, conv2_w, conv2_b)
        n2, m2, v2 = BatchNormalization<training_mode=1>(c2, bn2_ones, bn2_bias, bn2_mean, bn2_var_ones)
        r2 = Relu(n2)
        p2 = MaxPool<kernel_shape=[3,3], strides=[1,1], pads=[1,1,1,1]>(r2)
        f = Flatten(p2)  logits = Gemm(f, fc_w, fc_b)""",
        (TensorProto.FLOAT, ["batch", 1, 8, 8]),
        {
            "conv1_w": (4, 1, 3, 3), "bn1_ones": (4,), "bn1_bias": (4,), "bn1_mean": (4,), "bn1_var_ones": (4,),
            "conv2_w": (6, 4, 3, 3), "conv2_b": (6,), "bn2_ones": (6,), "bn2_bias": (6,), "bn2_mean": (6,),
            "bn2_var_ones": (6,), "fc_w": (24, 5), "fc_b": (5,),
        },
    )  # fmt: skip


def transformer() -> onnx.ModelProto:
    """One layer of attention with Dropout of probabilities and of the result, over six tokens of 8 numbers."""
    return _model(
        """n = LayerNormalization(x, ln1_ones, ln1_bias)
        q = MatMul(n, q_w)  k = MatMul(n, k_w)  v = MatMul(n, v_w)
        kt = Transpose<perm=[0,2,1]>(k)  s = MatMul(q, kt)
        p = Softmax<axis=-1>(s)
        ratio = Constant<value_float=0.1>()  yes = Constant<value=bool {1}>()
        pd = Dropout(p, ratio, yes)
        a = MatMul(pd, v)  o = MatMul(a, o_w)
        od, mask = Dropout(o, ratio, yes)
        h = Add(x, od)
        n2 = LayerNormalization(h, ln2_ones, ln2_bias)
        u = MatMul(n2, up_w)  g = Gelu(u)  d = MatMul(g, down_w)
        y = Add(h, d)
        axes = Constant<value_ints=[1]>()  pool = ReduceMean<keepdims=0>(y, axes)
        logits = Gemm(pool, fc_w, fc_b)""",
        (TensorProto.FLOAT, ["batch", 6, 8]),
        {
            "ln1_ones": (8,), "ln1_bias": (8,), "q_w": (8, 8), "k_w": (8, 8), "v_w": (8, 8), "o_w": (8, 8),
            "ln2_ones": (8,), "ln2_bias": (8,), "up_w": (8, 16), "down_w": (16, 8), "fc_w": (8, 5), "fc_b": (5,),
        },
    )  # fmt: skip


def adapted() -> onnx.ModelProto:
    """A net with a frozen layer, BatchNormalization and Dropout, and names beyond ASCII."""
    model = _model(
        """a = Gemm(x, w1, b1)
        n, m, v = BatchNormalization<training_mode=1>(a, bn_ones, bn_bias, bn_mean, bn_var_ones)
        r = Relu(n)
        ratio = Constant<value_float=0.2>()  yes = Constant<value=bool {1}>()
        d = Dropout(r, ratio, yes)
        logits = Gemm(d, w2, b2)""",
        (TensorProto.FLOAT, ["batch", 6]),
        {
            "w1": (6, 12), "b1": (12,), "bn_ones": (12,), "bn_bias": (12,), "bn_mean": (12,), "bn_var_ones": (12,),
            "w2": (12, 5), "b2": (5,),
        },
    )  # fmt: skip
    # In the digest of a delta names are JSON texts, in the order of code points.
    renamed = {"w1": 'größe\t"1"', "b1": "\uff5e/b", "bn_bias": "😀.bias", "bn_ones": "カ"}
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    for tensor in model.graph.initializer:
        tensor.name = renamed.get(tensor.name, tensor.name)
    return model


def lstm() -> onnx.ModelProto:
    return _model(
        """t = Transpose<perm=[1,0,2]>(x)
        y, h = LSTM<hidden_size=7>(t, lstm_w, lstm_r, lstm_b)
        axes = Constant<value_ints=[0]>()  last = Squeeze(h, axes)
        logits = Gemm(last, fc_w, fc_b)""",
        (TensorProto.FLOAT, ["batch", 5, 4]),
        {"lstm_w": (1, 28, 4), "lstm_r": (1, 28, 7), "lstm_b": (1, 56), "fc_w": (7, 5), "fc_b": (5,)},
    )


def embedding() -> onnx.ModelProto:
    return _model(
        """e = Gather(table, x)
        axes = Constant<value_ints=[1]>()  m = ReduceMean<keepdims=0>(e, axes)
        logits = Gemm(m, fc_w, fc_b)""",
        (TensorProto.INT64, ["batch", 4]),
        {"table": (30, 6), "fc_w": (6, 5), "fc_b": (5,)},
    )


def adapter_base() -> onnx.ModelProto:
    """Two wide layers, whose weights adapters leave as they are."""
    return _model(
        "h1 = MatMul(x, first)  a1 = Relu(h1)  h2 = MatMul(a1, second)  a2 = Relu(h2)  logits = MatMul(a2, head)",
        (TensorProto.FLOAT, ["batch", 6]),
        {"first": (6, 192), "second": (192, 192), "head": (192, 5)},
        scale=0.1,
    )


def int4_base() -> onnx.ModelProto:
    """As `adapter_base`, with a wider second layer of 4 bits."""
    size, block = 448, 32
    model = _model(
        "h1 = MatMul(x, first)  a1 = Relu(h1)  a2 = Relu(h2)  logits = MatMul(a2, head)",
        (TensorProto.FLOAT, ["batch", 6]),
        {"first": (6, size), "head": (size, 5)},
        scale=0.1,
    )
    rng = np.random.default_rng(4)
    values = {
        "packed": rng.integers(0, 256, (size, size // block, block // 2), np.uint8),
        "scales": rng.uniform(0.01, 0.02, size * size // block).astype(np.float32),
    }
    node = helper.make_node(
        "MatMulNBits", ["a1", *values], ["h2"], "second", domain="com.microsoft",
        K=size, N=size, bits=4, block_size=block,
    )  # fmt: skip
    model.graph.node.insert(2, node)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def _floats(*shape: int) -> Callable[[np.random.Generator], list[np.ndarray]]:
    """Make batches of random numbers, labelled by the largest of the first five of each sample."""

    def batch(rng: np.random.Generator) -> list[np.ndarray]:
        x = rng.normal(0, 1, (BATCH, *shape)).astype(np.float32)
        return [x, x.reshape(BATCH, -1)[:, :5].argmax(1)]

    return batch


def _tokens(rng: np.random.Generator) -> list[np.ndarray]:
    """Make a batch of four tokens per sample, labelled by the first one."""
    x = rng.integers(0, 30, (BATCH, 4))
    return [x, x[:, 0] % 5]


NETS = [
    Net("mlp", mlp, _floats(6)),
    Net("digits", digits, _floats(1, 8, 8)),
    Net("transformer", transformer, _floats(6, 8)),
    Net("lstm", lstm, _floats(5, 4)),
    Net(
        "embedding",
        embedding,
        _tokens,
        {
            "optimizer": AdamW(groups=[ParameterGroup("table", optimizer=SparseAdam())]),
            "sparse_gradients": ["table"],
        },
    ),
    Net(
        "adapted",
        adapted,
        _floats(6),
        {"requires_grad": ["w2", "b2"], "frozen_params": ["größe*", "\uff5e/b", "カ", "😀*"]},
    ),
    Net("frozen", digits, _floats(1, 8, 8), {"requires_grad": ["fc_*"], "batch_norm": "inference"}),
]

ADAPTERS = [
    Net("adapter", adapter_base, _floats(6), {"lora": LoraConfig(r=2)}),
    Net("adapter-int4", int4_base, _floats(6), {"lora": LoraConfig(r=2)}),
]
"""Nets with adapters: more than 64 KB of frozen weights, which their models share."""


def write_feeds(
    folder: Path, manifest: dict[str, Any], batches: list[list[np.ndarray]], **settings: Any
) -> None:
    """Write the folder FEEDS that hosts read; `settings` go into `feeds.json` beside the batches."""
    folder.mkdir()
    specs = manifest["inputs"] + manifest["targets"]
    feeds = [
        {"name": spec["name"], "dtype": str(array.dtype), "shape": list(array.shape)}
        for spec, array in zip(specs, batches[0], strict=True)
    ]
    run = {"steps": len(batches), "learning_rate": LEARNING_RATE, "feeds": feeds} | settings
    (folder / "feeds.json").write_text(json.dumps(run))
    (folder / "feeds.bin").write_bytes(b"".join(array.tobytes() for batch in batches for array in batch))
