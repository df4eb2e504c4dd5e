"""Chains of ops that normalise become one op, with one for the gradient: by the root mean square, or each series."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from fusion.rewriting import ops, rewritten, with_gradients
from onnxtrain.fusion import NORMS, FusionPass
from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import build, info, run
from tolerances import norm_relative_error

N = 6
FLOORED, INVERSE = "FlooredRMSNormalization", "InverseRMSNormalization"
AFFINE, PLAIN = "ReversibleInstanceNormalization", "InstanceStandardization"
CONSTANTS = {
    "series": np.array([1]),
    "both": np.array([0, 1]),
    "true": np.array(True),
    "axis": np.array([-1]),
    "second": np.array([1]),
    "third": np.array([2]),
    "two": 2.0,
    "half": 0.5,
    "minus_half": -0.5,
    "one": 1.0,
    "factor": N**-0.5,
    "root_n": N**0.5,
    "floor": 1e-3,
    "epsilon": 1e-5,
    "floor32": np.array(1 / 1024, np.float32),
}
NAMES = {np.float64: "double", np.float32: "float"}


def node(op_type, inputs, output, **attributes):
    return helper.make_node(op_type, inputs.split(), [output], name=output, **attributes)


NORM = node("ReduceL2", "x axis", "norm", keepdims=1)
RMS_SCALED = node("Mul", "norm factor", "rms")
CLIPPED = node("Clip", "rms floor", "m")
QUOTIENT = node("Div", "x m", "z")
LAST = node("Mul", "z g", "y")
SQUARE = node("Mul", "x x", "square")
MEAN = node("ReduceMean", "square axis", "mean", keepdims=1)
TOTAL = node("Add", "mean epsilon", "total")
ROOT = node("Sqrt", "total", "s")
RECIPROCAL = node("Reciprocal", "s", "r")
RMS_PRODUCT = node("Mul", "x r", "z")
REST = [TOTAL, ROOT, RECIPROCAL, RMS_PRODUCT, LAST]
OVER_ROOT = node("Div", "x s", "z")
ONE_OVER = node("Div", "one s", "r")
TURNED = node("Mul", "r x", "z")

RMS = {
    "darts": (FLOORED, [NORM, RMS_SCALED, CLIPPED, QUOTIENT, LAST]),
    "maximum": (FLOORED, [NORM, RMS_SCALED, node("Max", "floor rms", "m"), QUOTIENT, LAST]),
    "norm over the root of n": (FLOORED, [NORM, node("Div", "norm root_n", "rms"), CLIPPED, QUOTIENT, LAST]),
    "factors in the other order": (
        FLOORED,
        [NORM, node("Mul", "factor norm", "rms"), CLIPPED, QUOTIENT, node("Mul", "g z", "y")],
    ),
    "axis counted from the front": (
        FLOORED,
        [node("ReduceL2", "x third", "norm", keepdims=1), RMS_SCALED, CLIPPED, QUOTIENT, LAST],
    ),
    "Llama": (
        INVERSE,
        [node("Pow", "x two", "square"), MEAN, TOTAL, ROOT, RECIPROCAL, RMS_PRODUCT, node("Mul", "g z", "y")],
    ),
    "square as a product": (INVERSE, [SQUARE, MEAN, *REST]),
    "over the root": (INVERSE, [SQUARE, MEAN, node("Add", "epsilon mean", "total"), ROOT, OVER_ROOT, LAST]),
    "one over the root": (INVERSE, [SQUARE, MEAN, TOTAL, ROOT, ONE_OVER, TURNED, LAST]),
    "powers": (INVERSE, [SQUARE, MEAN, TOTAL, node("Pow", "total minus_half", "r"), RMS_PRODUCT, LAST]),
    "power one half": (INVERSE, [SQUARE, MEAN, TOTAL, node("Pow", "total half", "s"), node("Div", "x s", "z"), LAST]),
}  # fmt: skip

RMS["numbers like others"] = (
    FLOORED,
    [NORM, RMS_SCALED, node("CastLike", "floor32 norm", "f"), node("Clip", "rms f", "m"), QUOTIENT, LAST],
)

NO_RMS = {
    "another axis": [node("ReduceL2", "x second", "norm", keepdims=1), RMS_SCALED, CLIPPED, QUOTIENT, LAST],
    "an upper bound": [NORM, RMS_SCALED, node("Clip", "rms floor one", "m"), QUOTIENT, LAST],
    "norm of something else": [
        node("Neg", "x", "other"),
        node("ReduceL2", "other axis", "norm", keepdims=1),
        RMS_SCALED, CLIPPED, QUOTIENT, LAST,
    ],
    "floor of run time": [NORM, RMS_SCALED, node("Clip", "rms v", "m"), QUOTIENT, LAST],
    "a scale for each position": [NORM, RMS_SCALED, CLIPPED, QUOTIENT, node("Mul", "z h", "y")],
    "quotient read elsewhere": [NORM, RMS_SCALED, CLIPPED, QUOTIENT, LAST, node("Exp", "z", "w")],
    "a cube": [node("Mul", "x square", "cube"), node("ReduceMean", "cube axis", "mean", keepdims=1), *REST],
    "no epsilon": [SQUARE, MEAN, node("Sqrt", "mean", "s"), RECIPROCAL, RMS_PRODUCT, LAST],
    "axis dropped": [SQUARE, node("ReduceMean", "square second", "mean", keepdims=0), *REST],
}  # fmt: skip


def chain(last, **changed):
    """Statistics of x over its second axis, and the nodes `last`; `changed` replaces nodes by their output."""
    nodes = {
        "mean": node("ReduceMean", "x series", "mean", keepdims=1),
        "m": node("Where", "true mean mean", "m"),
        "c": node("Sub", "x m", "c"),
        "square": node("Mul", "c c", "square"),
        "variance": node("ReduceMean", "square series", "variance", keepdims=1),
        "total": node("Add", "variance epsilon", "total"),
        "root": node("Sqrt", "total", "root"),
        "s": node("Where", "true root root", "s"),
    }
    return [*(nodes | changed).values(), *last]


FACTOR = node("Div", "g s", "f")
PRODUCT = node("Mul", "c f", "p")
SUM = node("Add", "p b", "y")
SCALED = [FACTOR, PRODUCT, SUM]

INSTANCE = {
    "affine": (AFFINE, chain(SCALED)),
    "the other order": (
        AFFINE,
        chain(
            [FACTOR, node("Mul", "f c", "p"), node("Add", "b p", "y")],
            total=node("Add", "epsilon variance", "total"),
        ),
    ),
    "square as a power": (AFFINE, chain(SCALED, square=node("Pow", "c two", "square"))),
    "plain": (PLAIN, chain([node("Div", "c s", "y")])),
}
STATISTICS_READ = {
    "mean and stdev": [node("Mul", "m s", "w")],
    "centered": [node("Tanh", "c", "w")],
    "weight over stdev": [node("Neg", "f", "w")],
}
NO_INSTANCE = {
    "gradients flow through the mean": chain(SCALED, m=node("Neg", "mean", "m")),
    "gradients flow through stdev": chain(SCALED, s=node("Neg", "root", "s")),
    "over the batch too": chain(SCALED, mean=node("ReduceMean", "x both", "mean", keepdims=1)),
    "mean of something else": chain(
        SCALED, mean=node("Neg", "x", "other"), m=node("ReduceMean", "other series", "mean", keepdims=1),
        c=node("Where", "true mean mean", "m"), square=node("Sub", "x m", "c"),
        variance=node("Mul", "c c", "square"), total=node("ReduceMean", "square series", "variance", keepdims=1),
        root=node("Add", "variance epsilon", "total"), s=node("Sqrt", "total", "root"),
        more=node("Where", "true root root", "s"),
    ),
    "a weight for each position": chain([node("Div", "h s", "f"), PRODUCT, SUM]),
    "epsilon of run time": chain(SCALED, total=node("Add", "variance v", "total")),
    "product read elsewhere": chain([*SCALED, node("Exp", "p", "w")]),
    "variance read elsewhere": chain([*SCALED, node("Exp", "variance", "w")]),
    "mean read before the stop": chain([*SCALED, node("Exp", "mean", "w")]),
}  # fmt: skip


FUSED = {**RMS, **INSTANCE}
LEFT_ALONE = {**NO_RMS, **NO_INSTANCE}


def model(nodes, dtype=np.float64, batch=3) -> onnx.ModelProto:
    """y, and w where there is one, of x [batch, N, N], g and b [N], h [N, N] and v; a wrong axis has the right size."""
    made = {output for n in nodes for output in n.output}
    read = {name for n in nodes for name in n.input}
    if "square" in read - made:
        nodes = [SQUARE, *nodes]
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shapes = {"x": [batch, N, N], "g": [N], "b": [N], "h": [N, N], "v": []}
    values = {name: np.asarray(value) for name, value in CONSTANTS.items() if name in read}
    return build(
        nodes,
        [info(name, shape, elem) for name, shape in shapes.items()],
        [info(name, None, elem) for name in ("y", "w") if name in made],
        {name: value.astype(dtype) if value.dtype == np.float64 else value for name, value in values.items()},
    )


def feeds(dtype=np.float64):
    """Rows of all sizes, two below the floor and one of zeros among them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, N, N)) * 10.0 ** rng.integers(-2, 3, (3, N, 1))
    x[0, 0] *= 1e-6
    x[0, 1] = 0
    x[0, 2] *= 1e-9
    values = {"x": x, "g": rng.normal(size=N), "h": rng.normal(size=(N, N)), "v": np.array(0.5)}
    return {name: np.asarray(value, dtype) for name, value in {**values, "b": rng.normal(size=N)}.items()}


def moderate(dtype=np.float64):
    """Numbers near 0.3: rows of very different sizes would cancel in the mean of a series."""
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.normal(size=v.shape) + 0.3, dtype) for name, v in feeds().items()}


def cotangent(dtype=np.float64):
    return np.random.default_rng(1).normal(size=(3, N, N)).astype(dtype)


def fused(proto: onnx.ModelProto, parameters=()) -> ir.Model:
    return rewritten(proto, FusionPass(NORMS), parameters)


def differentiated(graph: ir.Model, of="y") -> onnx.ModelProto:
    """With the gradients of x and of the parameters that the graph reads."""
    read = {value.name for n in graph.graph for value in n.inputs if value}
    return with_gradients(graph, [name for name in ("x", "g", "b") if name in read], of)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("batch", [3, "batch"], ids=["static", "symbolic"])
@pytest.mark.parametrize(("composite", "nodes"), FUSED.values(), ids=FUSED)
def test_fused_with_the_same_values_and_gradients(composite, nodes, batch, dtype):
    proto, feed = model(nodes, dtype, batch), feeds(dtype) | {"ct": cotangent(dtype)}
    if composite in (AFFINE, PLAIN):
        feed |= moderate(dtype)
    name = f"{composite}_{NAMES[dtype]}"
    result = fused(proto)
    assert ops(result) == {name: 1}
    onnx.checker.check_model(to_proto(result), full_check=True)
    joint = differentiated(result)
    if composite in (FLOORED, INVERSE):
        assert {n.op_type for n in joint.graph.node} == {name, f"{composite}Gradient_{NAMES[dtype]}"}
    want = run(differentiated(canonicalize(load_model(proto))), feed)
    for value, reference in zip(run(joint, feed), want, strict=True):
        assert np.isfinite(value).all()
        assert norm_relative_error(value, reference) <= (1e-14 if dtype == np.float64 else 1e-6)


@pytest.mark.parametrize("nodes", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_other_chains_stay(nodes):
    proto = model(nodes)
    assert ops(fused(proto)) == ops(canonicalize(load_model(proto)))


@pytest.mark.parametrize("name", ["floor", "factor"])
def test_a_number_that_is_trained_is_no_constant(name):
    nodes = RMS["darts"][1]
    assert ops(fused(model(nodes), [name])) == Counter(n.op_type for n in nodes)


def test_an_epsilon_that_is_trained_is_no_constant():
    proto = model(chain(SCALED))
    assert ops(fused(proto, ["epsilon"])) == ops(canonicalize(load_model(proto)))


@pytest.mark.parametrize("more", STATISTICS_READ.values(), ids=STATISTICS_READ)
def test_others_may_read_the_statistics(more):
    """From the op, behind a stop: the gradient of what they compute is as before."""
    proto = model(chain([*SCALED, *more, node("Mul", "y w", "z")]))
    feed = moderate() | {"ct": cotangent()}
    proto.graph.output.append(info("z", None, onnx.TensorProto.DOUBLE))
    result = fused(proto)
    assert ops(result)[f"{AFFINE}_double"] == 1
    assert ops(result)["Sqrt"] == ops(result)["ReduceMean"] == 0
    onnx.checker.check_model(to_proto(result), full_check=True)
    want = run(differentiated(canonicalize(load_model(proto)), "z"), feed)
    for value, reference in zip(run(differentiated(result, "z"), feed), want, strict=True):
        assert norm_relative_error(value, reference) <= 1e-14


def signed_rows(low: float, high: float, exponential: bool) -> np.ndarray:
    """Random numbers' signs times a size per row, from `low` to `high`."""
    sizes = 10.0 ** np.linspace(low, high, 18) if exponential else np.linspace(low, high, 18)
    return np.float32(np.sign(feeds(np.float32)["x"] + 0.1) * sizes.reshape(3, N, 1))


@pytest.mark.parametrize("nodes", [nodes for _, nodes in RMS.values()], ids=RMS)
def test_large_and_small_rows_keep_their_gradients_in_float32(nodes):
    """The formula has the factor r³, which leaves the range of float32 here."""
    feed = feeds(np.float32) | {"x": signed_rows(-2, 15, True), "ct": cotangent(np.float32)}
    wide = {name: value.astype(np.float64) for name, value in feed.items()}
    got = run(differentiated(fused(model(nodes, np.float32))), feed)[1]
    exact = run(differentiated(fused(model(nodes, np.float64))), wide)[1]
    for row, want in zip(got.reshape(18, N), exact.reshape(18, N), strict=True):
        assert np.linalg.norm(row - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("name", ["darts", "Llama"])
def test_in_float16_squares_do_not_overflow(name):
    nodes = RMS[name][1]
    feed = feeds(np.float32) | {"x": signed_rows(500, 3000, False), "ct": cotangent(np.float32) * 100}
    half = {name: value.astype(np.float16) for name, value in feed.items()}
    got = run(differentiated(fused(model(nodes, np.float16))), half)
    wide = {name: value.astype(np.float64) for name, value in half.items()}
    want = run(differentiated(fused(model(nodes, np.float64))), wide)
    for value, reference in zip(got, want, strict=True):
        assert value.dtype == np.float16
        assert norm_relative_error(value, reference) <= 5e-3
