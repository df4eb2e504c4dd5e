"""An If whose condition is known when the model is built is trained as the branch that is taken."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper

from onnxtrain.autodiff import differentiate
from onnxtrain.passes import canonicalize, load_model

W = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
X = np.random.default_rng(0).normal(size=(3, 1, 4)).astype(np.float32)


def model(body: str, outputs: str = "float y") -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[n, 1, 4] x, bool flag) => ({outputs}) {{ {body} }}'
    )
    proto.graph.initializer.append(numpy_helper.from_array(W, "w"))
    return proto


SQUEEZE = """one = Constant<value_ints = [1]>()  xw = Mul(x, w)  s = Shape<start = 1, end = 2>(xw)
    c1 = Equal(s, one)  c = Squeeze(c1)
    z = If(c) <then_branch = t () => (float[n, 4] a) { a = Squeeze(xw, one) },
               else_branch = e () => (float[n, 1, 4] b) { b = Identity(xw) }>
    q = Mul(z, z)  y = ReduceSum<keepdims = 0>(q)"""
BY_RANK = """xw = Mul(x, w)  s = Shape(xw)  r = Size(s)  two = Constant<value_int = 2>()  c = Equal(r, two)
    z = If(c) <then_branch = t () => (float[n, 4] a) { m = Neg(xw)  a = Squeeze(m) },
               else_branch = e () => (float[n, 1, 4] b) { m = Mul(xw, xw)  b = Mul(m, xw) }>
    v = If(c) <then_branch = t () => (float[n, 4] a) { m = Neg(xw)  a = Squeeze(m) },
               else_branch = e () => (float[n, 1, 4] b) { m = Mul(z, w)  b = Neg(m) }>
    y = ReduceSum<keepdims = 0>(v)"""
NESTED = """c = Constant<value = bool {1}>()  xw = Mul(x, w)
    z = If(c) <then_branch = t () => (float[n, 1, 4] a) { d = Not(c)
            a = If(d) <then_branch = t2 () => (float[n, 1, 4] k) { k = Neg(xw) },
                       else_branch = e2 () => (float[n, 1, 4] l) { l = Mul(xw, xw) }> },
               else_branch = e () => (float[n, 1, 4] b) { b = Identity(xw) }>
    y = ReduceSum<keepdims = 0>(z)"""

CASES = {
    "squeeze": (SQUEEZE, lambda xw, w: (xw**2).sum()),
    "rank, equal names in the branches": (BY_RANK, lambda xw, w: -(xw**3 * w).sum()),
    "nested": (NESTED, lambda xw, w: (xw**2).sum()),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_the_branch(case: str) -> None:
    body, twin = CASES[case]
    step = differentiate(model(body), "y", ["w"])
    assert "If" not in {node.op_type for node in step.graph.node}
    loss, gradient = ort.InferenceSession(step.SerializeToString()).run(
        ["y", "w_grad"], {"x": X, "flag": np.array(True)}
    )
    w = torch.tensor(W, requires_grad=True)
    expected = twin(torch.tensor(X) * w, w)
    expected.backward()
    assert w.grad is not None
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, w.grad.numpy(), rtol=1e-5)


def test_outputs_keep_their_names() -> None:
    body = """c = Constant<value = bool {0}>()  xw = Mul(x, w)
        y, p = If(c) <then_branch = t () => (float[n, 1, 4] a, float[n, 1, 4] d) { a = Neg(xw)  d = Abs(xw) },
                      else_branch = e () => (float[n, 1, 4] b, float[n, 1, 4] d) { b = Exp(xw)  d = Identity(xw) }>"""
    proto = model(body, "float[n, 1, 4] y, float[n, 1, 4] p")
    canonical = canonicalize(load_model(proto))
    assert [value.name for value in canonical.graph.outputs] == ["y", "p"]
    assert "If" not in {node.op_type for node in canonical.graph}
    results = [
        ort.InferenceSession(m.SerializeToString()).run(None, {"x": X, "flag": np.array(True)})
        for m in (proto, ir.to_proto(canonical))
    ]
    for got, want in zip(results[1], results[0], strict=True):
        np.testing.assert_array_equal(got, want)
