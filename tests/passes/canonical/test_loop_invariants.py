"""Tensors that loops carry unchanged: read from outside, with the same results and gradients, in linear memory."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onnxtrain import differentiate
from onnxtrain.passes import canonicalize, load_model

LOOP = """end, again, last, rows = Loop (trips, , start, x, x) <body = b (int64 i, bool c, double s, double[n, 3] kept,
        double[n, 3] moved) => (bool go, double t, double[n, 3] same, double[n, 3] next, double[3] row) {
        go = Identity(c)  row = Gather(kept, i)  other = Gather(moved, i)  both = Mul(row, other)
        sum = ReduceSum<keepdims = 0>(both)  mixed = Sin(s)  t = Add(mixed, sum)
        copy = Identity(kept)  same = Identity(copy)  next = Mul(moved, kept) }>"""
SCAN = """end, again, last, rows = Scan <num_scan_inputs = 1, body = b (double s, double[n, 3] kept,
        double[n, 3] moved, int64 i) => (double t, double[n, 3] same, double[n, 3] next, double[3] row) {
        row = Gather(kept, i)  other = Gather(moved, i)  both = Mul(row, other)
        sum = ReduceSum<keepdims = 0>(both)  mixed = Sin(s)  t = Add(mixed, sum)
        same = Identity(kept)  next = Mul(moved, kept) }> (start, x, x, places)"""
NESTED = """end, again, rows = Loop (trips, , start, x) <body = b (int64 i, bool c, double s, double[n, 3] kept) =>
        (bool go, double t, double[n, 3] same, double[3] row) {
        go = Identity(c)  row = Gather(kept, i)  two = Constant<value_int = 2>()
        t, same = Loop (two, , s, kept) <body = inner (int64 j, bool c2, double s2, double[n, 3] kept2) =>
            (bool go2, double t2, double[n, 3] same2) {
            go2 = Identity(c2)  r = Gather(kept2, j)  sum = ReduceSum<keepdims = 0>(r)  mixed = Mul(sum, s2)
            t2 = Sin(mixed)  same2 = Identity(kept2) }> }>  last = Identity(x)"""


def model_of(loop: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        g (double[n, 3] x, double start, int64 trips) => (double y, double[n, 3] again) {{
            zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()  places = Range(zero, trips, one)
            {loop}
            a = Mul(rows, rows)  b = ReduceSum<keepdims = 0>(a)  c = Mul(again, last)
            d = ReduceSum<keepdims = 0>(c)  e = Mul(end, b)  y = Add(d, e) }}"""
    )


def expected(x: torch.Tensor, start: torch.Tensor, trips: int, nested: bool) -> torch.Tensor:
    state, moved = start, x
    for i in range(trips):
        if nested:
            for j in range(2):
                state = torch.sin(x[j].sum() * state)
        else:
            state = torch.sin(state) + (x[i] * moved[i]).sum()
            moved = moved * x
    return state * (x[:trips] ** 2).sum() + (x * moved).sum()


@pytest.mark.parametrize("trips", [0, 1, 4])
@pytest.mark.parametrize("loop", [LOOP, SCAN, NESTED], ids=["Loop", "Scan", "nested"])
def test_results_and_gradients_match_torch(loop: str, trips: int) -> None:
    if loop is SCAN and not trips:
        pytest.skip("ONNX Runtime doesn't run a Scan over nothing")
    model = differentiate(model_of(loop), of="y", wrt=["x", "start"])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    values = np.random.default_rng(0).normal(size=(5, 3))
    inputs = {"x": values, "start": np.array(0.7), "trips": np.array(trips)}
    y, again, *gradients = session.run(["y", "again", "x_grad", "start_grad"], inputs)
    x = torch.tensor(values, requires_grad=True)
    start = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    want = expected(x, start, trips, loop is NESTED)
    want.backward()
    np.testing.assert_allclose(y, want.item(), rtol=1e-12)
    np.testing.assert_array_equal(again, values)
    for got, leaf in zip(gradients, (x, start), strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(got, leaf.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loop", [LOOP, SCAN, NESTED], ids=["Loop", "Scan", "nested"])
def test_only_changed_states_are_carried(loop: str) -> None:
    model = canonicalize(load_model(model_of(loop)))
    loops = [node for node in model.graph.all_nodes() if node.op_type in ("Loop", "Scan")]
    states = [len(node.inputs) - {"Loop": 2, "Scan": 1}[node.op_type] for node in loops]
    assert states == ([1, 1] if loop is NESTED else [2])


def test_a_loop_that_only_carries_is_removed() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (double[4] x, int64 trips) => (double y) {
            end = Loop (trips, , x) <body = b (int64 i, bool c, double[4] s) => (bool go, double[4] t) {
                go = Identity(c)  t = Identity(s) }>
            y = ReduceSum<keepdims = 0>(end) }"""
    )
    assert [node.op_type for node in canonicalize(load_model(model)).graph] == ["ReduceSum"]


def test_a_detached_state_stays() -> None:
    """Each iteration but the first one reads a copy through which no gradient flows."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (double[4] x, int64 trips) => (double y) {
            true = Constant<value = bool {1}>()
            end, rows = Loop (trips, , x) <body = b (int64 i, bool c, double[4] s) =>
                (bool go, double[4] t, double[4] row) {
                go = Identity(c)  row = Mul(s, s)  t = Where(true, s, s) }>
            y = ReduceSum<keepdims = 0>(rows) }"""
    )
    session = onnxruntime.InferenceSession(differentiate(model, of="y", wrt=["x"]).SerializeToString())
    (gradient,) = session.run(["x_grad"], {"x": np.ones(4), "trips": np.array(3)})
    np.testing.assert_array_equal(gradient, [2.0, 2.0, 2.0, 2.0])
