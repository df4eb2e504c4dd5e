"""The gradient of the weight of a batched product is one product of matrices."""

from __future__ import annotations

import onnx
import pytest

from onnxtrain.autodiff import differentiate


@pytest.mark.parametrize("batch", ["8, 16", "n, t"], ids=["static", "symbolic"])
def test_weight_of_a_batched_product_gets_one_product_of_matrices(batch: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[{batch}, 3] x, float[3, 4] w) => (float y) {{
            p = MatMul(x, w)  y = ReduceSum<keepdims=0>(p) }}"""
    )
    step = differentiate(model, of="y", wrt=["w"])
    producer = next(node for node in step.graph.node if "w_grad" in node.output)
    assert producer.op_type == "MatMul"
    assert not any(node.op_type in ("Where", "NonZero") for node in step.graph.node)
    ranks = {
        info.name: len(info.type.tensor_type.shape.dim)
        for info in onnx.shape_inference.infer_shapes(step).graph.value_info
    }
    assert [ranks[name] for name in producer.input] == [2, 2]
