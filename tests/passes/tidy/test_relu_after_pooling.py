from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxtrain.autodiff import differentiate
from onnxtrain.passes import ReluAfterMaxPoolPass, load_model, to_proto
from passes._models import build, info, run

X = (
    np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4) % 7 - 3
)  # windows without a positive element, and ties


TYPES = {"i": onnx.TensorProto.INT64}


def pool(source: str, *outputs: str) -> onnx.NodeProto:
    return helper.make_node("MaxPool", [source], outputs, kernel_shape=[2, 2], strides=[2, 2])


def relu(source: str, target: str) -> onnx.NodeProto:
    return helper.make_node("Relu", [source], [target])


def model(nodes: list[onnx.NodeProto], *outputs: str) -> onnx.ModelProto:
    return build(
        nodes, [info("x", ["N", 2, 4, 4])], [info(o, ["N", 2, "H", "W"], TYPES.get(o, 1)) for o in outputs]
    )


def after(proto: onnx.ModelProto) -> onnx.ModelProto:
    changed = load_model(proto)
    ReluAfterMaxPoolPass()(changed)
    onnx.checker.check_model(to_proto(changed))
    return to_proto(changed)


def ops(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def test_relu_moves_behind_the_pooling_and_nothing_changes() -> None:
    plain = model([relu("x", "h"), pool("h", "p"), helper.make_node("Exp", ["p"], ["y"])], "y")
    moved = after(plain)
    assert ops(moved) == ["MaxPool", "Relu", "Exp"]
    np.testing.assert_array_equal(run(moved, {"x": X})[0], run(plain, {"x": X})[0])


def test_gradient_stays_the_same() -> None:
    total = helper.make_node("ReduceSum", ["w"], ["loss"], keepdims=0)
    nodes = [relu("x", "h"), pool("h", "p"), helper.make_node("Exp", ["p"], ["w"]), total]
    plain = build(nodes, [info("x", ["N", 2, 4, 4])], [info("loss", [])])
    moved = after(plain)
    assert ops(moved) != ops(plain)
    gradients = [run(differentiate(proto, of="loss", wrt=["x"]), {"x": X}) for proto in (plain, moved)]
    for got, want in zip(gradients[1], gradients[0], strict=True):
        np.testing.assert_array_equal(got, want)
    assert Counter(np.sign(gradients[0][-1]).ravel())[0.0] > X.size // 2


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ([relu("x", "h"), pool("h", "y")], ["y", "h"]),
        ([relu("x", "h"), pool("h", "p"), helper.make_node("Add", ["p", "p"], ["y"])], ["y", "p"]),
        ([relu("x", "h"), pool("h", "p", "i"), helper.make_node("Exp", ["p"], ["y"])], ["y", "i"]),
        ([relu("x", "h"), pool("h", "p"), helper.make_node("Exp", ["p"], ["y"]), relu("h", "z")], ["y", "z"]),
        ([helper.make_node("Exp", ["x"], ["h"]), pool("h", "p"), relu("p", "y")], ["y"]),
    ],
    ids=["relu is an output", "pooled is an output", "indices are read", "relu is read elsewhere", "no relu"],
)
def test_left_alone(nodes: list[onnx.NodeProto], outputs: list[str]) -> None:
    proto = model(nodes, *outputs)
    assert ops(after(proto)) == ops(proto)
