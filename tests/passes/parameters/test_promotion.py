from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

from onnxtrain.errors import ModelError
from onnxtrain.passes import canonicalize, embed_parameters, load_model, promote_initializers, to_proto
from passes._models import build, info, mlp, normal, run

X = normal(5, 3)


def test_promoted_initializers_are_inputs_in_the_given_order():
    proto = mlp()
    model = canonicalize(load_model(proto))
    tensors = promote_initializers(model, ["w2", "b1"])
    assert list(tensors) == ["w2", "b1"]
    assert [value.name for value in model.graph.inputs] == ["x", "w2", "b1"]
    assert list(model.graph.initializers) == ["w1", "b2"]
    result = to_proto(model)
    onnx.checker.check_model(result, full_check=True)
    feed = {"x": X, **{name: tensor.numpy() for name, tensor in tensors.items()}}
    np.testing.assert_array_equal(run(result, feed)[0], run(proto, {"x": X})[0])


def test_embedding_is_the_inverse():
    proto = mlp()
    model = canonicalize(load_model(proto))
    before = to_proto(model)
    names = ["w1", "b1", "w2", "b2"]
    arrays = {name: tensor.numpy() for name, tensor in promote_initializers(model, names).items()}
    embed_parameters(model, arrays)
    after = to_proto(model)
    assert [tensor.name for tensor in after.graph.initializer] == names
    assert [value.name for value in after.graph.input] == ["x"]
    np.testing.assert_array_equal(run(after, {"x": X})[0], run(before, {"x": X})[0])


def test_embedded_values_are_used():
    model = canonicalize(load_model(mlp()))
    promote_initializers(model, ["w2", "b2"])
    embed_parameters(model, {"b2": np.float32([1, 2]), "w2": np.zeros((4, 2), np.float32)})
    np.testing.assert_array_equal(run(to_proto(model), {"x": X})[0], np.tile(np.float32([1, 2]), (5, 1)))


def test_bfloat16_goes_both_ways():
    weight = np.array([1.5, -2.0, 3.0], ml_dtypes.bfloat16)
    nodes = [helper.make_node("Cast", ["w"], ["f"], to=1), helper.make_node("Mul", ["x", "f"], ["y"])]
    model = canonicalize(load_model(build(nodes, [info("x", [3])], [info("y", [3])], {"w": weight})))
    tensors = promote_initializers(model, ["w"])
    assert tensors["w"].numpy().dtype == ml_dtypes.bfloat16
    embed_parameters(model, {"w": weight * 2})
    result = run(to_proto(model), {"x": np.ones(3, np.float32)})[0]
    np.testing.assert_array_equal(result, np.float32([3, -4, 6]))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["w1", "w9"],
            "Cannot turn 'w9' into inputs .* not among the model's initializers \\(w1, b1, w2, b2\\)",
        ),
        (["x"], "Cannot turn 'x' into inputs"),
        (["w1", "w1"], "'w1' is named more than once"),
    ],
)
def test_promoting_wrong_names_changes_nothing(names, message):
    model = canonicalize(load_model(mlp()))
    before = to_proto(model)
    with pytest.raises(ModelError, match=message):
        promote_initializers(model, names)
    assert to_proto(model) == before


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("absent", np.zeros(1, np.float32), "Cannot embed 'absent': not among the graph's inputs"),
        ("b2", np.zeros(2, np.float64), "Cannot embed 'b2': the graph expects FLOAT, got DOUBLE"),
        ("b2", np.zeros(3, np.float32), r"Cannot embed 'b2': the graph expects shape \[2\], got \[3\]"),
        ("b2", np.zeros((1, 2), np.float32), r"expects shape \[2\], got \[1, 2\]"),
    ],
)
def test_embedding_wrong_values_changes_nothing(name, array, message):
    model = canonicalize(load_model(mlp()))
    promote_initializers(model, ["w2", "b2"])
    before = to_proto(model)
    with pytest.raises(ModelError, match=message):
        embed_parameters(model, {"w2": np.zeros((4, 2), np.float32), name: array})
    assert to_proto(model) == before
