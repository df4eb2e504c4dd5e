from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest

from onnxtrain import differentiate
from onnxtrain.passes import infer_shapes, load_model, simplify_gradients, to_proto
from passes._models import normal, run


def rewritten(text: str, shapes: Mapping[str, Sequence[int]]) -> Counter[str]:
    """The ops of the rewritten model, having checked that it computes the very same."""
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]>\n' + text)
    feeds = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    model = infer_shapes(load_model(proto))
    simplify_gradients(model)
    for got, want in zip(run(to_proto(model), feeds), run(proto, feeds), strict=True):
        np.testing.assert_array_equal(got, want)
    return Counter(node.op_type for node in model.graph)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("order", ["e, x", "x, e"])
def test_ops_read_what_would_be_repeated(op: str, order: str):
    text = f"""net (float[n, 1] c, float[n, 3] x) => (float[n, 3] y) {{
        s = Shape(x)  e = Expand(c, s)  y = {op}({order}) }}"""
    assert rewritten(text, {"c": (2, 1), "x": (2, 3)})["Expand"] == 0


@pytest.mark.parametrize("order", ["e, x", "x, e"])
def test_ops_that_broadcast_both_operands(order: str):
    text = f"""net (float[n, 1] c, float[1, 3] x, float[n, 3] z) => (float[n, 3] y) {{
        s = Shape(z)  e = Expand(c, s)  y = Mul({order}) }}"""
    assert rewritten(text, {"c": (2, 1), "x": (1, 3), "z": (2, 3)})["Expand"] == 0


def test_a_number_is_multiplied_before():
    text = """net (float[n, 1] c, float[n, 3] x) => (float[n, 3] y) <float two = {2}> {
        s = Shape(x)  e = Expand(c, s)  d = Mul(e, two)  y = Mul(d, x) }"""
    assert rewritten(text, {"c": (2, 1), "x": (2, 3)}) == {"Mul": 2}


def test_an_expand_stays_for_readers_that_need_it():
    text = """net (float[n, 1] c, float[n, 3] x) => (float[n, 3] y, float[n, 3] z) {
        s = Shape(x)  e = Expand(c, s)  y = Mul(e, x)  z = Relu(e) }"""
    assert rewritten(text, {"c": (2, 1), "x": (2, 3)}) == {"Shape": 1, "Expand": 1, "Mul": 1, "Relu": 1}


def test_an_expand_stays_where_the_other_operand_does_not_have_its_shape():
    text = """net (float[1, 1] c, float[1, m] x, float[n, m] z) => (float[n, m] y) {
        s = Shape(z)  e = Expand(c, s)  y = Mul(e, x) }"""
    assert rewritten(text, {"c": (1, 1), "x": (1, 3), "z": (2, 3)})["Expand"] == 1


def test_outputs_of_the_graph_stay():
    text = """net (float[n, 1] c, float[n, 3] x) => (float[n, 3] y, float[n, 3] e) {
        s = Shape(x)  e = Expand(c, s)  y = Mul(e, x) }"""
    assert rewritten(text, {"c": (2, 1), "x": (2, 3)})["Expand"] == 1


@pytest.mark.parametrize("op", ["Where(m, e, x)", "Where(m, x, e)"])
def test_where_reads_what_would_be_repeated(op: str):
    text = f"""net (float c, float[n, 3] x) => (float[n, 3] y) <float zero = {{0}}> {{
        m = Greater(x, zero)  s = Shape(x)  e = Expand(c, s)  y = {op} }}"""
    assert rewritten(text, {"c": (), "x": (2, 3)})["Expand"] == 0


def test_where_keeps_an_expand_that_gives_the_result_its_shape():
    text = """net (float c, float[n, 3] x, float[1, 3] z) => (float[n, 3] y) <float zero = {0}> {
        m = Greater(z, zero)  s = Shape(x)  e = Expand(c, s)  y = Where(m, e, z) }"""
    assert rewritten(text, {"c": (), "x": (2, 3), "z": (1, 3)})["Expand"] == 1


def test_a_number_is_read_through_other_shapes():
    text = """net (float c, float[n] x, float[n, 3] z) => (float[n, 3] y) <int64[1] last = {1}> {
        s = Shape(x)  e = Expand(c, s)  u = Unsqueeze(e, last)  y = Mul(u, z) }"""
    assert rewritten(text, {"c": (), "x": (2,), "z": (2, 3)}) == {"Mul": 1}


def test_a_row_is_not_read_through_other_shapes():
    text = """net (float[3] c, float[n, 3] x, float[n, 3, 3] z) => (float[n, 3, 3] y) <int64[1] last = {2}> {
        s = Shape(x)  e = Expand(c, s)  u = Unsqueeze(e, last)  y = Mul(u, z) }"""
    assert rewritten(text, {"c": (3,), "x": (2, 3), "z": (2, 3, 3)})["Expand"] == 1


def test_the_mean_of_squares():
    text = """<ir_version: 10, opset_import: ["": 21]>
    net (float[n, 3] x) => (float y) { q = Mul(x, x)  y = ReduceMean<keepdims = 0>(q) }"""
    model = load_model(differentiate(onnx.parser.parse_model(text), "y", ["x"]))
    counts = Counter(node.op_type for node in model.graph)
    assert counts["Expand"] == counts["Add"] == 0
    x = normal(4, 3)
    np.testing.assert_allclose(run(to_proto(model), {"x": x})[1], x / 6, rtol=1e-6)


def test_a_mask_repeats_what_it_selects():
    text = """net (float[n, 4, 1] c, bool[4, 3] m, float[n, 4, 3] x) => (float[n, 4, 3] y) <float zero = {0}> {
        s = Shape(x)  e = Expand(c, s)  y = Where(m, zero, e) }"""
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]>\n' + text)
    feeds = {"c": normal(2, 4, 1), "m": normal(4, 3) > 0, "x": normal(2, 4, 3)}
    model = infer_shapes(load_model(proto))
    simplify_gradients(model)
    # The first axis of `c` is not repeated; the mask has the other two.
    assert "Expand" not in {node.op_type for node in model.graph}
    np.testing.assert_array_equal(run(to_proto(model), feeds)[0], run(proto, feeds)[0])


def test_an_expand_stays_where_a_mask_is_too_small():
    text = """net (float[n, 1] c, bool[3] m, float[n, 3] x, float[k, n, 3] z) => (float[k, n, 3] y) <float zero = {0}> {
        s = Shape(z)  e = Expand(c, s)  y = Where(m, zero, e) }"""
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]>\n' + text)
    model = infer_shapes(load_model(proto))
    simplify_gradients(model)
    assert "Expand" in {node.op_type for node in model.graph}
