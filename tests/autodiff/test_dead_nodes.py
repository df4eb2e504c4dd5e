"""Models with derivatives hold no node that nothing reads: ONNX Runtime may have no kernel for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain import hessian_vector_product, jvp, vjp
from onnxtrain.autodiff import differentiate

# Only the shape of the float64 Atan is read, and it is folded. ONNX Runtime (1.32) has no float64 Atan.
ATAN_OF_A_CONSTANT = (
    "a = Atan(w)  shape = Shape(a)  e = Expand(x, shape)  s = Sin(e)  y = ReduceSum<keepdims = 0>(s)"
)
# Nothing reads these from the beginning.
DEAD_CHAIN = "a = Atan(x)  b = Tan(a)  s = Sin(x)  y = ReduceSum<keepdims = 0>(s)"
DEAD_IN_A_BRANCH = """
    y = If(c) <then_branch = yes () => (double t) { a = Atan(x)  b = Tan(a)  s = Sin(x)
                                                    t = ReduceSum<keepdims = 0>(s) },
               else_branch = no () => (double f) { s = Cos(x)  f = ReduceSum<keepdims = 0>(s) }>"""
MODELS = {"constant": ATAN_OF_A_CONSTANT, "chain": DEAD_CHAIN, "branch": DEAD_IN_A_BRANCH}
WAYS: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "differentiate": lambda model: differentiate(model, "y", ["x"]),
    "differentiate twice": lambda model: differentiate(
        differentiate(model, "y", ["x"]), "x_grad", ["x"], cotangent="v"
    ),
    "vjp": lambda model: vjp(model, ["y"], ["x"]),
    "jvp": lambda model: jvp(model, ["y"], ["x"]),
    "hessian_vector_product": lambda model: hessian_vector_product(model, "y", ["x"]),
}


def parsed(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        net (double[n] x{", bool c" if "If(" in body else ""}) => (double y)
        <double[1] w = {{-1.25}}> {{ {body} }}"""
    )


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from all_nodes(attribute.g)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_no_node_stays_that_nothing_reads(model: str, way: str) -> None:
    derived = WAYS[way](parsed(MODELS[model]))
    assert "Atan" not in [node.op_type for node in all_nodes(derived.graph)]
    session = ort.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {
        value.name: np.full([1] * len(value.shape), True if value.type == "tensor(bool)" else 0.5)
        for value in session.get_inputs()
    }
    results = dict(zip([v.name for v in session.get_outputs()], session.run(None, feeds), strict=True))
    np.testing.assert_allclose(results["y"], np.sin(0.5))


def test_gradients_of_dead_values_are_zero() -> None:
    # For these the Atan is read, for its shape: ONNX Runtime needs its kernel, which it has for float32 only.
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> net (float[n] x) => (float y) {{ {DEAD_CHAIN} }}"""
    )
    derived = differentiate(model, "y", ["a", "s"])
    session = ort.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    results = session.run(["a_grad", "s_grad"], {"x": np.array([0.5, 1], np.float32)})
    np.testing.assert_array_equal(results, [[0, 0], [1, 1]])
