"""Axes of reductions counted from the front, and none."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from onnxtrain import differentiate
from onnxtrain.passes import PositiveAxesPass, load_model, to_proto
from passes._models import build, info, run


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [[-1], [-2], [1, -3], [0]], ids=str)
def test_reductions_of_no_elements_have_numpys_shape(axes, keepdims):
    """The runtime gives them that of their input where an axis is negative."""
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


@pytest.mark.parametrize("op", ["Squeeze", "Unsqueeze"])
def test_no_axes_remove_none(op):
    """By a Squeeze of no axes, the gradient of such an Unsqueeze, the runtime removes all of size one."""
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
