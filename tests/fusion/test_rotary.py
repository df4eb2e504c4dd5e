"""Rotary position embeddings, as exporters write them, become one op, with one for the gradient."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from fusion.rewriting import feeds_of, ops, rewritten, with_gradients
from onnxtrain.fusion import FUSIONS, FusionPass
from onnxtrain.passes import canonicalize, load_model, to_proto
from onnxtrain.runtime.kernels import register_kernels
from passes._models import run
from tolerances import norm_relative_error

SPLIT = "low, high = Split<axis = -1, num_outputs = 2>(x)"
SIZED = "halves = Constant<value_ints = [4, 4]>()  low, high = Split<axis = 3>(x, halves)"
SLICE = """begin = Constant<value_ints = [0]>()  half = Constant<value_ints = [4]>()  one = Constant<value_ints = [1]>()
    end = Constant<value_ints = [9223372036854775807]>()  last = Constant<value_ints = [AXIS]>()
    low = Slice(x, begin, half, last, one)  high = Slice(x, half, end, last, one)"""
REST = """minus = Neg(high)  turned = Concat<axis = -1>(minus, low)
    a = Mul(x, cos)  b = Mul(turned, sin)  y = Add(a, b)"""
X, ANGLES = "batch, 3, length, 8", "length, 8"


def graph(halves: str = SPLIT, rest: str = REST, x: str = X, angles: str = ANGLES) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[{x}] x, float[{angles}] cos, float[{angles}] sin) => (float[{x}] y) {{ {halves}  {rest} }}"""
    )


SIZES = {"batch": 2, "length": 5}

FOUND = {
    "parts": graph(),
    "parts of given sizes": graph(SIZED),
    "slices": graph(SLICE.replace("AXIS", "-1")),
    "slices of the fourth axis": graph(SLICE.replace("AXIS", "3")),
    "factors in another order": graph(
        rest=REST.replace("(x, cos)", "(cos, x)").replace("(turned, sin)", "(sin, turned)")
    ),
    "terms in another order": graph(rest=REST.replace("Add(a, b)", "Add(b, a)")),
    "angles for each batch element": graph(angles="batch, 1, length, 8"),
    "heads after positions": graph(x="batch, length, 3, 8", angles="1, length, 1, 8"),
    "angles of the shape of x": graph(angles=X),
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_rotation_becomes_one_op(kind: str) -> None:
    """With the values and gradients of the model that is not fused, on a stock runtime and by the kernels."""
    proto, wrt = FOUND[kind], ["x", "cos", "sin"]
    model = rewritten(proto, FusionPass(FUSIONS))
    assert set(ops(model)) == {"Rotary_float"}
    plain = canonicalize(load_model(proto))
    pulled = feeds_of(proto, SIZES)
    pulled["ct"] = np.random.default_rng(1).standard_normal(pulled["x"].shape).astype(np.float32)
    fused = with_gradients(model, wrt)
    assert "RotaryGradient_float" in {node.op_type for node in fused.graph.node}
    want = run(with_gradients(plain, wrt), pulled)
    options = ort.SessionOptions()
    register_kernels(options)
    session = ort.InferenceSession(fused.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for results in (run(fused, pulled), session.run(None, pulled)):
        for own, reference in zip(results, want, strict=True):
            assert norm_relative_error(own, reference) <= 1e-6


OTHERS = {
    "halves exchanged": graph(SPLIT.replace("low, high", "high, low")),
    "halves of another tensor": graph(SPLIT.replace("(x)", "(sin)"), angles=X),
    "the same half twice": graph(
        SLICE.replace("AXIS", "-1").replace("Slice(x, half, end, ", "Slice(x, begin, half, ")
    ),
    "another axis": graph(SPLIT.replace("-1", "1"), REST.replace("-1", "1"), x="batch, 4, length, 8"),
    "one angle for each row": graph(angles="length, 1"),
    "cos and sin of two shapes": graph(
        rest=REST.replace("(turned, sin)", "(turned, row)"),
        halves=SPLIT
        + """
        third = Constant<value_ints = [0]>()  row = ReduceSum<keepdims = 0>(sin, third)""",
    ),
    "a term that others read": graph(rest=REST.replace("y = Add(a, b)", "d = Add(a, b)  y = Mul(d, b)")),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_computations_stay(kind: str) -> None:
    assert "Rotary_float" not in ops(rewritten(OTHERS[kind], FusionPass(FUSIONS)))


def test_angles_that_repeat_x_stay() -> None:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[5, 8] x, float[3, 5, 8] cos, float[3, 5, 8] sin) => (float[3, 5, 8] y) {{ {SPLIT}  {REST} }}"""
    )
    assert "Rotary_float" not in ops(rewritten(proto, FusionPass(FUSIONS)))


def test_other_dtypes_stay() -> None:
    text = onnx.printer.to_text(graph()).replace("float[", "double[")
    assert "Rotary" not in str(ops(rewritten(onnx.parser.parse_model(text), FusionPass(FUSIONS))))


def test_halves_that_others_read_are_kept() -> None:
    proto = graph(
        rest=REST.replace("y = Add(a, b)", "d = Add(a, b)  e = Concat<axis = -1>(high, low)  y = Sub(d, e)")
    )
    model = rewritten(proto, FusionPass(FUSIONS))
    assert "Rotary_float" in ops(model)
    feeds = feeds_of(proto, SIZES)
    want = run(to_proto(canonicalize(load_model(proto))), feeds)[0]
    assert norm_relative_error(run(to_proto(model), feeds)[0], want) <= 1e-6
