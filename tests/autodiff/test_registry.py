"""The rule table is open: what an error message asks for can be registered, for every op, for good or for a while."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from onnxtrain import op_bodies
from onnxtrain.autodiff import Signature, _registry, differentiate, local_rules, vjp
from onnxtrain.errors import NoGradientRule, RuleDefinitionError
from onnxtrain.functions import gelu_gradient
from tolerances import NORM_RELATIVE, norm_relative_error

X = np.array([0.3, -1.2, 2.6, 0.9], np.float32)


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the test's own."""
    monkeypatch.setattr(op_bodies._GLOBAL, "shapes", dict(op_bodies._GLOBAL.shapes))
    for name in ("RULES", "NON_DIFFERENTIABLE", "NOT_YET"):
        monkeypatch.setattr(_registry, name, dict(getattr(_registry, name)))


def model(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[4] x, float s) => (float y) {{ {body} }}'
    )


def gradient(proto: onnx.ModelProto) -> np.ndarray:
    session = ort.InferenceSession(differentiate(proto, "y", ["x"]).SerializeToString())
    return session.run(["x_grad"], {"x": X, "s": np.array(0.1, np.float32)})[0]


QUANTIZED = model(
    "q = QuantizeLinear(x, s)  d = DequantizeLinear(q, s)  e = Mul(d, d)  y = ReduceSum<keepdims=0>(e)"
)


def test_rounding_to_integers_is_trained_straight_through() -> None:
    """d sum(d²) / dx = 2 d, where the rules pass cotangents through the integers, which are unsigned."""
    with pytest.raises(NoGradientRule, match=r"register_gradient.*override=True"):
        differentiate(QUANTIZED, "y", ["x"])
    vjp("QuantizeLinear", wrt=("x",), straight_through=True)(lambda op, n, ct: ct)
    vjp("DequantizeLinear", wrt=("x",), override=True)(lambda op, n, ct: ct)
    np.testing.assert_allclose(gradient(QUANTIZED), 2 * np.round(X / 0.1).clip(0) * 0.1, rtol=1e-5)


def test_a_rule_for_integers_must_say_so() -> None:
    with pytest.raises(RuleDefinitionError, match="straight_through=True"):
        vjp("QuantizeLinear", wrt=("x",))(lambda op, n, ct: ct)


def test_a_rule_is_replaced_when_asked_to_only() -> None:
    with pytest.raises(RuleDefinitionError, match="override=True"):
        vjp("Abs", wrt=("X",))(lambda op, n, ct: ct)
    vjp("Abs", wrt=("X",), override=True)(lambda op, n, ct: op.Mul(ct, 7.0))
    np.testing.assert_allclose(gradient(model("a = Abs(x)  y = ReduceSum<keepdims=0>(a)")), 7 * np.ones(4))


def test_local_rules_end_with_their_block() -> None:
    floor = model("a = Floor(x)  b = Abs(a)  y = ReduceSum<keepdims=0>(b)")
    with local_rules():
        vjp("Floor", wrt=("X",))(lambda op, n, ct: op.Mul(ct, 2.0))
        with local_rules():
            vjp("Abs", wrt=("X",))(lambda op, n, ct: ct)
            np.testing.assert_allclose(gradient(floor), 2 * np.ones(4))
        np.testing.assert_allclose(gradient(floor), 2 * np.sign(np.floor(X)))
        with pytest.raises(RuleDefinitionError, match="has already registered a rule for this op"):
            vjp("Floor", wrt=("X",))(lambda op, n, ct: ct)
    np.testing.assert_allclose(gradient(floor), np.zeros(4))


def test_what_subgraphs_read_may_not_be_forgotten_by_a_rule() -> None:
    branch = model(
        """z = ReduceSum<keepdims=0>(x)  c = Less(z, s)
        y = If(c) <then_branch = t () => (float a) { a = Mul(z, z) }, else_branch = e () => (float b) { b = Neg(z) }>"""
    )
    vjp("If", wrt=("cond",), override=True)(lambda op, n, ct: None)
    with pytest.raises(NoGradientRule, match="with respect to 'z', which its subgraphs read"):
        differentiate(branch, "y", ["x"])


def test_shapes_behind_an_op_of_another_domain_are_stated_with_its_rule() -> None:
    """onnxruntime's BiasGelu and FusedMatMul; a gradient of both, without a shape declared in the model."""
    signature = Signature(("A", "B"), ("C",), attributes={"alpha": 1.0, "transA": 0, "transB": 0})
    vjp(
        "BiasGelu",
        domain="com.microsoft",
        wrt=("A", "B"),
        broadcasts=True,
        signature=signature,
        shapes=lambda op, n: op.Add(n.A, n.B),
    )(lambda op, n, ct: [op.call(gelu_gradient, op.Add(n.A, n.B), ct)] * 2)
    vjp(
        "FusedMatMul",
        domain="com.microsoft",
        wrt=("B",),
        signature=signature,
        shapes=lambda op, n: op.MatMul(n.A, op.Transpose(n.B, perm=[1, 0]) if n.attr("transB") else n.B),
    )(lambda op, n, ct: op.Mul(op.MatMul(op.Transpose(ct, perm=[1, 0]), n.A), n.attr("alpha")))
    rng = np.random.default_rng(0)
    values = {"w": (4, 4), "b": (4,), "v": (3, 4), "u": (3, 2)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in values.items()}
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g (float[n, 4] x) => (float y)
        { a = MatMul(x, w)  h = com.microsoft.BiasGelu(a, b)
          m = com.microsoft.FusedMatMul<transB = 1, alpha = 0.5>(h, v)
          o = MatMul(m, u)  y = ReduceSum<keepdims=0>(o) }"""
    )
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    step = differentiate(proto, "y", ["v", "u"])
    x = rng.normal(size=(5, 4)).astype(np.float32)
    got = ort.InferenceSession(step.SerializeToString()).run(["v_grad", "u_grad"], {"x": x})
    t = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    hidden = torch.nn.functional.gelu(torch.tensor(x) @ t["w"] + t["b"])
    (0.5 * hidden @ t["v"].T @ t["u"]).sum().backward()
    for name, gradient in zip(("v", "u"), got, strict=True):
        assert norm_relative_error(gradient, t[name].grad.numpy()) <= NORM_RELATIVE[gradient.dtype]


def test_an_attribute_that_an_op_of_another_domain_does_not_have_is_refused() -> None:
    signature = Signature(("X",), ("Y",), attributes={"alpha": 2.0})
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "my": 1]> g (float[4] x) => (float y)
        { a = my.Op(x)  y = ReduceSum<keepdims=0>(a) }"""
    )
    vjp("Op", domain="my", wrt=("X",), signature=signature)(lambda op, n, ct: op.Mul(ct, n.attr("alhpa")))
    with pytest.raises(RuleDefinitionError, match="Op has no attribute 'alhpa'"):
        differentiate(proto, "y", ["x"])
    vjp("Op", domain="my", wrt=("X",), signature=signature, override=True)(
        lambda op, n, ct: op.Mul(ct, n.attr("alpha"))
    )
    constants = [t for t in differentiate(proto, "y", ["x"]).graph.initializer if t.data_type == 1]
    assert 2.0 in {float(onnx.numpy_helper.to_array(t).reshape(-1)[0]) for t in constants}
