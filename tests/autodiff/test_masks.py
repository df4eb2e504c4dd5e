"""Masked cotangents: zero where the mask is, also of an infinite one; written as a product where none can come."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from torch.nn import functional

from models import make_model
from onnxtrain.autodiff import differentiate
from onnxtrain.functional import hessian_vector_product
from runtimes import needs_opset

X = np.array([[-1.0, 0.0, 4.0], [9.0, -2.0, 1.0]], np.float32)
W = np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 2.0]], np.float32)
SIX = {"low": np.float32(0), "high": np.float32(6)}


def relu() -> onnx.NodeProto:
    return helper.make_node("Relu", ["x"], ["h"])


def clip() -> onnx.NodeProto:
    return helper.make_node("Clip", ["x", "low", "high"], ["h"])


def gradient_model(nodes: list[onnx.NodeProto], **constants: np.ndarray) -> onnx.ModelProto:
    """The gradient with respect to x of the sum of the last node's result."""
    last = helper.make_node("ReduceSum", [nodes[-1].output[0]], ["y"], keepdims=0)
    model = make_model([*nodes, last], {"x": list(X.shape)}, {"y": []}, constants)
    return differentiate(model, of="y", wrt=["x"])


def gradient(model: onnx.ModelProto) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["x_grad"], {"x": X})[0]


def all_ops(model: onnx.ModelProto) -> set[str]:
    return {n.op_type for part in (model.graph, *model.functions) for n in part.node}


def masks(model: onnx.ModelProto) -> set[str]:
    return all_ops(model) & {"Where"}


@pytest.mark.parametrize(("first", "twin"), [(relu(), functional.relu), (clip(), lambda x: x.clamp(0, 6))])
@pytest.mark.parametrize(
    ("between", "constants"),
    [([], {}), ([("Add", ["one"])], {"one": np.float32(0)}), ([("Transpose", [])], {})],
)
def test_infinite_cotangents_are_masked(first, twin, between, constants) -> None:
    """The root has an infinite slope at zero, which is where a Relu's own is zero."""
    nodes, last = [first], "h"
    for index, (op_type, more) in enumerate(between):
        nodes.append(helper.make_node(op_type, [last, *more], [f"b{index}"]))
        last = f"b{index}"
    nodes.append(helper.make_node("Sqrt", [last], ["root"]))
    model = gradient_model(nodes, **SIX, **constants)
    x = torch.tensor(X, dtype=torch.float64, requires_grad=True)
    twin(x).sqrt().sum().backward()
    expected = x.grad.numpy()
    if first.op_type == "Relu":
        assert np.isfinite(expected).all()
    np.testing.assert_allclose(gradient(model), expected, rtol=1e-6)


@pytest.mark.parametrize(("first", "twin"), [(relu(), functional.relu), (clip(), lambda x: x.clamp(0, 6))])
def test_before_a_product_the_mask_is_a_factor(first, twin) -> None:
    model = gradient_model([first, helper.make_node("MatMul", ["h", "w"], ["p"])], w=W, **SIX)
    assert not masks(model)
    x = torch.tensor(X, dtype=torch.float64, requires_grad=True)
    (twin(x) @ torch.tensor(W, dtype=torch.float64)).sum().backward()
    np.testing.assert_allclose(gradient(model), x.grad.numpy(), rtol=1e-6)


POINTS = np.array([[-1.0, 0.0, 4.0], [3.0, -3.0, 1.0], [-0.25, 0.5, -7.0], [-0.0, 90.0, -90.0]], np.float32)
ACTIVATIONS = {
    "leaky": ("LeakyRelu", {"alpha": 0.1}, [], lambda x: functional.leaky_relu(x, 0.1)),
    "leaky, zero": ("LeakyRelu", {"alpha": 0.0}, [], lambda x: functional.leaky_relu(x, 0.0)),
    "prelu": ("PRelu", {}, ["slope"], lambda x: functional.prelu(x, torch.tensor([0.25], dtype=x.dtype))),
    "elu": ("Elu", {}, [], functional.elu),
    "celu": ("Celu", {"alpha": 2.0}, [], lambda x: functional.celu(x, 2.0)),
    "hard sigmoid": ("HardSigmoid", {"alpha": 1 / 6}, [], functional.hardsigmoid),
    "hard swish": ("HardSwish", {}, [], functional.hardswish),
    "threshold": ("ThresholdedRelu", {"alpha": 0.5}, [], lambda x: functional.threshold(x, 0.5, 0.0)),
    "shrink": ("Shrink", {"lambd": 0.5}, [], lambda x: functional.hardshrink(x, 0.5)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_before_a_product_need_no_where(name: str) -> None:
    op_type, attributes, more, twin = ACTIVATIONS[name]
    nodes = [
        helper.make_node(op_type, ["x", *more], ["h"], **attributes),
        helper.make_node("MatMul", ["h", "w"], ["p"]),
        helper.make_node("ReduceSum", ["p"], ["y"], keepdims=0),
    ]
    constants = {"w": W, **({"slope": np.float32([0.25])} if more else {})}
    model = make_model(nodes, {"x": list(POINTS.shape)}, {"y": []}, constants)
    derived = differentiate(model, of="y", wrt=["x", *more])
    assert not masks(derived)
    session = ort.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.tensor(POINTS, dtype=torch.float64, requires_grad=True)
    (twin(x) @ torch.tensor(W, dtype=torch.float64)).sum().backward()
    np.testing.assert_allclose(session.run(["x_grad"], {"x": POINTS})[0], x.grad, rtol=2e-6, atol=1e-6)
    if more:
        rows = W.sum(1) * np.minimum(POINTS, 0)
        np.testing.assert_allclose(session.run(["slope_grad"], {"x": POINTS})[0], [rows.sum()], rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name not in ("elu", "celu", "prelu")])
def test_infinite_cotangents_of_activations(name: str) -> None:
    """Nothing is NaN that is not NaN in PyTorch."""
    op_type, attributes, more, twin = ACTIVATIONS[name]
    nodes = [helper.make_node(op_type, ["x", *more], ["h"], **attributes)]
    last = helper.make_node("Mul", ["h", "slopes"], ["y"])
    slopes = np.array([[np.inf, -np.inf, np.inf]], np.float32)
    shape = list(POINTS.shape)
    model = make_model([*nodes, last], {"x": shape}, {"y": shape}, {"slopes": slopes})
    derived = differentiate(model, of="y", wrt=["x"], cotangent="ct")
    session = ort.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.tensor(POINTS, requires_grad=True)
    (twin(x) * torch.from_numpy(slopes)).sum().backward()
    got = session.run(["x_grad"], {"x": POINTS, "ct": np.ones_like(POINTS)})[0]
    np.testing.assert_array_equal(got, x.grad)


def test_the_mask_before_a_maximum_over_points_is_a_factor() -> None:
    """As in PointNet: Relu, the maximum over all points, a dense layer."""
    nodes = [
        relu(),
        helper.make_node("ReduceMax", ["h", "axes"], ["most"], keepdims=1),
        helper.make_node("MatMul", ["most", "w"], ["p"]),
    ]
    model = gradient_model(nodes, axes=np.array([0]), w=W)
    assert not masks(model)
    x = torch.tensor(X, dtype=torch.float64, requires_grad=True)
    (x.relu().amax(0) @ torch.tensor(W, dtype=torch.float64)).sum().backward()
    np.testing.assert_allclose(gradient(model), x.grad, rtol=1e-6)


def test_a_second_reader_is_looked_at_too() -> None:
    nodes = [
        relu(),
        helper.make_node("MatMul", ["h", "w"], ["p"]),
        helper.make_node("Sqrt", ["h"], ["root"]),
        helper.make_node("ReduceSum", ["root"], ["r"], keepdims=0),
        helper.make_node("Add", ["p", "r"], ["sum"]),
    ]
    assert masks(gradient_model(nodes, w=W))
    assert np.isfinite(gradient(gradient_model(nodes, w=W))).all()


def test_what_is_differentiated_itself_may_get_anything() -> None:
    """A cotangent of the Relu's own result is given from outside."""
    nodes = [relu(), helper.make_node("ReduceSum", ["h"], ["y"], keepdims=0)]
    model = make_model(nodes, {"x": list(X.shape)}, {"y": []}, {})
    assert masks(differentiate(model, of="y", wrt=["x"]))


CLIPPED = {
    "relu": ("Relu", [], functional.relu),
    "clip": ("Clip", ["low", "high"], lambda x: x.clamp(0, 6)),
    "clip below": ("Clip", ["low"], lambda x: x.clamp(min=0)),
    "clip above": ("Clip", ["", "high"], lambda x: x.clamp(max=6)),
}
REACHED = np.array([[-0.0, 4.0, -0.0], [-1.0, -0.0, 0.5]], np.float32)
"""The reciprocals of these are masked at minus infinity: below the low bound."""


@pytest.mark.parametrize("derivative", ["differentiate", "hessian_vector_product"])
@pytest.mark.parametrize("name", CLIPPED)
def test_second_derivatives_are_masked_before_a_product(name: str, derivative: str) -> None:
    """Behind the reciprocal of zero, the cotangent of the gradient is infinite where the mask is zero."""
    op_type, bounds, twin = CLIPPED[name]
    x, sign = REACHED, -1.0 if name == "clip above" else 1.0
    nodes = [
        helper.make_node("Mul", ["x", "sign"], ["signed"]),
        helper.make_node("Reciprocal", ["signed"], ["r"]),
        helper.make_node(op_type, ["r", *bounds], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["p"]),
        helper.make_node("Mul", ["p", "p"], ["square"]),
        helper.make_node("ReduceSum", ["square"], ["y"], keepdims=0),
    ]
    constants = {**SIX, "w": W, "sign": np.float32(sign)}
    model = make_model(nodes, {"x": list(x.shape)}, {"y": []}, constants)
    if derivative == "differentiate":
        once = differentiate(model, of="y", wrt=["x", "w"])
        twice = differentiate(once, of="x_grad", wrt=["w"], cotangent="v")
        feeds, wanted = {"x": x, "v": np.ones_like(x)}, "w_grad_1"
    else:
        twice = hessian_vector_product(model, of="y", wrt=["x", "w"])
        feeds = {"x": x, "x_vector": np.ones_like(x), "w_vector": np.zeros_like(W)}
        wanted = "w_hvp"
    session = ort.InferenceSession(twice.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run([wanted], feeds)[0]
    leaves = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (x, W)]
    loss = (twin((leaves[0] * sign).reciprocal()) @ leaves[1]).square().sum()
    gradient_of_x = torch.autograd.grad(loss, leaves[0], create_graph=True)[0]
    expected = torch.autograd.grad(gradient_of_x.sum(), leaves[1])[0].numpy()
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("opset", [pytest.param(n, marks=needs_opset(n)) for n in (23, 24)])
def test_rows_of_attention_that_are_all_masked(opset: int) -> None:
    """Rows that attend to nothing give zero, not NaN, the softmax of a row of minus infinities."""
    nodes = [helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"])]
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 2, 3, 4)).astype(np.float32)
    mask = np.array([[True, False, True], [False, False, False], [True, True, True]])
    shapes = {name: list(q.shape) for name in "qkv"}
    model = make_model(nodes, shapes, {"y": list(q.shape)}, {"mask": mask}, opset=opset)
    session = ort.InferenceSession(differentiate(model, "y", list("qkv"), cotangent="ct").SerializeToString())
    tensors = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (q, k, v)]
    ct = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)
    out = functional.scaled_dot_product_attention(*tensors, attn_mask=torch.tensor(mask))
    expected = torch.autograd.grad(out, tensors, torch.tensor(ct, dtype=torch.float64))
    got = session.run(["q_grad", "k_grad", "v_grad"], {"q": q, "k": k, "v": v, "ct": ct})
    for gradient, want in zip(got, expected, strict=True):
        np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-6)
