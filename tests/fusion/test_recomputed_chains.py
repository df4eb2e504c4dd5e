"""Gradients recompute elementwise chains that would otherwise be kept from the forward pass."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fusion.rewriting import rewritten, with_gradients
from onnxtrain.fusion import ElementwisePass, RecomputedChainsPass
from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import run

CUBES = "d = Sub(x, grid) s = Mul(d, d) c = Mul(s, d)"


def net(body: str, inputs: str, outputs: str = "float y") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> net ({inputs}) => ({outputs}) {{ {body} }}'
    )


def joint(body: str, inputs: str, wrt: list[str]) -> onnx.ModelProto:
    """A forward pass with the output y, and its gradients with respect to some inputs."""
    return with_gradients(canonicalize(load_model(net(body, inputs))), wrt)


def recomputed(proto: onnx.ModelProto) -> ir.Model:
    """Rewrites a model, and compares its outputs, also as programs, with those of the model."""
    model = rewritten(proto, RecomputedChainsPass({"y"}))
    rng = np.random.default_rng(0)
    feed: dict[str, np.ndarray] = {}
    for value in proto.graph.input:
        shape = [dim.dim_value or 5 for dim in value.type.tensor_type.shape.dim]
        numbers = rng.standard_normal(shape)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feed[value.name] = numbers > 0 if dtype == np.bool_ else numbers.astype(dtype)
    for new in (model, rewritten(to_proto(model), ElementwisePass())):
        for got, want in zip(run(to_proto(new), feed), run(proto, feed), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
    return model


def copies(model: ir.Model) -> list[str]:
    """The values that are recomputed."""
    names = [value.name or "" for node in model.graph for value in node.outputs]
    return sorted(name.removesuffix("_again") for name in names if name.endswith("_again"))


@pytest.mark.parametrize("rows", ["n", "7"])
def test_gradients_read_copies_of_a_chain(rows: str) -> None:
    inputs = f"float[{rows}, 1] x, float[64] grid"
    model = recomputed(joint(f"{CUBES} y = ReduceSum<keepdims=0>(c)", inputs, ["x", "grid"]))
    assert copies(model) == ["d", "s"]
    programs = [
        node
        for node in rewritten(to_proto(model), ElementwisePass()).graph
        if node.op_type.startswith("Elementwise")
    ]
    # The programs of the forward pass and of the gradients both read the inputs, and no results of each other.
    assert len(programs) > 1
    passed = {value.name for program in programs for value in (*program.inputs, *program.outputs) if value}
    assert {"x", "grid"} <= passed
    assert not {"d", "s"} & passed


def test_a_result_that_a_product_reads_is_in_memory_in_any_case() -> None:
    body = (
        "d = Sub(x, grid) s = Mul(d, d) p = MatMul(s, w) t = Mul(s, q) m = Mul(t, t) "
        "a = ReduceSum<keepdims=0>(m) b = ReduceSum<keepdims=0>(p) y = Add(a, b)"
    )
    inputs = "float[n, 1] x, float[64] grid, float[64, 8] w, float[64] q"
    # Without q's chain the gradient of w would read s; t is computed from s again.
    assert copies(recomputed(joint(body, inputs, ["w", "q"]))) == ["t"]


def test_a_result_that_a_subgraph_reads_is_in_memory_in_any_case() -> None:
    results = (
        "then_branch = a () => (float[n, 64] u) { u = Neg(s) }",
        "else_branch = b () => (float[n, 64] v) { v = Abs(s) }",
    )
    branches = ", ".join(results)
    body = f"{CUBES} y = ReduceSum<keepdims=0>(c) e = Mul(s, ct) g = Mul(e, d) h = If(f) <{branches}>"
    inputs = "float[n, 1] x, float[64] grid, float[n, 64] ct, bool f"
    model = recomputed(net(body, inputs, "float y, float[n, 64] g, float[n, 64] h"))
    assert copies(model) == ["d"]


def test_a_shape_is_not_read_from_a_copy() -> None:
    """The gradients would otherwise wait for the copies, and could not be part of their program."""
    body = f"{CUBES} y = ReduceSum<keepdims=0>(c) e = Mul(s, ct) g = Mul(e, d) h = Shape(s)"
    inputs = "float[n, 1] x, float[64] grid, float[n, 64] ct"
    model = recomputed(net(body, inputs, "float y, float[n, 64] g, int64[2] h"))
    assert copies(model) == ["d", "s"]
    (shape,) = (node for node in model.graph if node.op_type == "Shape")
    assert [value.name for value in shape.inputs if value] == ["s"]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        pytest.param("m = Identity(b)", ["d", "f", "s"], id="input"),
        pytest.param("o = Less(i, j) m = Not(o)", ["d", "f", "s"], id="integers"),
        pytest.param("o = Less(x, grid) m = And(o, b)", ["d", "f", "m", "o", "s"], id="and a comparison"),
    ],
)
def test_gradients_read_copies_of_a_chain_with_a_mask(mask: str, expected: list[str]) -> None:
    zero = "zero = Constant<value = float {0}>()"
    body = f"{zero} {mask} d = Sub(x, grid) f = Where(m, d, zero) s = Mul(f, f) c = Mul(s, f)"
    inputs = "float[n, 1] x, float[64] grid, bool[64] b, int64[64] i, int64[1] j"
    model = recomputed(joint(f"{body} y = ReduceSum<keepdims=0>(c)", inputs, ["x", "grid"]))
    assert copies(model) == expected


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("e = Sin(x) f = Exp(e) y = ReduceSum<keepdims=0>(f)", id="slow ops"),
        pytest.param("p = MatMul(x, x) y = ReduceSum<keepdims=0>(p)", id="not elementwise"),
        pytest.param("s = Mul(x, x) y = ReduceSum<keepdims=0>(s)", id="not read by gradients"),
    ],
)
def test_other_results_are_kept(body: str) -> None:
    proto = joint(body, "float[8, 8] x", ["x"])
    assert not RecomputedChainsPass({"y"})(load_model(proto)).modified
