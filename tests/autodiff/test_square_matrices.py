"""Inverses and Cholesky factors: values, and gradients, against torch in float64 and finite differences."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from fusion.rewriting import with_gradients
from onnxtrain.emitter import Emitter
from onnxtrain.functions import cholesky, inverse
from onnxtrain.runtime.device import parse_device
from onnxtrain.runtime.session import open_session
from slopes import assert_gradient
from tolerances import NORM_RELATIVE, norm_relative_error

TWINS = {inverse: torch.linalg.inv, cholesky: torch.linalg.cholesky}
SHAPES = [(1, 1), (4, 4), (3, 4, 4), (2, 3, 5, 5), (0, 3, 3)]
each_composite = pytest.mark.parametrize("composite", TWINS, ids=lambda composite: composite.name)


def session(composite, shape, dtype, symbolic: bool) -> ort.InferenceSession:
    """Outputs y, a_grad of inputs a, ct."""
    dims = [f"d{axis}" for axis in range(len(shape) - 2)] + ["n", "n"] if symbolic else list(shape)
    kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
    a = ir.Value(name="a", type=kind, shape=ir.Shape(dims))
    graph = ir.Graph([a], [], nodes=[], opset_imports={"": 21}, name="solving")
    model = ir.Model(graph, ir_version=10)
    op = Emitter(graph, functions=model.functions)
    y = op.call(inverse, a, _outputs=2)[0] if composite is inverse else op.call(cholesky, a)
    y.name, y.shape = "y", a.shape
    graph.outputs.append(y)
    joint = with_gradients(model, ["a"])
    onnx.checker.check_model(joint)
    return open_session(joint.SerializeToString(), "model", parse_device("cpu"), None)


def sampled(composite, shape):
    """Matrices of which pivoting must change the rows; positive definite ones, with another upper triangle."""
    rng = np.random.default_rng(shape[-1])
    a = rng.normal(size=shape)
    if composite is cholesky:
        a = a @ np.swapaxes(a, -1, -2) + 2 * np.eye(shape[-1])
    elif shape[-1] > 1:
        a[..., 0, 0] = 0
    return {"a": a, "ct": rng.normal(size=shape)}


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_composite
def test_vjp_matches_torch(composite, shape, dtype, symbolic):
    feeds = {name: value.astype(dtype) for name, value in sampled(composite, shape).items()}
    a, ct = (torch.from_numpy(value.astype(np.float64)) for value in feeds.values())
    y = TWINS[composite](a.requires_grad_())
    want = [y.detach(), *torch.autograd.grad(y, [a], ct)]
    got = session(composite, shape, dtype, symbolic).run(None, feeds)
    for value, reference in zip(got, want, strict=True):
        assert value.dtype == dtype
        assert value.shape == tuple(reference.shape)
        # Matrices of condition numbers up to a thousand.
        assert norm_relative_error(value, reference.numpy()) <= 100 * NORM_RELATIVE[np.dtype(dtype)]


@each_composite
def test_vjp_matches_finite_differences(composite):
    step, feeds = session(composite, (4, 4), np.float64, False), sampled(composite, (4, 4))
    _, gradient = step.run(None, feeds)
    direction = np.random.default_rng(1).normal(size=(4, 4))
    direction += direction.T  # of a factor only the derivative along symmetric matrices is defined

    def loss(a):
        return (step.run(["y"], feeds | {"a": a})[0] * feeds["ct"]).sum()

    assert_gradient(loss, feeds["a"], gradient, direction)


def test_what_is_no_inverse_or_factor_can_be_told():
    singular = np.array([[1.0, 2.0], [2.0, 4.0]])
    indefinite = np.array([[1.0, 2.0], [2.0, 1.0]])
    zero = np.zeros((2, 2))
    assert not np.isfinite(
        session(inverse, (2, 2), np.float64, False).run(["y"], {"a": singular, "ct": zero})
    ).all()
    factor = session(cholesky, (2, 2), np.float64, False).run(["y"], {"a": indefinite, "ct": zero})[0]
    assert not (np.diagonal(factor) > 0).all()
