"""The cross entropy of a matrix without a third axis: the same values, names and gradients."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxtrain.passes import CrossEntropyPass, canonicalize, load_model, to_proto
from passes._models import run


def model(
    shape: list[int | str], reduction: str, outputs: list[str], weights: bool = False
) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, shape),
        helper.make_tensor_value_info("labels", onnx.TensorProto.INT64, [shape[0], *shape[2:]]),
    ]
    names = ["scores", "labels"]
    if weights:
        inputs.append(helper.make_tensor_value_info("weights", onnx.TensorProto.FLOAT, [shape[1]]))
        names.append("weights")
    node = helper.make_node("SoftmaxCrossEntropyLoss", names, outputs, reduction=reduction, ignore_index=2)
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs if name]
    graph = helper.make_graph([node], "net", inputs, values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def feeds(shape: list[int], weights: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {"scores": rng.standard_normal(shape).astype(np.float32)}
    made["labels"] = rng.integers(0, shape[1], [shape[0], *shape[2:]])
    return made | ({"weights": rng.random(shape[1]).astype(np.float32)} if weights else {})


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("outputs", [["loss"], ["loss", "log_prob"]], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_same_values(reduction: str, outputs: list[str], weights: bool) -> None:
    proto, given = model(["batch", 5], reduction, outputs, weights), feeds([7, 5], weights)
    rewritten = canonicalize(load_model(proto))
    assert CrossEntropyPass()(rewritten).modified
    assert [node.op_type for node in rewritten.graph] == ["LogSoftmax", "NegativeLogLikelihoodLoss"]
    assert [value.name for value in rewritten.graph.outputs] == outputs
    result = to_proto(rewritten)
    onnx.checker.check_model(result, full_check=True)
    for value, reference in zip(run(result, given), run(proto, given), strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-6)


def test_of_images_it_stays() -> None:
    rewritten = canonicalize(load_model(model([2, 3, 4], "mean", ["loss"])))
    assert not CrossEntropyPass()(rewritten).modified
