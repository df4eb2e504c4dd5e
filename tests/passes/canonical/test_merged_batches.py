"""Batched products whose batch axes were merged become products of the factors as they were."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.passes import load_model, to_proto
from onnxtrain.passes.canonical.merged_batches import MergedBatchesPass
from passes._models import run


def product(a: str, b: str, result: str, shapes: str, declared: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> net ({shapes}) => (float[{result}] y) {declared} {{
        merge_a = Constant<value_ints = [{a}]>()  merge_b = Constant<value_ints = [{b}]>()
        split = Constant<value_ints = [{result}]>()
        left = Reshape(a, merge_a)  right = Reshape(b, merge_b)
        p = MatMul(left, right)  y = Reshape(p, split) }}"""
    )


def rewritten(proto: onnx.ModelProto) -> ir.Model:
    model = load_model(onnx.shape_inference.infer_shapes(proto, data_prop=True))
    MergedBatchesPass()(model)
    return model


@pytest.mark.parametrize(
    ("a", "b", "result", "shapes"),
    [
        ("6, 4, 5", "6, 5, 7", "2, 3, 4, 7", "float[2, 3, 4, 5] a, float[2, 3, 5, 7] b"),
        ("24, 4, 5", "24, 5, 4", "2, 3, 4, 4, 4", "float[2, 3, 4, 4, 5] a, float[2, 3, 4, 5, 4] b"),
    ],
)
def test_becomes_one_product(a: str, b: str, result: str, shapes: str) -> None:
    proto = product(a, b, result, shapes)
    model = rewritten(proto)
    assert [node.op_type for node in model.graph if node.op_type != "Constant"] == ["MatMul"]
    rng = np.random.default_rng(0)
    feeds = {
        value.name: rng.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim], np.float32)
        for value in proto.graph.input
    }
    np.testing.assert_array_equal(run(to_proto(model), feeds)[0], run(proto, feeds)[0])


@pytest.mark.parametrize(
    ("a", "b", "result", "shapes"),
    [
        # Rows are regrouped, too.
        ("6, 2, 10", "6, 10, 7", "2, 3, 2, 7", "float[2, 3, 4, 5] a, float[2, 3, 10, 7] b"),
        ("6, 4, 5", "6, 5, 7", "2, 3, 2, 14", "float[2, 3, 4, 5] a, float[2, 3, 5, 7] b"),
        # The batches were split in different ways.
        ("6, 4, 5", "6, 5, 7", "2, 3, 4, 7", "float[2, 3, 4, 5] a, float[3, 2, 5, 7] b"),
        ("6, 4, 5", "6, 5, 7", "3, 2, 4, 7", "float[2, 3, 4, 5] a, float[2, 3, 5, 7] b"),
        # There is nothing to merge.
        ("2, 4, 5", "2, 5, 7", "2, 4, 7", "float[2, 4, 5] a, float[2, 5, 7] b"),
    ],
)
def test_other_reshapes_stay(a: str, b: str, result: str, shapes: str) -> None:
    assert sum(node.op_type == "Reshape" for node in rewritten(product(a, b, result, shapes)).graph) == 3


def test_a_product_that_others_read_stays() -> None:
    proto = product("6, 4, 5", "6, 5, 7", "2, 3, 4, 7", "float[2, 3, 4, 5] a, float[2, 3, 5, 7] b")
    proto.graph.output.append(onnx.helper.make_tensor_value_info("p", onnx.TensorProto.FLOAT, (6, 4, 7)))
    assert sum(node.op_type == "Reshape" for node in rewritten(proto).graph) == 3
