from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from onnxtrain.passes import SharedSizesPass, infer_shapes, load_model, to_proto
from passes._models import normal, run


def rewritten(text: str, shapes: Mapping[str, Sequence[int]]) -> Counter[str]:
    """Returns the ops of the rewritten model, having checked that it computes the same bits."""
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]>\n' + text)
    feeds = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    model = infer_shapes(load_model(proto))
    SharedSizesPass()(model)
    for got, want in zip(run(to_proto(model), feeds), run(proto, feeds), strict=True):
        np.testing.assert_array_equal(got, want)
    return Counter(node.op_type for node in model.graph)


def test_sizes_of_values_with_one_shape_are_read_once():
    text = """net (float[n, 3] x, float[n, 3] z) => (float[n, 3] y) {
        a = Size(x)  b = Cast<to = 1>(a)  e = Exp(z)  c = Size(e)  d = Cast<to = 1>(c)
        f = Div(e, b)  y = Div(f, d) }"""
    assert rewritten(text, {"x": (2, 3), "z": (2, 3)}) == {"Size": 1, "Cast": 1, "Exp": 1, "Div": 2}


def test_casts_to_other_dtypes_stay():
    text = """net (float[n] x) => (float y, double z) {
        a = Size(x)  y = Cast<to = 1>(a)  e = Exp(x)  b = Size(e)  z = Cast<to = 11>(b) }"""
    assert rewritten(text, {"x": (2,)}) == {"Size": 1, "Cast": 2, "Exp": 1}


def test_other_sizes_and_parts_of_shapes_stay():
    text = """net (float[n, 3] x, float[m, 3] z) => (int64[2] a, int64[1] b, int64[1] c, int64[2] d, int64 e) {
        a = Shape(x)  b = Shape<start = 1>(x)  c = Shape<end = 1>(x)  d = Shape(z)  e = Size(x) }"""
    assert rewritten(text, {"x": (2, 3), "z": (4, 3)}) == {"Shape": 4, "Size": 1}


def test_unnamed_sizes_stay():
    text = """net (float[?] x, float[?] z) => (int64[1] u, int64[1] v) {
        a = Shape(x)  b = Shape(z)  u = Neg(a)  v = Neg(b) }"""
    assert rewritten(text, {"x": (2,), "z": (4,)})["Shape"] == 2


def test_outputs_of_the_graph_stay():
    text = """net (float[n] x) => (int64[1] a, int64[1] b) { a = Shape(x)  e = Exp(x)  b = Shape(e) }"""
    assert rewritten(text, {"x": (2,)})["Shape"] == 2
