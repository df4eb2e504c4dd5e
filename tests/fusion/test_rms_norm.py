"""Chains of ops that normalise by the root mean square become one op, with one for the gradient."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from fusion.rewriting import ops, rewritten
from onnxtrain.autodiff._differentiate import add_gradients, append_outputs
from onnxtrain.fusion import NORMS, FusionPass
from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import build, info, run
from tolerances import norm_relative_error

N = 6
FLOORED, INVERSE = "FlooredRMSNormalization", "InverseRMSNormalization"
CONSTANTS = {
    "axis": np.array([-1]),
    "second": np.array([1]),
    "third": np.array([2]),
    "two": 2.0,
    "half": 0.5,
    "minus_half": -0.5,
    "one": 1.0,
    "factor": N**-0.5,
    "root": N**0.5,
    "floor": 1e-3,
    "epsilon": 1e-5,
    "floor32": np.array(1 / 1024, np.float32),
}
_NAMES = {np.float64: "double", np.float32: "float"}


def node(op_type, inputs, output, **attributes):
    return helper.make_node(op_type, inputs.split(), [output], name=output, **attributes)


NORM = node("ReduceL2", "x axis", "norm", keepdims=1)
SCALED = node("Mul", "norm factor", "rms")
CLIPPED = node("Clip", "rms floor", "m")
QUOTIENT = node("Div", "x m", "z")
LAST = node("Mul", "z g", "y")
SQUARE = node("Mul", "x x", "square")
MEAN = node("ReduceMean", "square axis", "mean", keepdims=1)
TOTAL = node("Add", "mean epsilon", "total")
ROOT = node("Sqrt", "total", "s")
RECIPROCAL = node("Reciprocal", "s", "r")
PRODUCT = node("Mul", "x r", "z")
REST = [TOTAL, ROOT, RECIPROCAL, PRODUCT, LAST]
OVER_ROOT = node("Div", "x s", "z")
ONE_OVER = node("Div", "one s", "r")
TURNED = node("Mul", "r x", "z")

FUSED = {
    "darts": (FLOORED, [NORM, SCALED, CLIPPED, QUOTIENT, LAST]),
    "maximum": (FLOORED, [NORM, SCALED, node("Max", "floor rms", "m"), QUOTIENT, LAST]),
    "norm over the root of n": (FLOORED, [NORM, node("Div", "norm root", "rms"), CLIPPED, QUOTIENT, LAST]),
    "factors in the other order": (
        FLOORED,
        [NORM, node("Mul", "factor norm", "rms"), CLIPPED, QUOTIENT, node("Mul", "g z", "y")],
    ),
    "axis counted from the front": (
        FLOORED,
        [node("ReduceL2", "x third", "norm", keepdims=1), SCALED, CLIPPED, QUOTIENT, LAST],
    ),
    "Llama": (
        INVERSE,
        [node("Pow", "x two", "square"), MEAN, TOTAL, ROOT, RECIPROCAL, PRODUCT, node("Mul", "g z", "y")],
    ),
    "square as a product": (INVERSE, [SQUARE, MEAN, *REST]),
    "over the root": (INVERSE, [SQUARE, MEAN, node("Add", "epsilon mean", "total"), ROOT, OVER_ROOT, LAST]),
    "one over the root": (INVERSE, [SQUARE, MEAN, TOTAL, ROOT, ONE_OVER, TURNED, LAST]),
    "powers": (INVERSE, [SQUARE, MEAN, TOTAL, node("Pow", "total minus_half", "r"), PRODUCT, LAST]),
    "power one half": (INVERSE, [SQUARE, MEAN, TOTAL, node("Pow", "total half", "s"), node("Div", "x s", "z"), LAST]),
}  # fmt: skip

FUSED["numbers like others"] = (
    FLOORED,
    [NORM, SCALED, node("CastLike", "floor32 norm", "f"), node("Clip", "rms f", "m"), QUOTIENT, LAST],
)

LEFT_ALONE = {
    "another axis": [node("ReduceL2", "x second", "norm", keepdims=1), SCALED, CLIPPED, QUOTIENT, LAST],
    "an upper bound": [NORM, SCALED, node("Clip", "rms floor one", "m"), QUOTIENT, LAST],
    "norm of something else": [
        node("Neg", "x", "other"),
        node("ReduceL2", "other axis", "norm", keepdims=1),
        SCALED, CLIPPED, QUOTIENT, LAST,
    ],
    "floor of run time": [NORM, SCALED, node("Clip", "rms v", "m"), QUOTIENT, LAST],
    "a scale for each position": [NORM, SCALED, CLIPPED, QUOTIENT, node("Mul", "z h", "y")],
    "quotient read elsewhere": [NORM, SCALED, CLIPPED, QUOTIENT, LAST, node("Exp", "z", "w")],
    "a cube": [node("Mul", "x square", "cube"), node("ReduceMean", "cube axis", "mean", keepdims=1), *REST],
    "no epsilon": [SQUARE, MEAN, node("Sqrt", "mean", "s"), RECIPROCAL, PRODUCT, LAST],
    "axis dropped": [SQUARE, node("ReduceMean", "square second", "mean", keepdims=0), *REST],
}  # fmt: skip


def model(nodes, dtype=np.float64, batch=3) -> onnx.ModelProto:
    """y of x [batch, N, N] (square, so that the wrong axis has the right size), g [N], h [N, N] and v."""
    made = {output for n in nodes for output in n.output}
    read = {name for n in nodes for name in n.input}
    if "square" in read - made:
        nodes = [SQUARE, *nodes]
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shapes = {"x": [batch, N, N], "g": [N], "h": [N, N], "v": []}
    outputs = ["y", *(["w"] if "w" in made else [])]
    return build(
        nodes,
        [info(name, shape, elem) for name, shape in shapes.items()],
        [info(name, None, elem) for name in outputs],
        {
            name: np.asarray(value, dtype if np.asarray(value).dtype == np.float64 else None)
            for name, value in CONSTANTS.items()
        },
    )


def feeds(dtype=np.float64):
    """Rows of all sizes, two below the floor and one of zeros among them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, N, N)) * 10.0 ** rng.integers(-2, 3, (3, N, 1))
    x[0, 0] *= 1e-6
    x[0, 1] = 0
    x[0, 2] *= 1e-9
    values = {"x": x, "g": rng.normal(size=N), "h": rng.normal(size=(N, N)), "v": np.array(0.5)}
    return {name: np.asarray(value, dtype) for name, value in values.items()}


def fused(proto: onnx.ModelProto, parameters=()) -> ir.Model:
    return rewritten(proto, FusionPass(NORMS), parameters)


def with_gradients(model_: ir.Model) -> onnx.ModelProto:
    joint, gradients = add_gradients(model_, "y", ["x", "g"], cotangent="ct")
    append_outputs(joint, ["x", "g"], gradients)
    return to_proto(joint)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("batch", [3, "batch"], ids=["static", "symbolic"])
@pytest.mark.parametrize(("composite", "nodes"), FUSED.values(), ids=FUSED)
def test_fused_with_the_same_values_and_gradients(composite, nodes, batch, dtype):
    proto, feed = model(nodes, dtype, batch), feeds(dtype)
    name = f"{composite}_{_NAMES[dtype]}"
    result = fused(proto)
    assert ops(result) == {name: 1}
    onnx.checker.check_model(to_proto(result), full_check=True)
    joint = with_gradients(result)
    assert {n.op_type for n in joint.graph.node} == {name, f"{composite}Gradient_{_NAMES[dtype]}"}
    feed["ct"] = np.random.default_rng(1).normal(size=(3, N, N)).astype(dtype)
    want = run(with_gradients(canonicalize(load_model(proto))), feed)
    for value, reference in zip(run(joint, feed), want, strict=True):
        assert np.isfinite(value).all()
        assert norm_relative_error(value, reference) <= (1e-14 if dtype == np.float64 else 1e-6)


@pytest.mark.parametrize("nodes", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_left_alone(nodes):
    proto = model(nodes)
    before = ops(canonicalize(load_model(proto)))
    assert ops(fused(proto)) == before


@pytest.mark.parametrize("name", ["floor", "factor"])
def test_a_number_that_is_trained_is_no_constant(name):
    nodes = FUSED["darts"][1]
    assert ops(fused(model(nodes), [name])) == Counter(n.op_type for n in nodes)


def test_large_and_small_rows_keep_their_gradients_in_float32():
    """Where r³ leaves the range of float32, which the formula has as a factor."""
    feed = feeds(np.float32)
    feed["x"] = np.float32(np.sign(feed["x"] + 0.1) * 10.0 ** np.linspace(-2, 15, 18).reshape(3, N, 1))
    feed["ct"] = np.random.default_rng(1).normal(size=(3, N, N)).astype(np.float32)
    for _, nodes in FUSED.values():
        got = run(with_gradients(fused(model(nodes, np.float32))), feed)[1]
        exact = run(
            with_gradients(fused(model(nodes, np.float64))),
            {k: v.astype(np.float64) for k, v in feed.items()},
        )[1]
        for row, want in zip(got.reshape(18, N), exact.reshape(18, N), strict=True):
            assert np.linalg.norm(row - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("composite", ["darts", "Llama"])
def test_in_float16_squares_do_not_overflow(composite):
    proto = model(FUSED[composite][1], np.float16)
    feed = feeds(np.float32)
    feed["x"] = np.float32(np.sign(feed["x"] + 0.1) * np.linspace(500, 3000, 18).reshape(3, N, 1))
    feed["ct"] = np.random.default_rng(1).normal(size=(3, N, N)).astype(np.float32) * 100
    half = {name: value.astype(np.float16) for name, value in feed.items()}
    got = run(with_gradients(fused(proto)), half)
    want = run(
        with_gradients(fused(model(FUSED[composite][1], np.float64))),
        {name: value.astype(np.float64) for name, value in half.items()},
    )
    for value, reference in zip(got, want, strict=True):
        assert value.dtype == np.float16
        assert norm_relative_error(value, reference) <= 5e-3
