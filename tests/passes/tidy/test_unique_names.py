"""Names of values in subgraphs."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtrain.passes.shapes.infer import infer_shapes
from onnxtrain.passes.tidy.unique_names import name_apart


def test_values_of_a_body_are_named_apart_from_those_around() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[2] x, int64 n) => (float[2] y) <float[2] w = {1, 2}> {
            y = Loop (n, , x) <body = b (int64 i, bool c, float[2] s) => (bool go, float[2] t) {
                go = Identity(c)  inner = Mul(s, w)  t = Add(inner, w) }> }""")
    model = ir.from_proto(proto)
    (body,) = model.graph.subgraphs()
    product = next(node for node in body if node.op_type == "Mul").outputs[0]
    product.name = "w"
    with pytest.raises(onnx.checker.ValidationError, match="single static assignment"):
        onnx.checker.check_model(ir.to_proto(model))
    name_apart(model)
    named = ir.to_proto(model)
    onnx.checker.check_model(named)
    assert [value.name for value in model.graph.inputs] == ["x", "n"]
    (y,) = ort.InferenceSession(named.SerializeToString()).run(None, {"x": np.ones(2, "f"), "n": np.array(2)})
    np.testing.assert_array_equal(y, [3, 10])


def test_sizes_in_one_branch_are_not_those_of_the_same_name_in_the_other() -> None:
    """onnx takes the elements of `s` in the first branch for those in the second one."""
    model = ir.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (bool c, float[a] x, float[a, b] z, float k) => (float[?] y) {
            y = If (c) <then_branch = t () => (float[?] r) { s = Shape(x)  r = Expand(k, s) },
                        else_branch = e () => (float[?] q) { s = Shape(z)  f = Expand(k, s)  q = Flatten<axis = 0>(f) }>
        }""")
    )
    infer_shapes(model)
    names = [value.name for graph in model.graphs() for node in graph for value in node.outputs]
    assert len(names) == len(set(names))
    (expanded,) = (
        node.outputs[0] for graph in model.graph.subgraphs() for node in graph if node.outputs[0].name == "f"
    )
    assert expanded.shape == ["a", "b"]
