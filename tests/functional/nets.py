"""Nets as ONNX text and as functions of PyTorch: parameters are inputs, in float32 or float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from torch.nn import functional as fn

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Net:
    """A net whose first output is `y`, and the second a scalar `loss`.

    Attributes:
        text: body of the graph, with T for the dtype; sizes of `x` (and `labels`) are symbolic.
        twin: the same in PyTorch: (y, loss) of named tensors.
        shapes: of the floating-point inputs; the batch has 3 samples.
        integers: upper bounds and shapes of the integer inputs.
        batched: inputs that have samples.
        float64: whether ONNX Runtime has all kernels in float64.
    """

    text: str
    twin: Callable[[Tensors], tuple[torch.Tensor, torch.Tensor]]
    shapes: dict[str, tuple[int, ...]]
    integers: dict[str, tuple[int, tuple[int, ...]]]
    batched: tuple[str, ...]
    float64: bool = True

    def model(self, dtype: type) -> onnx.ModelProto:
        body = re.sub(r"\bT(?=[ \[])", {np.float32: "float", np.float64: "double"}[dtype], self.text)
        return onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> net {body}'
        )

    def arrays(self, dtype: type, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        feeds = {name: rng.normal(size=shape).astype(dtype) for name, shape in self.shapes.items()}
        return feeds | {name: rng.integers(0, bound, shape) for name, (bound, shape) in self.integers.items()}


def _mlp(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.tanh(t["x"] @ t["w0"] + t["b0"])
    y = hidden @ t["w1"].T
    return y, fn.cross_entropy(y, t["labels"])


MLP = Net(
    """(T[n, 4] x, T[4, 5] w0, T[5] b0, T[3, 5] w1, int64[n] labels) => (T[n, 3] y, T[] loss) {
        p = MatMul(x, w0)  q = Add(p, b0)  hidden = Tanh(q)
        y = Gemm<transB = 1>(hidden, w1)
        loss = SoftmaxCrossEntropyLoss(y, labels) }""",
    _mlp,
    {"x": (3, 4), "w0": (4, 5), "b0": (5,), "w1": (3, 5)},
    {"labels": (3, (3,))},
    ("x", "labels"),
)


def _conv(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    maps = torch.sigmoid(fn.conv2d(t["x"], t["kernel"], t["bias"], stride=2, padding=1))
    pooled = fn.max_pool2d(maps, 2)
    y = pooled.flatten(1) @ t["w"]
    return y, (y * y * y).mean()


CONV = Net(
    """(T[n, 2, 8, 8] x, T[3, 2, 3, 3] kernel, T[3] bias, T[12, 2] w) => (T[n, 2] y, T[] loss) {
        c = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(x, kernel, bias)  maps = Sigmoid(c)
        pooled = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(maps)
        flat = Flatten(pooled)  y = MatMul(flat, w)
        square = Mul(y, y)  cube = Mul(square, y)  loss = ReduceMean<keepdims = 0>(cube) }""",
    _conv,
    {"x": (3, 2, 8, 8), "kernel": (3, 2, 3, 3), "bias": (3,), "w": (12, 2)},
    {},
    ("x",),
    float64=False,
)


def _attention(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    embedded = t["table"][t["tokens"]]
    normed = fn.layer_norm(embedded, (4,), t["scale"], t["shift"])
    q, k = normed @ t["wq"], normed @ t["wk"]
    mixed = torch.softmax(q @ k.transpose(1, 2) / 2, -1) @ normed
    y = mixed.amax(1)
    return y, (torch.logsumexp(y, 1) - y.mean(1)).sum()


ATTENTION = Net(
    """(int64[n, s] tokens, T[6, 4] table, T[4] scale, T[4] shift, T[4, 4] wq, T[4, 4] wk)
        => (T[n, 4] y, T[] loss) <int64[1] middle = {1}> {
        embedded = Gather(table, tokens)
        normed = LayerNormalization(embedded, scale, shift)
        q = MatMul(normed, wq)  k = MatMul(normed, wk)  kt = Transpose<perm = [0, 2, 1]>(k)
        two = Constant<value_float = 2.0>()  half = CastLike(two, table)
        dots = MatMul(q, kt)  scores = Div(dots, half)  p = Softmax(scores)
        mixed = MatMul(p, normed)  y = ReduceMax<keepdims = 0>(mixed, middle)
        lse = ReduceLogSumExp<keepdims = 0>(y, middle)  mean = ReduceMean<keepdims = 0>(y, middle)
        d = Sub(lse, mean)  loss = ReduceSum<keepdims = 0>(d) }""",
    _attention,
    {"table": (6, 4), "scale": (4,), "shift": (4,), "wq": (4, 4), "wk": (4, 4)},
    {"tokens": (6, (3, 5))},
    ("tokens",),
)


def _looped(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    state = t["x"]
    for _ in range(3):
        state = torch.sin(state @ t["w"])
    y = state.abs()
    return y, torch.linalg.norm(y)


LOOP = Net(
    """(T[n, 3] x, T[3, 3] w) => (T[n, 3] y, T[] loss) <int64 trips = {3}> {
        state = Loop <body = body (int64 i, bool go, T[n, 3] before) => (bool going, T[n, 3] after) {
            going = Identity(go)  p = MatMul(before, w)  after = Sin(p) }>(trips, , x)
        y = Abs(state)
        loss = ReduceL2<keepdims = 0>(y) }""",
    _looped,
    {"x": (3, 3), "w": (3, 3)},
    {},
    ("x",),
)


def _bodies(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    gelu = fn.gelu(t["x"] @ t["w"] + t["b"])
    quick = gelu * torch.sigmoid(1.702 * gelu)
    total = quick + t["x"]
    # By hand: third derivatives of PyTorch's own layer_norm (2.13) are wrong.
    variance, mean = torch.var_mean(total, -1, unbiased=False, keepdim=True)
    y = fn.mish((total - mean) / torch.sqrt(variance + 1e-5) * t["scale"])
    return y, (y * y * y).sum()


BODIES = Net(
    """(T[n, 4] x, T[4, 4] w, T[4] b, T[4] scale) => (T[n, 4] y, T[] loss) {
        p = MatMul(x, w)  gelu = com.microsoft.BiasGelu(p, b)  quick = com.microsoft.QuickGelu(gelu)
        normed = com.microsoft.SkipLayerNormalization<epsilon = 0.00001>(quick, x, scale)
        y = Mish(normed)  square = Mul(y, y)  cube = Mul(square, y)  loss = ReduceSum<keepdims = 0>(cube) }""",
    _bodies,
    {"x": (3, 4), "w": (4, 4), "b": (4,), "scale": (4,)},
    {},
    ("x",),
    float64=False,
)
"""Of ops that are differentiated through what they are in standard ops."""


def _scanned(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.sin(t["x"] * t["w"])
    return y, (y * y).sum()


SCAN = Net(
    """(T[n, 3] x, T[3] w) => (T[n, 3] y, T[] loss) {
        y = Scan<num_scan_inputs = 1, body = body (T[] row) => (T[] result) {
            p = Mul(row, w)  result = Sin(p) }>(x)
        square = Mul(y, y)  loss = ReduceSum<keepdims = 0>(square) }""",
    _scanned,
    {"x": (3, 3), "w": (3,)},
    {},
    ("x",),
)
"""Without a state, and without a shape in its body."""


def _mapped(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.stack([torch.sin(t["x"] * t["w"] * (k + 1)) for k in range(2)]).sum(0)
    return y, (y * y).sum()


MAP = Net(
    """(T[n, 3] x, T[3] w) => (T[n, 3] y, T[] loss) <int64 trips = {2}, int64[1] first = {0}, int64 one = {1}> {
        stack = Loop <body = body (int64 i, bool go) => (bool going, T[n, 3] result) {
            going = Identity(go)  k = Add(i, one)  f = CastLike(k, x)  p = Mul(x, w)  q = Mul(p, f)  result = Sin(q)
        }>(trips, "")
        y = ReduceSum<keepdims = 0>(stack, first)
        square = Mul(y, y)  loss = ReduceSum<keepdims = 0>(square) }""",
    _mapped,
    {"x": (3, 3), "w": (3,)},
    {},
    ("x",),
)
"""A Loop that keeps no state, and has no condition."""

NETS = {
    "mlp": MLP,
    "conv": CONV,
    "attention": ATTENTION,
    "loop": LOOP,
    "bodies": BODIES,
    "scan": SCAN,
    "map": MAP,
}
