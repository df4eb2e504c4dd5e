"""Index tensors are computed before they are expanded."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from onnxtrain.passes import LateExpandPass, infer_shapes, load_model, remove_unread_chains, to_proto
from passes._models import run


def rewritten(text: str, **feeds: np.ndarray) -> tuple[Counter[str], list[str]]:
    """Returns the ops of the rewritten model, and in their order, having checked that it computes the same."""
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]>\n' + text)
    model = infer_shapes(load_model(proto))
    LateExpandPass()(model)
    remove_unread_chains(model.graph, tuple(model.graph))
    for got, want in zip(run(to_proto(model), feeds), run(proto, feeds), strict=True):
        np.testing.assert_array_equal(got, want)
    order = [node.op_type for node in model.graph]
    return Counter(order), order


ROWS = np.array([[3], [-1], [0]])


@pytest.mark.parametrize(
    "steps",
    [
        "y = Mod(e, five)",
        "c = Cast<to = 6>(e)  y = Cast<to = 7>(c)",
        "c = Less(e, none)  a = Add(e, five)  y = Where(c, a, e)",
        "c = Less(e, none)  d = Equal(e, five)  o = Or(c, d)  n = Not(o)  y = Where(n, e, none)",
        "f = Expand(k, s)  y = Sub(e, f)",
    ],
)
def test_the_expand_comes_last(steps: str) -> None:
    text = f"""net (int64[n, 1] k, float[n, 4] x) => (int64[n, 4] z)
        <int64 five = {{5}}, int64 none = {{0}}, int64[1] one = {{1}}> {{
        s = Shape(x)  e = Expand(k, s)  {steps}  z = Abs(y) }}"""
    found, order = rewritten(text, k=ROWS, x=np.zeros((3, 4), np.float32))
    assert found["Expand"] == 1
    assert order[-2:] == ["Expand", "Abs"]


def test_an_expand_of_an_expand() -> None:
    text = """net (int64[3, 1] k) => (int64[3, 4] z) <int64[2] s = {3, 4}, int64 two = {2}> {
        e = Expand(k, s)  f = Expand(e, s)  y = Mul(f, two)  z = Abs(y) }"""
    assert rewritten(text, k=ROWS)[1] == ["Mul", "Expand", "Abs"]


def test_a_tile() -> None:
    text = """net (int64[3, 1] k) => (int64[3, 4] z) <int64[2] r = {1, 4}, int64 two = {2}> {
        e = Tile(k, r)  y = Mul(e, two)  z = Abs(y) }"""
    assert rewritten(text, k=ROWS)[1] == ["Mul", "Expand", "Abs"]


@pytest.mark.parametrize(
    "text",
    [
        # The other operand has the expanded shape.
        """net (int64[n, 1] k, int64[n, 4] x) => (int64[n, 4] z) { s = Shape(x)  e = Expand(k, s)
        y = Add(e, x)  z = Abs(y) }""",
        # The result is an output of the graph.
        """net (int64[n, 1] k, int64[n, 4] x) => (int64[n, 4] y) { s = Shape(x)  e = Expand(k, s)
        y = Neg(e) }""",
        # The result has another shape.
        """net (int64[n, 1] k, int64[2, n, 4] x) => (int64[2, n, 4] z) { s = Shape<start = 1>(x)  e = Expand(k, s)
        y = Add(e, x)  z = Abs(y) }""",
        # Rows repeat.
        """net (int64[n, 1] k, int64[n, 4] x) => (int64[p, 4] z) <int64[2] r = {2, 4}> {
        y = Tile(k, r)  z = Abs(y) }""",
        # Floats: `ImplicitExpandPass` is for these.
        """net (int64[n, 1] k, int64[n, 4] x) => (float[n, 4] z) { s = Shape(x)  f = Cast<to = 1>(k)
        e = Expand(f, s)  y = Neg(e)  z = Abs(y) }""",
    ],
)
def test_others_stay(text: str) -> None:
    feeds = {"k": ROWS} | ({"x": np.arange(12).reshape(3, 4)} if " x)" in text else {})
    if "[2, n, 4]" in text:
        feeds["x"] = np.arange(24).reshape(2, 3, 4)
    _, order = rewritten(text, **feeds)
    assert order[-2:] != ["Expand", "Abs"]
