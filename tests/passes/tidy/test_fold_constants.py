from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from onnxtrain.passes import FoldConstantsPass, canonicalize, is_constant, load_model, to_proto
from passes._models import build, info, normal, run


def folded(nodes, shape, initializers=None, outputs=("y",)) -> ir.Model:
    """Return the canonical form, having checked that it computes the same for a batch of 2."""
    proto = build(
        nodes, [info("x", shape)], [helper.make_empty_tensor_value_info(y) for y in outputs], initializers
    )
    model = canonicalize(load_model(proto))
    x = normal(*(dim if isinstance(dim, int) else 2 for dim in shape))
    feed = {"x": x} if any(value.name == "x" for value in model.graph.inputs) else {}
    for got, want in zip(run(to_proto(model), feed), run(proto, {"x": x}), strict=True):
        np.testing.assert_array_equal(got, want)
    return model


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_arithmetic_on_static_dimensions_beside_symbolic_ones():
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "last"], ["n"]),
        helper.make_node("Div", ["n", "three"], ["third"]),
        helper.make_node("Slice", ["x", "zero", "third", "last"], ["y"]),
    ]
    constants = {"last": np.int64([2]), "three": np.int64([3]), "zero": np.int64([0])}
    model = folded(nodes, ["batch", 4, 24], constants)
    assert ops(model) == ["Slice"]
    third = model.graph.initializers["third"]
    assert third.const_value.numpy().tolist() == [8]
    assert is_constant(third)
    assert str(model.graph.outputs[0].shape) == "[batch,4,8]"


def test_a_slice_from_the_least_integer_on():
    """As PyTorch's exporter writes a slice from the beginning."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Slice", ["s", "least", "two"], ["front"]),
        helper.make_node("Concat", ["front", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    constants = {
        "least": np.array([np.iinfo(np.int64).min]),
        "two": np.int64([2]),
        "rest": np.int64([12]),
    }
    model = folded(nodes, [2, 3, 4, 3], constants)
    assert ops(model) == ["Reshape"]
    assert str(model.graph.outputs[0].shape) == "[2,3,12]"


def test_symbolic_dimensions_are_not_folded():
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "first"], ["n"]),
        helper.make_node("Mul", ["n", "two"], ["m"]),
        helper.make_node("Concat", ["m", "two"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    model = folded(nodes, ["batch", 4], {"first": np.int64([0]), "two": np.int64([2])})
    assert ops(model) == ["Shape", "Gather", "Mul", "Concat", "Reshape"]


def test_the_known_part_of_a_concatenated_shape_is_folded():
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Concat", ["two", "s"], ["all"], axis=0),
        helper.make_node("Gather", ["all", "two"], ["last"]),
        helper.make_node("Slice", ["x", "zero", "last", "one"], ["y"]),
    ]
    constants = {"zero": np.int64([0]), "one": np.int64([1]), "two": np.int64([2])}
    assert ops(folded(nodes, ["batch", 4], constants)) == ["Slice"]


def test_a_constant_at_a_symbolic_index_is_not_folded():
    nodes = [
        helper.make_node("Constant", [], ["squares"], value_ints=[0, 1, 4, 9]),
        helper.make_node("Shape", ["x"], ["n"], end=1),
        helper.make_node("Gather", ["squares", "n"], ["k"]),
        helper.make_node("Expand", ["x", "k"], ["y"]),
    ]
    assert ops(folded(nodes, ["batch", 1])) == ["Shape", "Gather", "Expand"]


def test_parameters_and_what_depends_on_them_stay():
    nodes = [helper.make_node("Mul", ["w", "w"], ["ww"]), helper.make_node("Add", ["x", "ww"], ["y"])]
    model = folded(nodes, ["batch", 4], {"w": normal(4)})
    assert ops(model) == ["Mul", "Add"]
    assert list(model.graph.initializers) == ["w"]


def test_constants_that_are_outputs_keep_their_nodes():
    nodes = [
        helper.make_node("Constant", [], ["c"], value_ints=[1, 2]),
        helper.make_node("Add", ["c", "c"], ["y"]),
        helper.make_node("Relu", ["x"], ["z"]),
    ]
    assert ops(folded(nodes, ["batch", 4], outputs=("y", "z"))) == ["Add", "Relu"]


@pytest.mark.parametrize(("op", "a", "b"), [("Div", -7, 2), ("Mod", -7, 3), ("Div", 7, 0)])
def test_integer_division_on_which_numpy_and_runtimes_differ_is_left_to_the_runtime(op, a, b):
    nodes = [
        helper.make_node(op, ["a", "b"], ["q"]),
        helper.make_node("Cast", ["q"], ["f"], to=1),
        helper.make_node("Mul", ["x", "f"], ["y"]),
    ]
    tensors = {"a": np.int64(a), "b": np.int64(b)}
    model = canonicalize(load_model(build(nodes, [info("x", [2])], [info("y", [2])], tensors)))
    assert ops(model)[0] == op


def test_large_results_are_not_stored():
    nodes = [
        helper.make_node("Constant", [], ["n"], value_ints=[100_000]),
        helper.make_node("ConstantOfShape", ["n"], ["zeros"]),
        helper.make_node("Add", ["x", "zeros"], ["y"]),
    ]
    assert ops(folded(nodes, [1])) == ["ConstantOfShape", "Add"]


def test_random_ops_are_not_folded():
    nodes = [helper.make_node("Bernoulli", ["p"], ["b"]), helper.make_node("Add", ["x", "b"], ["y"])]
    constant = helper.make_node("Constant", [], ["p"], value_floats=[0.5] * 4)
    model = canonicalize(load_model(build([constant, *nodes], [info("x", [4])], [info("y", [4])])))
    assert ops(model) == ["Bernoulli", "Add"]
    assert not FoldConstantsPass()(model).modified
