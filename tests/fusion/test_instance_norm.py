"""Chains of ops that normalise each series by constant statistics become one op, with one for the gradient."""

from __future__ import annotations

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
AFFINE, PLAIN = "ReversibleInstanceNormalization", "InstanceStandardization"
NAMES = {np.float64: "double", np.float32: "float"}


def node(op_type, inputs, output, **attributes):
    return helper.make_node(op_type, inputs.split(), [output], name=output, **attributes)


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

FUSED = {
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
LEFT_ALONE = {
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


def model(nodes, dtype=np.float64, batch=3) -> onnx.ModelProto:
    """y, and w where there is one, of x [batch, N, N], g and b [N], h [N, N] and v."""
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shapes = {"x": [batch, N, N], "g": [N], "b": [N], "h": [N, N], "v": []}
    outputs = [name for n in nodes for name in n.output if name in ("y", "w")]
    return build(
        nodes,
        [info(name, shape, elem) for name, shape in shapes.items()],
        [info(name, None, elem) for name in outputs],
        {
            "series": np.array([1]),
            "both": np.array([0, 1]),
            "true": np.array(True),
            "two": np.array(2, dtype),
            "epsilon": np.array(1e-5, dtype),
        },
    )


def feeds(dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = {"x": (3, N, N), "g": N, "b": N, "h": (N, N), "v": ()}
    return {name: np.asarray(rng.normal(size=shape) + 0.3, dtype) for name, shape in shapes.items()}


def fused(proto: onnx.ModelProto, parameters=()) -> ir.Model:
    return rewritten(proto, FusionPass(NORMS), parameters)


def with_gradients(model_: ir.Model, of="y") -> onnx.ModelProto:
    names = ["x", "g", "b"] if any("b" in [v.name for v in n.inputs if v] for n in model_.graph) else ["x"]
    joint, gradients = add_gradients(model_, of, names, cotangent="ct")
    append_outputs(joint, names, gradients)
    return to_proto(joint)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("batch", [3, "batch"], ids=["static", "symbolic"])
@pytest.mark.parametrize(("composite", "nodes"), FUSED.values(), ids=FUSED)
def test_fused_with_the_same_values_and_gradients(composite, nodes, batch, dtype):
    proto, feed = model(nodes, dtype, batch), feeds(dtype)
    result = fused(proto)
    assert ops(result) == {f"{composite}_{NAMES[dtype]}": 1}
    onnx.checker.check_model(to_proto(result), full_check=True)
    feed["ct"] = np.random.default_rng(1).normal(size=(3, N, N)).astype(dtype)
    want = run(with_gradients(canonicalize(load_model(proto))), feed)
    for value, reference in zip(run(with_gradients(result), feed), want, strict=True):
        assert norm_relative_error(value, reference) <= (1e-14 if dtype == np.float64 else 1e-6)


@pytest.mark.parametrize("more", STATISTICS_READ.values(), ids=STATISTICS_READ)
def test_others_may_read_the_statistics(more):
    """From the op, behind a stop: the gradient of what they compute is as before."""
    proto, feed = model(chain([*SCALED, *more, node("Mul", "y w", "z")])), feeds()
    proto.graph.output.append(info("z", None, onnx.TensorProto.DOUBLE))
    result = fused(proto)
    assert ops(result)[f"{AFFINE}_double"] == 1
    assert ops(result)["Sqrt"] == ops(result)["ReduceMean"] == 0
    onnx.checker.check_model(to_proto(result), full_check=True)
    feed["ct"] = np.random.default_rng(1).normal(size=(3, N, N))
    want = run(with_gradients(canonicalize(load_model(proto)), "z"), feed)
    for value, reference in zip(run(with_gradients(result, "z"), feed), want, strict=True):
        assert norm_relative_error(value, reference) <= 1e-14


@pytest.mark.parametrize("nodes", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_left_alone(nodes):
    proto = model(nodes)
    before = ops(canonicalize(load_model(proto)))
    assert ops(fused(proto)) == before


def test_an_epsilon_that_is_trained_is_no_constant():
    proto = model(chain(SCALED))
    assert ops(fused(proto, ["epsilon"])) == ops(canonicalize(load_model(proto)))
