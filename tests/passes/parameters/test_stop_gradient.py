"""The nodes `onnxtrain.nn.stop_gradient` leaves in an exported graph stop gradients and change no value."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnxtrain.autodiff import differentiate
from onnxtrain.passes import (
    CleanupPass,
    canonicalize,
    is_stop_gradient,
    load_model,
    mark_stopped_gradients,
    to_proto,
)
from passes._models import build, info, normal, run

X = normal(4)


def product(where, *, extra=(), initializers=None, inputs=()):
    """y = x * where(...), with whatever condition the node reads."""
    nodes = [*extra, helper.make_node("Where", where, ["w"]), helper.make_node("Mul", ["x", "w"], ["p"])]
    nodes.append(helper.make_node("ReduceSum", ["p"], ["y"], keepdims=0))
    return build(nodes, [info("x", [4]), *inputs], [info("y", [])], initializers)


def as_initializer():
    return product(["c", "x", "x"], initializers={"c": np.array(True)})


def as_constant_node():
    value = helper.make_tensor("c", TensorProto.BOOL, [], [True])
    return product(["c", "x", "x"], extra=[helper.make_node("Constant", [], ["c"], value=value)])


def gradient(proto):
    step = differentiate(proto, of="y", wrt=["x"])
    return run(step, {"x": X})[1]


@pytest.mark.parametrize("make", [as_initializer, as_constant_node])
def test_a_choice_between_a_value_and_itself_stops_the_gradient(make):
    proto = make()
    model = canonicalize(load_model(proto))
    assert [node.op_type for node in model.graph if is_stop_gradient(node)] == ["Identity"]
    np.testing.assert_array_equal(run(to_proto(model), {"x": X})[0], run(proto, {"x": X})[0])
    np.testing.assert_allclose(gradient(proto), X)  # 2 x without the stop


def test_condition_is_removed_unless_something_else_reads_it():
    step = differentiate(as_initializer(), of="y", wrt=["x"])
    assert "c" not in [tensor.name for tensor in step.graph.initializer]
    shared = product(
        ["c", "x", "x"], extra=[helper.make_node("Not", ["c"], ["n"])], initializers={"c": np.array(True)}
    )
    shared.graph.output.append(info("n", [], TensorProto.BOOL))
    results = run(differentiate(shared, of="y", wrt=["x"]), {"x": X})
    np.testing.assert_allclose(results[-1], X)
    unused = as_initializer()
    unused.graph.initializer.append(helper.make_tensor("own", TensorProto.BOOL, [], [True]))
    kept = differentiate(unused, of="y", wrt=["x"])
    assert [tensor.name for tensor in kept.graph.initializer if tensor.data_type == TensorProto.BOOL] == [
        "own"
    ]


def test_the_mark_survives_cleanup_saving_and_differentiating_again():
    model = canonicalize(load_model(as_initializer()))
    CleanupPass()(model)
    np.testing.assert_allclose(gradient(to_proto(model)), X)
    first = differentiate(as_initializer(), of="y", wrt=["x"])
    second = differentiate(first, of="x_grad", wrt=["x"], cotangent="v")
    np.testing.assert_array_equal(run(second, {"x": X, "v": X})[-1], np.zeros(4))


@pytest.mark.parametrize(
    "proto",
    [
        product(["c", "x", "z"], initializers={"c": np.array(True), "z": X}),
        product(["c", "x", "x"], initializers={"c": np.array(False)}),
        product(["c", "x", "x"], initializers={"c": np.ones(4, bool)}),
        product(["c", "x", "x"], inputs=[info("c", [], TensorProto.BOOL)]),
    ],
    ids=["two values", "false", "a mask", "condition of run time"],
)
def test_other_choices_are_left_alone(proto):
    model = load_model(proto)
    mark_stopped_gradients(model)
    assert [node.op_type for node in model.graph] == [node.op_type for node in proto.graph.node]
