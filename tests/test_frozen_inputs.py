"""The value that a frozen parameter has on the device counts in loss and gradient, not its value at build time.

Every case sets the parameter `p`, which nobody trains, and compares with PyTorch computing with the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as fn
from onnx import numpy_helper

from onnxtrain import CheckpointState, Module, generate_artifacts, onnxblock
from onnxtrain.autodiff import differentiate
from tolerances import NORM_RELATIVE, norm_relative_error

X = np.random.default_rng(0).uniform(0.2, 2.0, (2, 3, 4, 4)).astype(np.float32)
W = np.random.default_rng(1).uniform(0.5, 1.5, (3, 1, 1)).astype(np.float32)
EXTRA = {
    "scale": np.array([0.5, 2.0, 1.5], np.float32),
    "bias": np.array([0.1, -0.2, 0.3], np.float32),
    "mean": np.array([0.3, 0.2, 0.1], np.float32),
    "table": np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32),
    "gain": np.random.default_rng(3).normal(size=4).astype(np.float32),
}

Twin = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """`nodes` compute b from a = x * w and p; p is built with the first of `values` and set to each of them.

    Where the first is `random`, it is not: Dropout would drop other elements than PyTorch's.
    """

    nodes: str
    values: tuple[object, ...]
    twin: Twin
    dtype: type = np.float32
    random: bool = False


def index(p: torch.Tensor) -> torch.Tensor:
    return p.to(torch.int64)


def rms(a: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return a / torch.sqrt((a * a).mean(-1, keepdim=True) + p) * torch.tensor(EXTRA["gain"])


CASES = {
    "Pow": Case("b = Pow(a, p)", (2.0, 3.0, 0.5, 1.0, 0.0, -1.5), lambda a, p: a**p),
    "Pow by integers": Case("b = Pow(a, p)", (2, 3, 0), lambda a, p: a**p, np.int64),
    "Dropout": Case(
        "t = Constant<value = bool {1}>()  b, k = Dropout(a, p, t)", (0.5, 0.0), lambda a, p: a, random=True
    ),
    "Dropout's mode": Case(
        "r = Constant<value_float = 0.0>()  b, k = Dropout(a, r, p)", (False, True), lambda a, p: a, np.bool_
    ),
    "Clip below": Case("b = Clip(a, p)", (0.0, 1.0, 5.0), lambda a, p: a.clamp(min=p)),
    "Clip above": Case("b = Clip(a, , p)", (9.0, 1.0), lambda a, p: a.clamp(max=p)),
    "Max": Case("b = Max(a, p)", (0.0, 1.0), torch.maximum),
    "Mul": Case("b = Mul(a, p)", (1.0, 0.0, -2.5), lambda a, p: a * p),
    "Mul, per channel": Case(
        "b = Mul(a, p)", (np.ones((3, 1, 1)), np.arange(3.0).reshape(3, 1, 1)), lambda a, p: a * p
    ),
    "Div": Case("b = Div(a, p)", (1.0, 4.0), lambda a, p: a / p),
    "Add of zero": Case("c = Add(a, p)  b = Mul(c, c)", (0.0, 2.0), lambda a, p: (a + p) ** 2),
    "Where": Case("n = Neg(a)  b = Where(p, a, n)", (True, False), lambda a, p: a if p else -a, np.bool_),
    "PRelu": Case(
        "m = Constant<value_float = 1.0>()  c = Sub(a, m)  b = PRelu(c, p)",
        (np.zeros((3, 1, 1)), np.full((3, 1, 1), 0.5)), lambda a, p: fn.prelu(a - 1, p.reshape(3)),
    ),
    "RMSNorm's epsilon": Case(
        "q = Mul(a, a)  l = Constant<value_ints = [-1]>()  m = ReduceMean(q, l)  s = Add(m, p)  r = Sqrt(s)"
        "  d = Div(a, r)  b = Mul(d, gain)",
        (0.1, 0.9),
        rms,
    ),
    "BatchNormalization's variance": Case(
        "b = BatchNormalization(a, scale, bias, mean, p)",
        (np.ones(3), np.array([0.5, 4.0, 9.0])),
        lambda a, p: fn.batch_norm(
            a, *(torch.tensor(EXTRA[k]) if k != "p" else p for k in ("mean", "p", "scale", "bias"))
        ),
    ),
    "Pad's value": Case(
        "n = Constant<value_ints = [0, 0, 1, 1, 0, 0, 1, 1]>()  c = Pad(a, n, p)  b = Mul(c, c)", (0.0, 3.0),
        lambda a, p: fn.pad(a, (1, 1, 1, 1), value=p.item()) ** 2,
    ),
    "Pad's places": Case(
        "c = Pad(a, p)  d = ReduceMean<keepdims = 1>(c)  b = Mul(a, d)", ([0] * 8, [0, 0, 1, 0, 0, 0, 0, 3]),
        lambda a, p: a * fn.pad(a, (int(p[3]), int(p[7]), int(p[2]), int(p[6]))).mean(), np.int64,
    ),
    "Resize, nearest": Case(
        'c = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">'
        "(a, , p)  m = ReduceMean<keepdims = 1>(c)  b = Mul(c, m)",
        ([1, 1, 2, 2], [1, 1, 3, 2], [1, 1, 1, 1]),
        lambda a, p: (r := fn.interpolate(a, scale_factor=p[2:].tolist(), mode="nearest")) * r.mean(),
    ),
    "Resize, linear": Case(
        'c = Resize<mode = "linear">(a, , p)  b = Mul(c, c)', ([1, 1, 1, 1], [1, 1, 2, 2]), lambda a,
        p: fn.interpolate(a, scale_factor=p[2:].tolist(), mode="bilinear") ** 2,
    ),
    "Gather, index used twice": Case(
        "o = Constant<value_ints = [1]>()  q = Add(p, o)  c = Gather<axis = 1>(a, p)  d = Gather<axis = 1>(a, q)"
        "  b = Mul(c, d)",
        ([0], [1]),
        lambda a, p: a[:, index(p)] * a[:, index(p) + 1],
        np.int64,
    ),
    "Slice": Case(
        "e = Constant<value_ints = [4]>()  n = Constant<value_ints = [2]>()  c = Slice(a, p, e, n)"
        "  m = ReduceMean<keepdims = 1>(c)  b = Mul(a, m)",
        ([0], [3], [1]),
        lambda a, p: a * a[:, :, int(p) :].mean(),
        np.int64,
    ),
    "ReduceSum's axes": Case(
        "c = ReduceSum<keepdims = 1>(a, p)  b = Mul(c, c)", ([1], [2]), lambda a, p: a.sum(int(p), True) ** 2,
        np.int64,
    ),
    "TopK": Case(
        "c, i = TopK(a, p)  b = Mul(c, c)", ([4], [1]), lambda a, p: a.topk(int(p), -1).values ** 2, np.int64
    ),
    "Tile": Case(
        "c = Tile(a, p)  m = ReduceSum<keepdims = 1>(c)  b = Mul(a, m)", ([1, 1, 1, 1], [1, 1, 2, 3]),
        lambda a, p: a * a.repeat(*p.tolist()).sum(), np.int64,
    ),
    "Expand": Case(
        "c = Expand(a, p)  b = Mul(c, c)", ([1, 1, 1, 1, 1], [2, 1, 1, 1, 1]), lambda a,
        p: a.expand(int(p[0]), *a.shape) ** 2, np.int64,
    ),
    "Reshape": Case(
        "l = Constant<value_ints = [-1]>()  c = Reshape(a, p)  m = ReduceMean(c, l)  b = Mul(m, m)",
        ([2, -1], [8, -1]), lambda a, p: a.reshape(*p.tolist()).mean(-1) ** 2, np.int64,
    ),
    "OneHot's values": Case(
        "d = Constant<value_int = 4>()  i = Constant<value_ints = [0, 1, 2, 3]>()  c = OneHot(i, d, p)"
        "  b = MatMul(a, c)",
        ([0.0, 1.0], [-1.0, 2.0]),
        lambda a, p: a @ (p[0] + (p[1] - p[0]) * torch.eye(4)),
    ),
    "DequantizeLinear": Case(
        "q = Constant<value = int8[4] {-3, 1, 2, 5}>()  c = DequantizeLinear(q, p)  b = Mul(a, c)",
        (1.0, 0.25), lambda a, p: a * torch.tensor([-3, 1, 2, 5]) * p,
    ),
    "embedded equal constant": Case(  # what deduplicates constants must not take p for one of them
        "o = Constant<value_ints = [1]>()  c = ReduceSum<keepdims = 1>(a, o)  d = ReduceSum<keepdims = 1>(c, p)"
        "  b = Mul(d, d)",
        ([1], [2]),
        lambda a, p: (a.sum(1, True).sum(int(p), True)) ** 2,
        np.int64,
    ),
}  # fmt: skip


def as_value(case: Case, value: object) -> np.ndarray:
    return np.array(value, case.dtype)


def build(case: Case, opset: int = 21) -> onnx.ModelProto:
    """A model of the trained w, the frozen p and what the case does with both."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g (float[n, 3, 4, 4] x) => (float y)'
        f"{{ a = Mul(x, w)  {case.nodes}  y = ReduceSum<keepdims = 0>(b) }}"
    )
    tensors = {"w": W, "p": as_value(case, case.values[0]), **EXTRA}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(t, n) for n, t in tensors.items() if n in read)
    return model


def expected(case: Case, value: object) -> tuple[float, np.ndarray]:
    w = torch.tensor(W, requires_grad=True)
    loss = case.twin(torch.tensor(X) * w, torch.tensor(as_value(case, value))).sum()
    loss.backward()
    assert w.grad is not None
    return loss.item(), w.grad.numpy()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_frozen_parameter_that_is_set_on_the_device_counts(tmp_path: Path, case: Case) -> None:
    generate_artifacts(build(case), requires_grad=["w"], frozen_params=["p"], artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    for value in case.values[1:] if case.random else (*case.values[1:], case.values[0]):
        state.parameters["p"].data = as_value(case, value)
        module.train()
        module.lazy_reset_grad()
        loss, gradient = module(X), state.parameters["w"].grad
        want_loss, want = expected(case, value)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
        assert norm_relative_error(gradient, want) <= NORM_RELATIVE[gradient.dtype]
        module.eval()
        np.testing.assert_allclose(module(X), want_loss, rtol=1e-5)


@pytest.mark.parametrize("name", ["Pow", "Gather, index used twice", "Resize, nearest"])
def test_so_does_one_of_a_training_block(name: str) -> None:
    case = CASES[name]

    class Step(onnxblock.TrainingBlock):
        def build(self, loss: str) -> str:
            return loss

    step = Step()
    step.requires_grad("w")
    step.requires_grad("p", False)
    with onnxblock.base(build(case)):
        step("y")
    session = ort.InferenceSession(step.to_model_proto()[0].SerializeToString())
    for value in case.values:
        loss, gradient = session.run(["y", "w_grad"], {"x": X, "w": W, "p": as_value(case, value)})
        want_loss, want = expected(case, value)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
        assert norm_relative_error(gradient, want) <= NORM_RELATIVE[gradient.dtype]


def test_a_constant_node_is_differentiated_though_all_that_follows_could_be_folded() -> None:
    """y = sum(x) * (c * 2)²: dy/dc = 8 c sum(x)."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float y) {
          c = Constant<value_float = 3.0>()  two = Constant<value_float = 2.0>()  d = Mul(c, two)  e = Mul(d, d)
          f = Mul(x, e)  y = ReduceSum<keepdims = 0>(f) }"""
    )
    session = ort.InferenceSession(differentiate(model, "y", ["c"]).SerializeToString())
    gradient = session.run(["c_grad"], {"x": np.array([1.0, 2.5], np.float32)})[0]
    np.testing.assert_allclose(gradient, 8 * 3.0 * 3.5)
