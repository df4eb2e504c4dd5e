"""Axes of reductions counted from the front, and none."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from onnxtrain import differentiate
from onnxtrain.passes import PositiveAxesPass, load_model, to_proto
from passes._models import build, info, run


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [[-1], [-2], [1, -3], [0]], ids=str)
def test_reductions_of_no_elements_have_numpys_shape(axes, keepdims):
    nodes = [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=keepdims)]
    constants = {"axes": np.array(axes)}
    model = load_model(build(nodes, [info("x", [None, 3, 4])], [info("y", None)], constants))
    assert PositiveAxesPass()(model).modified == (min(axes) < 0)
    for batch in (0, 2):
        x = np.random.default_rng(0).normal(size=(batch, 3, 4)).astype(np.float32)
        (y,) = run(to_proto(model), {"x": x})
        want = x.sum(tuple(axes), keepdims=bool(keepdims))
        assert y.shape == want.shape
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


def test_onnxruntime_before_1_32_keeps_negative_axes_of_no_elements():
    """PositiveAxesPass may go when 1.32 is the oldest version that pyproject.toml declares."""
    nodes = [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)]
    model = build(nodes, [info("x", [None, 3, 4])], [info("y", None)], {"axes": np.array([-1])})
    (y,) = run(model, {"x": np.zeros((0, 3, 4), np.float32)})
    has_fault = tuple(map(int, ort.__version__.split(".")[:2])) < (1, 32)
    assert y.shape == ((0, 3, 4) if has_fault else (0, 3))


def test_onnxruntime_squeezes_all_axes_if_none_is_given():
    """If this fails, a new ONNX Runtime removes none, as the standard says: NoAxesPass need not rewrite Squeeze."""
    nodes = [helper.make_node("Squeeze", ["x", "axes"], ["y"])]
    model = build(nodes, [info("x", ["n", 3])], [info("y", None)], {"axes": np.zeros(0, np.int64)})
    (y,) = run(model, {"x": np.zeros((1, 3), np.float32)})
    assert y.shape == (3,)


@pytest.mark.parametrize("op", ["Squeeze", "Unsqueeze"])
def test_no_axes_remove_none(op):
    """The gradient of an Unsqueeze is a Squeeze, and the other way round."""
    nodes = [
        helper.make_node(op, ["x", "axes"], ["same"]),
        helper.make_node("Mul", ["same", "same"], ["squares"]),
        helper.make_node("ReduceSum", ["squares"], ["y"], keepdims=0),
    ]
    constants = {"axes": np.zeros(0, np.int64)}
    model = build(nodes, [info("x", ["n", 3])], [info("y", [])], constants)
    x = np.random.default_rng(0).normal(size=(1, 3)).astype(np.float32)
    y, gradient = run(differentiate(model, "y", ["x"]), {"x": x})
    np.testing.assert_allclose(y, (x * x).sum(), rtol=1e-5)
    assert gradient.shape == x.shape
    np.testing.assert_allclose(gradient, 2 * x, rtol=1e-6)
