"""Gradients of loops whose iterations read rows of an outer tensor: values beside PyTorch, work linear in the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onnxtrain import differentiate
from onnxtrain.errors import DifferentiationError

Read = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Reads of `x` in iteration `i`: ONNX nodes that compute `row` from `x` and `i`, and the twin in PyTorch.

    Attributes:
        name: the test's id.
        nodes: the nodes.
        twin: the twin.
        shape: shape of `x`.
        summed: True if an accumulator of the shape of `x` is needed.
    """

    name: str
    nodes: str
    twin: Read
    shape: tuple[int, ...] = (24, 3)
    summed: bool = False


ONE = "one = Constant<value_ints = [1]>()  zero = Constant<value_ints = [0]>()  at = Unsqueeze(i, zero)  "
CASES = [
    Case("a row", "row = Gather(x, i)", lambda x, i: x[i]),
    Case("a column", "row = Gather<axis = -1>(x, i)", lambda x, i: x[:, i], (3, 24)),
    Case(
        "rows backwards",
        "minus = Constant<value_int = -1>()  j = Sub(minus, i)  row = Gather(x, j)",
        lambda x, i: x[-1 - i],
    ),
    Case(
        "the same rows again",
        "four = Constant<value_int = 4>()  j = Mod(i, four)  row = Gather(x, j)",
        lambda x, i: x[i % 4],
    ),
    Case(
        "int32 places",
        "j = Cast<to = 6>(i)  row = Gather(x, j)",
        lambda x, i: x[i],
    ),
    Case(
        "two rows at a time",
        ONE + "next = Add(at, one)  both = Concat<axis = 0>(at, next)  row = Gather(x, both)",
        lambda x, i: x[[i, i + 1]],
    ),
    Case(
        "a table of places in the middle",
        ONE
        + """pair = Constant<value = int64[2, 2] {0, 2, 3, 1}>()  places = Add(pair, at)
          row = Gather<axis = 1>(x, places)""",
        lambda x, i: x[:, torch.tensor([[0, 2], [3, 1]]) + i],
        (2, 24, 3),
    ),
    Case(
        "GatherND of elements",
        ONE + "place = Concat<axis = 0>(at, one)  row = GatherND(x, place)",
        lambda x, i: x[i, 1],
    ),
    Case(
        "GatherND of rows",
        ONE + "next = Add(at, one)  place = Concat<axis = 0>(at, next)  column = Unsqueeze(place, one)"
        "  row = GatherND(x, column)",
        lambda x, i: x[[i, i + 1]],
    ),
    Case(
        "a slice of one",
        ONE + "end = Add(at, one)  row = Slice(x, at, end, zero)",
        lambda x, i: x[i : i + 1],
    ),
    Case(
        "a window that runs over the end",
        ONE
        + """k = Constant<value_int = 3>()  two = Constant<value_int = 18>()
          begin = Add(i, two)  j = Unsqueeze(begin, zero)
          after = Add(k, begin)  end = Unsqueeze(after, zero)  read = Slice(x, j, end, one)
          row = ReduceSum<keepdims = 0>(read)""",
        lambda x, i: x[:, 18 + i : 21 + i].sum(),
        (2, 24, 3),
    ),
    Case(
        "a slice counted from the end",
        ONE
        + """minus = Constant<value_int = -9>()  begin = Add(i, minus)  j = Unsqueeze(begin, zero)
          end = Add(j, one)  read = Slice(x, j, end, zero)  row = ReduceSum<keepdims = 0>(read)""",
        lambda x, i: x[24 - 9 + i].sum() if i < 8 else 0 * x.sum(),
    ),
    Case(
        "rows and all",
        "all = ReduceMean<keepdims = 0>(x)  own = Gather(x, i)  row = Mul(all, own)",
        lambda x, i: x.mean() * x[i],
        summed=True,
    ),
    Case(
        "two rows, one of them squared",
        ONE
        + "next = Add(at, one)  a = Gather(x, next)  b = Gather(x, i)  square = Mul(b, b)  row = Add(a, square)",
        lambda x, i: x[[i + 1]] + x[i] * x[i],
    ),
    Case(
        "a place that no iteration computes",
        "k = Constant<value_int = 3>()  row = Gather(x, k)",
        lambda x, i: x[3],
        summed=True,
    ),
    Case(
        "most of the rows",
        ONE + "many = Constant<value_ints = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]>()  places = Add(at, many)"
        "  row = Gather(x, places)",
        lambda x, i: x[i : i + 10],
        summed=True,
    ),
    Case(
        "rows of an inner loop",
        """k = Constant<value_int = 3>()  zero = Constant<value_float = 0.0>()  begin = CastLike(zero, x)
        row = Loop (k, , begin) <body = inner (int64 j, bool c2, double s2) => (bool go2, double t2) {
            go2 = Identity(c2)  n = Add(i, j)  r = Gather(x, n)  q = Mul(r, r)  u = ReduceSum<keepdims = 0>(q)
            t2 = Add(s2, u) }>""",
        lambda x, i: (x[i : i + 3] ** 2).sum(),
        summed=True,
    ),
]


def model_of(case: Case, symbolic: bool, scan: bool = False) -> onnx.ModelProto:
    dims = ", ".join(f"d{k}" if symbolic else str(size) for k, size in enumerate(case.shape))
    body = f"{case.nodes}  mixed = Mul(row, s)  part = Sin(mixed)  sum = ReduceSum<keepdims = 0>(part)"
    loop = f"""end = Loop (trips, , start) <body = b (int64 i, bool c, double s) => (bool go, double t) {{
        go = Identity(c)  {body}  t = Add(s, sum) }}>"""
    if scan:
        loop = f"""first = Constant<value_int = 0>()  step = Constant<value_int = 1>()
            steps = Range(first, trips, step)
            end = Scan <num_scan_inputs = 1, body = b (double s, int64 i) => (double t) {{
                {body}  t = Add(s, sum) }}> (start, steps)"""
    text = f"g (double[{dims}] x, double start, int64 trips) => (double y) {{ {loop}  y = Mul(end, end) }}"
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')


def expected(case: Case, x: np.ndarray, trips: int) -> tuple[float, np.ndarray]:
    tensor = torch.tensor(x, requires_grad=True)
    state = torch.tensor(0.7, dtype=torch.float64)
    for i in range(trips):
        state = state + torch.sin(case.twin(tensor, i) * state).sum()
    loss = state * state
    if not trips:
        return loss.item(), np.zeros(x.shape)
    loss.backward()
    assert tensor.grad is not None
    return loss.item(), tensor.grad.numpy()


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("scan", [False, True], ids=["Loop", "Scan"])
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradient_matches_torch(case: Case, symbolic: bool, scan: bool) -> None:
    model = differentiate(model_of(case, symbolic, scan), of="y", wrt=["x"])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    x = np.random.default_rng(0).normal(size=case.shape)
    # ONNX Runtime doesn't run a Scan over nothing.
    for trips in (1, 9) if scan else (0, 1, 9):
        inputs = {"x": x, "start": np.array(0.7), "trips": np.array(trips)}
        value, gradient = session.run(["y", "x_grad"], inputs)
        loss, grad = expected(case, x, trips)
        np.testing.assert_allclose(value, loss, rtol=1e-12)
        np.testing.assert_allclose(gradient, grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_iteration_touches_all_of_the_tensor(case: Case) -> None:
    """Only where an iteration reads the whole tensor does the backward loop carry a sum of its shape."""
    model = differentiate(model_of(case, False), of="y", wrt=["x"])
    loop = [node for node in model.graph.node if node.op_type == "Loop"][-1]
    body = next(attribute.g for attribute in loop.attribute if attribute.name == "body")
    described = {value.name: value for value in (*body.input, *body.output, *body.value_info)}
    shapes = [
        tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim) for value in described.values()
    ]
    assert (case.shape in shapes) == case.summed


def test_the_gradient_can_be_differentiated_again() -> None:
    case = CASES[0]
    first = differentiate(model_of(case, False), of="y", wrt=["x"])
    tensor = torch.tensor(np.random.default_rng(0).normal(size=case.shape), requires_grad=True)
    state = torch.tensor(0.7, dtype=torch.float64)
    for i in range(5):
        state = state + torch.sin(case.twin(tensor, i) * state).sum()
    (grad,) = torch.autograd.grad(state * state, tensor, create_graph=True)
    grad.square().sum().backward()

    squares = onnx.helper.make_node("ReduceSumSquare", ["x_grad"], ["norm"], keepdims=0)
    first.graph.node.append(squares)
    first.graph.output.append(onnx.helper.make_tensor_value_info("norm", onnx.TensorProto.DOUBLE, []))
    # The first gradient is an output of its own and has its name.
    first.graph.output.remove(next(value for value in first.graph.output if value.name == "x_grad"))
    for node in first.graph.node:
        node.output[:] = ["dx" if name == "x_grad" else name for name in node.output]
        node.input[:] = ["dx" if name == "x_grad" else name for name in node.input]
    second = differentiate(first, of="norm", wrt=["x"])
    session = onnxruntime.InferenceSession(second.SerializeToString())
    inputs = {"x": tensor.detach().numpy(), "start": np.array(0.7), "trips": np.array(5)}
    assert tensor.grad is not None
    np.testing.assert_allclose(session.run(["x_grad"], inputs)[0], tensor.grad.numpy(), rtol=1e-9)


def test_half_precision_is_accumulated_in_float32() -> None:
    """4,096 times 1/4096 of a row: in float16, the sum would stop growing at a half."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float16[8, 2] x, int64 trips) => (float16 y) {
            k = Constant<value_int = 1>()
            always = Constant<value = bool {1}>()
            rows = Loop (trips, always) <body = b (int64 i, bool c) => (bool go, float16[2] row) {
                go = Identity(c)  j = Mod(i, k)  row = Gather(x, j) }>
            y = ReduceMean<keepdims = 0>(rows) }"""
    )
    trained = differentiate(model, of="y", wrt=["x"])
    session = onnxruntime.InferenceSession(trained.SerializeToString())
    (gradient,) = session.run(["x_grad"], {"x": np.ones((8, 2), np.float16), "trips": np.array(4096)})
    np.testing.assert_array_equal(gradient, np.array([[0.5, 0.5]] + [[0, 0]] * 7, np.float16))


def test_a_refused_op_behind_a_row_is_still_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (double[8, 2] x, int64 trips) => (double y) {
            always = Constant<value = bool {1}>()
            rows = Loop (trips, always) <body = b (int64 i, bool c) => (bool go, double[2] row) {
                go = Identity(c)  r = Gather(x, i)  row = Bernoulli(r) }>
            y = ReduceMean<keepdims = 0>(rows) }"""
    )
    with pytest.raises(DifferentiationError):
        differentiate(model, of="y", wrt=["x"])
