"""A Relu of a reshaped value is computed before the Reshape."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxtrain.autodiff import differentiate
from onnxtrain.passes import ReluBeforeReshapePass, load_model, to_proto
from passes._models import run

X = np.arange(24, dtype=np.float32).reshape(6, 4) % 7 - 3


def model(body: str, outputs: str = "float[2, 3, 4] y") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[6, 4] x) => ({outputs})
        <int64[3] shape = {{2, 3, 4}}> {{ {body} }}"""
    )


def after(proto: onnx.ModelProto) -> onnx.ModelProto:
    changed = load_model(proto)
    ReluBeforeReshapePass()(changed)
    onnx.checker.check_model(to_proto(changed))
    return to_proto(changed)


def ops(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def test_relu_moves_before_the_reshape_and_nothing_changes() -> None:
    plain = model("a = Neg(x) h = Reshape(a, shape) r = Relu(h) y = Add(r, r)")
    moved = after(plain)
    assert ops(moved) == ["Neg", "Relu", "Reshape", "Add"]
    np.testing.assert_array_equal(run(moved, {"x": X})[0], run(plain, {"x": X})[0])


def test_gradient_stays_the_same() -> None:
    plain = model("h = Reshape(x, shape) r = Relu(h) e = Exp(r) y = ReduceSum<keepdims=0>(e)", "float y")
    moved = after(plain)
    assert ops(moved) != ops(plain)
    ours, theirs = (run(differentiate(proto, of="y", wrt=["x"]), {"x": X}) for proto in (moved, plain))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ("h = Reshape(x, shape) y = Relu(h)", "float[2, 3, 4] y"),
        ("h = Reshape(x, shape) r = Relu(h) y = Add(r, h)", "float[2, 3, 4] y"),
        ("h = Reshape(x, shape) r = Relu(h) y = Neg(r)", "float[2, 3, 4] y, float[2, 3, 4] h"),
        ("h = Neg(x) y = Relu(h)", "float[6, 4] y"),
    ],
    ids=["an output", "another reader", "an output between them", "no Reshape"],
)
def test_other_relus_stay(body: str, outputs: str) -> None:
    proto = model(body, outputs)
    assert ops(after(proto)) == ops(proto)
