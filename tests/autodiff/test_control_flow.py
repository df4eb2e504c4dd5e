"""If, Loop and Scan: values and gradients beside the same computation in PyTorch, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from onnxtrain import differentiate
from onnxtrain.errors import NoGradientRule
from onnxtrain.runtime.device import parse_device
from onnxtrain.runtime.session import open_session
from runtimes import computes_float64
from training_run import Run

Array = np.ndarray


@dataclass(frozen=True)
class Flow:
    """A model `y` of some inputs, its twin in PyTorch, and what to call them with."""

    name: str
    model: str
    twin: Callable[..., torch.Tensor]
    wrt: Sequence[str]
    feeds: Sequence[dict[str, Array]]


def _inputs(**more: Any) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    values = {"x": rng.normal(size=(4, 3)), "w": rng.normal(size=(3, 3)), "v": rng.normal(size=3)}
    return values | {name: np.asarray(value) for name, value in more.items()}


def _branches(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, c: bool) -> torch.Tensor:
    a, b = (torch.tanh(x @ w), x.sum(0)) if c else (x * v, (v * v).exp())
    return (a * a).sum() + (b * x).sum()


def _iterated(
    x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, trips: int, most: float = 1e9
) -> torch.Tensor:
    state, count, slices = x, 0, x.new_zeros(())
    for i in range(int(trips)):
        state = torch.tanh(state @ w) + v * i
        slices = slices + (state * state * (i + 1)).sum()
        count += 2
        if state.abs().sum() > most:
            break
    return (state * v).sum() * (1 + count) + slices


def _recurrence(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    state, outputs, doubled = v, [], []
    for row in x:
        state = torch.sigmoid(state @ w + row)
        outputs.append(state * row)
        doubled.append(row * 2)
    both = (torch.stack(outputs) * x).sum() if outputs else 0.0
    return both + (state * state).sum() + (torch.stack(doubled) * x).sum()


LOOP = """
    k = Constant<value_int = 2>()  zero = Constant<value_int = 0>()
    state, count, slices = Loop (trips, {condition}, x, zero) <body = b (int64 i, bool c, {state} s, int64 n) =>
        (bool go, {state} t, int64 m, double[4, 3] out) {{
            product = MatMul(s, w)  u = Tanh(product)  at = CastLike(i, v)  shift = Mul(v, at)  t = Add(u, shift)
            m = Add(n, k)  one = Constant<value_int = 1>()  j = Add(i, one)  weight = CastLike(j, v)
            square = Mul(t, t)  out = Mul(square, weight)
            {go}
        }}>
    scaled = Mul(state, v)  first = ReduceSum<keepdims = 0>(scaled)  also = CastLike(count, v)
    unit = Constant<value_float = 1.0>()  wide = CastLike(unit, v)  factor = Add(also, wide)
    both = Mul(first, factor)  total = ReduceSum<keepdims = 0>(slices)  y = Add(both, total)
"""

FLOWS = [
    Flow(
        "If",
        """g (double[n, 3] x, double[3, 3] w, double[3] v, bool c) => (double y) {
            a, b = If (c) <
              then_branch = t () => (double[n, 3] a1, double[m] b1) {
                  p = MatMul(x, w)  a1 = Tanh(p)  zero = Constant<value_ints = [0]>()
                  b1 = ReduceSum<keepdims = 0>(x, zero) },
              else_branch = e () => (double[n, 3] a2, double[m] b2) { a2 = Mul(x, v)  q = Mul(v, v)  b2 = Exp(q) }>
            aa = Mul(a, a)  bx = Mul(b, x)  s = ReduceSum<keepdims = 0>(aa)  r = ReduceSum<keepdims = 0>(bx)
            y = Add(s, r)
        }""",
        _branches,
        ["x", "w", "v"],
        [_inputs(c=True), _inputs(c=False)],
    ),
    Flow(
        "If in If",
        """g (double[n, 3] x, double[3] v, bool c, bool d) => (double y) {
            a = If (c) <
              then_branch = t () => (double[n, 3] a1) {
                  k = Mul(x, v)
                  a1 = If (d) <then_branch = tt () => (double[n, 3] a3) { a3 = Mul(k, k) },
                               else_branch = te () => (double[n, 3] a4) { a4 = Add(k, v) }> },
              else_branch = e () => (double[n, 3] a2) { a2 = Identity(x) }>
            y = ReduceSum<keepdims = 0>(a)
        }""",
        lambda x, v, c, d, **_: ((x * v) ** 2 if d else x * v + v).sum() if c else x.sum(),
        ["x", "v"],
        [_inputs(c=c, d=d) for c in (True, False) for d in (True, False)],
    ),
    Flow(
        "Loop of a number of iterations",
        "g (double[n, 3] x, double[3, 3] w, double[3] v, int64 trips) => (double y) {"
        + LOOP.format(condition="", state="double[n, 3]", go="go = Identity(c)")
        + "}",
        _iterated,
        ["x", "w", "v"],
        [_inputs(trips=k) for k in (0, 1, 3)],
    ),
    Flow(
        "Loop until a condition",
        "g (double[n, 3] x, double[3, 3] w, double[3] v, int64 trips, double most) => (double y) {"
        "start = Constant<value = bool {1}>()"
        + LOOP.format(
            condition="start",
            state="double",
            go="size = Abs(t)  sum = ReduceSum<keepdims = 0>(size)  over = Greater(sum, most)  go = Not(over)",
        ).replace("double s,", "double[n, 3] s,").replace("double t,", "double[n, 3] t,")
        + "}",
        _iterated,
        ["x", "w", "v"],
        [_inputs(trips=9, most=most) for most in (0.0, 14.0, 1e9)],
    ),
    Flow(
        "Scan",
        """g (double[n, 3] x, double[3, 3] w, double[3] v) => (double y) {
            state, outs, doubles = Scan <num_scan_inputs = 1, body = b (double[3] s, double[3] row) =>
                (double[3] t, double[3] out, double[3] twice) {
                    p = MatMul(s, w)  q = Add(p, row)  t = Sigmoid(q)  out = Mul(t, row)  twice = Add(row, row)
                }> (v, x)
            a = Mul(outs, x)  b0 = Mul(state, state)  c0 = Mul(doubles, x)
            d = ReduceSum<keepdims = 0>(a)  e = ReduceSum<keepdims = 0>(b0)  f = ReduceSum<keepdims = 0>(c0)
            y = Sum(d, e, f)
        }""",
        lambda x, w, v, **_: _recurrence(x, w, v),
        ["x", "w", "v"],
        [_inputs(), _inputs(x=np.random.default_rng(1).normal(size=(1, 3)))],
    ),
    Flow(
        "Scan whose body reads what it scans",
        """g (double[n, 3] x, double[3] v) => (double y) {
            outs = Scan <num_scan_inputs = 1, body = b (double[] row) => (double[3] out) {
                m = ReduceSum<keepdims = 0>(x)  a = Mul(row, v)  out = Mul(a, m) }> (x)
            y = ReduceSum<keepdims = 0>(outs)
        }""",
        lambda x, v, **_: (x * v * x.sum()).sum(),
        ["x", "v"],
        [_inputs()],
    ),
    Flow(
        "Scan with axes that its body adds",
        """g (double[n, 3] x, double[3] v) => (double y) {
            start = Constant<value = double[3, 3] {0, 0, 0, 0, 0, 0, 0, 0, 0}>()
            last, outs = Scan <num_scan_inputs = 1, body = b (double[3, 3] s, double[3] row) =>
              (double[3, 3] t, double[3] o) {
                zero = Constant<value_ints = [0]>()  one = Constant<value_ints = [1]>()
                column = Unsqueeze(row, one)  line = Unsqueeze(v, zero)  outer = MatMul(column, line)  t = Add(s, outer)
                wide = Unsqueeze(row, zero)  read = MatMul(wide, t)  o = Squeeze(read, zero) }> (start, x)
            y = ReduceSum<keepdims = 0>(outs)
        }""",
        lambda x, v, **_: _linear_attention(x, v).sum(),
        ["x", "v"],
        [_inputs()],
    ),
    Flow(
        "If with results of other ranks",
        """g (double[n, 3] x, double[3] v, bool c) => (double y) {
            a = If (c) <then_branch = t () => (double[] a1) { a1 = Mul(x, v) },
                        else_branch = e () => (double a2) { p = Mul(x, v)  a2 = ReduceSum<keepdims = 0>(p) }>
            b = Sin(a)  d = Mul(b, v)  y = ReduceSum<keepdims = 0>(d)
        }""",
        lambda x, v, c, **_: (torch.sin(x * v if c else (x * v).sum()) * v).sum(),
        ["x", "v"],
        [_inputs(c=c) for c in (True, False)],
    ),
    Flow(
        "Dropout that is off in a Loop",
        """g (double[n, 3] x, double[3] v, int64 trips) => (double y) {
            h = Loop (trips, , x) <body = b (int64 i, bool c, double[n, 3] s) => (bool go, double[n, 3] t) {
                go = Identity(c)  ratio = Constant<value = double {0.5}>()  off = Constant<value = bool {0}>()
                d = Dropout(s, ratio, off)  p = Mul(d, v)  t = Sin(p) }>
            y = ReduceSum<keepdims = 0>(h)
        }""",
        lambda x, v, **_: torch.sin(torch.sin(x * v) * v).sum(),
        ["x", "v"],
        [_inputs(trips=2)],
    ),
    Flow(
        "Scan backwards along other axes",
        """g (double[3, n] x, double[3, 3] w, double[3] v) => (double y) {
            state, outs, doubles = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1],
                scan_output_axes = [1, 0], scan_output_directions = [1, 1], body = b (double[3] s, double[3] row) =>
                (double[3] t, double[3] out, double[3] twice) {
                    p = MatMul(s, w)  q = Add(p, row)  t = Sigmoid(q)  out = Mul(t, row)  twice = Add(row, row)
                }> (v, x)
            a = Mul(outs, x)  b0 = Mul(state, state)  xt = Transpose<perm = [1, 0]>(x)  c0 = Mul(doubles, xt)
            d = ReduceSum<keepdims = 0>(a)  e = ReduceSum<keepdims = 0>(b0)  f = ReduceSum<keepdims = 0>(c0)
            y = Sum(d, e, f)
        }""",
        lambda x, w, v, **_: _recurrence(x.T.flip(0), w, v),
        ["x", "w", "v"],
        [_inputs(x=np.random.default_rng(1).normal(size=(3, n))) for n in (1, 4)],
    ),
    Flow(
        "If in Loop",
        """g (double[n, 3] x, double[3] v, int64 trips) => (double y) {
            h = Loop (trips, , x) <body = b (int64 i, bool c, double[n, 3] s) => (bool go, double[n, 3] t) {
                go = Identity(c)  two = Constant<value_int = 2>()  zero = Constant<value_int = 0>()
                rest = Mod(i, two)  even = Equal(rest, zero)
                t = If (even) <then_branch = a () => (double[n, 3] t1) { t1 = Mul(s, v) },
                               else_branch = e () => (double[n, 3] t2) { t2 = Sin(s) }> }>
            y = ReduceSum<keepdims = 0>(h)
        }""",
        lambda x, v, trips, **_: _alternating(x, v, int(trips)).sum(),
        ["x", "v"],
        [_inputs(trips=k) for k in (0, 1, 4)],
    ),
    Flow(
        "Loop in Loop",
        """g (double[n, 3] x, double[3] v, int64 trips) => (double y) {
            h = Loop (trips, , x) <body = b (int64 i, bool c, double[n, 3] s) => (bool go, double[n, 3] t) {
                go = Identity(c)
                t = Loop (i, , s) <body = bb (int64 j, bool cc, double[n, 3] ss) => (bool gg, double[n, 3] tt) {
                    gg = Identity(cc)  p = Mul(ss, v)  tt = Sin(p) }> }>
            y = ReduceSum<keepdims = 0>(h)
        }""",
        lambda x, v, trips, **_: _nested(x, v, int(trips)).sum(),
        ["x", "v"],
        [_inputs(trips=k) for k in (1, 4)],
    ),
]  # fmt: skip


def _linear_attention(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.stack([row @ (x[: i + 1].sum(0)[:, None] * v) for i, row in enumerate(x)])


def _alternating(x: torch.Tensor, v: torch.Tensor, trips: int) -> torch.Tensor:
    for i in range(trips):
        x = torch.sin(x) if i % 2 else x * v
    return x


def _nested(x: torch.Tensor, v: torch.Tensor, trips: int) -> torch.Tensor:
    for _ in range(sum(range(trips))):
        x = torch.sin(x * v)
    return x


def _model(flow: Flow) -> onnx.ModelProto:
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]>\n' + flow.model)
    onnx.checker.check_model(model, full_check=True)
    return model


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    onnx.checker.check_model(model, full_check=True)
    if "= Cos" in onnx.printer.to_text(model) and not computes_float64("Cos"):
        pytest.skip(f"onnxruntime {ort.__version__} has no Cos of float64")
    return open_session(model.SerializeToString(), "model", parse_device("cpu"), None)


def _fed(feeds: dict[str, Array], session: ort.InferenceSession) -> dict[str, Array]:
    return {value.name: feeds[value.name] for value in session.get_inputs() if value.name in feeds}


def _tensors(flow: Flow, feeds: dict[str, Array]) -> dict[str, Any]:
    return {
        name: torch.tensor(value, requires_grad=name in flow.wrt) if value.ndim else value.item()
        for name, value in feeds.items()
    }


each_flow = pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)


@each_flow
def test_values_and_gradients_match_torch(flow: Flow) -> None:
    session = _session(differentiate(_model(flow), "y", list(flow.wrt)))
    for feeds in flow.feeds:
        tensors = _tensors(flow, feeds)
        value = flow.twin(**tensors)
        leaves = [tensors[name] for name in flow.wrt]
        expected = torch.autograd.grad(value, leaves, allow_unused=True)
        got, *gradients = session.run(None, _fed(feeds, session))
        np.testing.assert_allclose(got, value.detach(), rtol=1e-12)
        for name, gradient, want in zip(flow.wrt, gradients, expected, strict=True):
            want = np.zeros_like(feeds[name]) if want is None else want.numpy()
            assert gradient.shape == want.shape
            np.testing.assert_allclose(gradient, want, rtol=1e-10, atol=1e-12, err_msg=f"{name} for {feeds}")


@each_flow
def test_the_gradient_can_be_differentiated_again(flow: Flow) -> None:
    first = differentiate(_model(flow), "y", ["x"], cotangent=None)
    direction = onnx.helper.make_tensor_value_info("direction", onnx.TensorProto.DOUBLE, None)
    shape = next(value.type.tensor_type.shape for value in first.graph.input if value.name == "x")
    direction.type.tensor_type.shape.CopyFrom(shape)
    first.graph.input.append(direction)
    first.graph.node.append(onnx.helper.make_node("Mul", ["x_grad", "direction"], ["products"]))
    first.graph.node.append(onnx.helper.make_node("ReduceSum", ["products"], ["slope"], keepdims=0))
    session = _session(differentiate(first, "slope", list(flow.wrt)))
    for feeds in flow.feeds:
        along = np.random.default_rng(5).normal(size=feeds["x"].shape)
        tensors = _tensors(flow, feeds)
        (gradient,) = torch.autograd.grad(flow.twin(**tensors), tensors["x"], create_graph=True)
        leaves = [tensors[name] for name in flow.wrt]
        slope = (gradient * torch.tensor(along)).sum()
        expected = [None] * len(leaves)
        if slope.requires_grad:
            expected = torch.autograd.grad(slope, leaves, allow_unused=True)
        names = [value.name for value in session.get_outputs()][-len(flow.wrt) :]
        results = session.run(names, _fed(feeds, session) | {"direction": along})
        for name, got, want in zip(flow.wrt, results, expected, strict=True):
            want = np.zeros_like(feeds[name]) if want is None else want.numpy()
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11, err_msg=name)


def test_the_rank_of_a_loss_behind_branches_chosen_by_a_parameter() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[3] x) => (float y) <float[3] w = {1, 2, 3}> {
            zero = Constant<value_float = 0.0>()  total = ReduceSum<keepdims = 0>(w)  c = Greater(total, zero)
            a = If (c) <then_branch = t () => (float[] a1) { a1 = Mul(x, w) },
                        else_branch = e () => (float[] a2) { a2 = ReduceSum<keepdims = 0>(x) }>
            b = Identity(a)  s = ReduceSum<keepdims = 0>(b)  y = Sum(s, zero) }""")
    session = ort.InferenceSession(differentiate(model, "y", ["x", "w"]).SerializeToString())
    x = np.array([4, 5, 6], np.float32)
    for gradient, want in zip(session.run(["x_grad", "w_grad"], {"x": x}), ([1, 2, 3], x), strict=True):
        np.testing.assert_array_equal(gradient, want)


def test_the_rank_that_a_loop_tells_of_the_branch_that_is_taken() -> None:
    """The other branch has another rank; only shape inference finds that of the cotangent."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (double[p, q] x, double[n] z, bool c) => (double y) <double[2] start = {0, 0}> {
            a = If (c) <then_branch = t () => (double[p, q] a1) { a1 = Sin(x) },
                        else_branch = e () => (double[n] a2) { a2 = Exp(z) }>
            last, parts = Scan <num_scan_inputs = 1, scan_input_axes = [1], body = b (double[2] s, double[2] row) =>
                (double[2] t, double[2] square) { square = Mul(row, row)  t = Add(s, square) }> (start, a)
            y = ReduceSum<keepdims = 0>(parts) }""")
    gradients = differentiate(model, "y", ["x", "z"])
    onnx.shape_inference.infer_shapes(gradients, check_type=True, strict_mode=True, data_prop=True)
    x = np.random.default_rng(3).normal(size=(2, 3))
    leaf = torch.tensor(x, requires_grad=True)
    leaf.sin().square().sum().backward()
    feeds = {"x": x, "z": np.ones(4), "c": np.array(True)}
    got, other = _session(gradients).run(["x_grad", "z_grad"], feeds)
    np.testing.assert_allclose(got, leaf.grad, rtol=1e-12)
    np.testing.assert_array_equal(other, np.zeros(4))


def test_the_size_that_a_reader_declares_of_the_branch_that_is_taken() -> None:
    """The other branch gives another size, which only shape inference of the gradient finds, behind a Loop."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (double[2] x, double[3] z, bool c, int64 trips) => (double y) <bool yes = {1}> {
            l = Loop (trips, yes, x) <body = b (int64 i, bool g, double[] s) => (bool h, double[] t) {
                h = Identity(g)  t = Sin(s) }>
            a = If (c) <then_branch = t () => (double[2] a1) { a1 = Sin(l) },
                        else_branch = e () => (double[3] a2) { a2 = Sin(z) }>
            k = If (yes) <then_branch = t2 () => (double[3] k1) { k1 = Sin(a) },
                          else_branch = e2 () => (double[3] k2) { k2 = Identity(z) }>
            y = ReduceSum<keepdims = 0>(k) }""")
    gradients = differentiate(model, "y", ["x", "z"])
    onnx.shape_inference.infer_shapes(gradients, check_type=True, strict_mode=True, data_prop=True)
    leaf = torch.tensor([0.5, 1.0, -2.0], dtype=torch.float64, requires_grad=True)
    leaf.sin().sin().sum().backward()
    feeds = {"x": np.ones(2), "z": leaf.detach().numpy(), "c": np.array(False), "trips": np.array(2)}
    other, got = _session(gradients).run(["x_grad", "z_grad"], feeds)
    np.testing.assert_allclose(got, leaf.grad, rtol=1e-12)
    np.testing.assert_array_equal(other, np.zeros(2))


def test_random_numbers_in_a_branch_are_refused() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[3] x, bool c) => (float y) {
            a = If (c) <then_branch = t () => (float[3] a1) { r = RandomNormalLike(x)  a1 = Mul(x, r) },
                        else_branch = e () => (float[3] a2) { a2 = Identity(x) }>
            y = ReduceSum<keepdims = 0>(a) }""")
    with pytest.raises(NoGradientRule, match="branch or loop with RandomNormalLike"):
        differentiate(model, "y", ["x"])


@pytest.mark.parametrize("taken", [True, False])
def test_a_model_with_branches_trains_as_in_torch(tmp_path: Path, taken: bool) -> None:
    """One weight is an initializer of a branch, the other one of the graph around it."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 17]>
        g (float[n, 3] x, bool c) => (float[n, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> {
            y = If (c) <then_branch = t () => (float[n, 2] a) { a = MatMul(x, w) },
                        else_branch = e () => (float[n, 2] b) <float[3, 2] u = {1, 1, 1, 1, 1, 1}> {
                            h = Tanh(x)  b = MatMul(h, u) }> }""")
    run = Run.generate(tmp_path, model, loss="mse", optimizer="sgd")
    run.optimizer.set_learning_rate(0.1)
    w = torch.arange(1.0, 7.0).reshape(3, 2).requires_grad_()
    u = torch.ones(3, 2, requires_grad=True)
    sgd = torch.optim.SGD([w, u], lr=0.1)
    rng = np.random.default_rng(0)
    for _ in range(5):
        x, target = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 3), (4, 2)))
        t = torch.tensor(x)
        loss = torch.nn.functional.mse_loss(t @ w if taken else torch.tanh(t) @ u, torch.tensor(target))
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        assert run.step(x, np.array(taken), target) == pytest.approx(loss.item(), rel=1e-5)
    for name, expected in (("w", w), ("u", u)):
        got = run.state.parameters[name].data
        np.testing.assert_allclose(got, expected.detach(), rtol=1e-5, err_msg=name)
