"""The rule table is open: what an error message asks for can be registered, for every op, for good or for a while."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxtrain.autodiff import _registry, differentiate, local_rules, vjp
from onnxtrain.errors import NoGradientRule, RuleDefinitionError

X = np.array([0.3, -1.2, 2.6, 0.9], np.float32)


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the test's own."""
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
    with pytest.raises(NoGradientRule, match="register a rule with override=True"):
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
        with pytest.raises(RuleDefinitionError, match="this block has registered it already"):
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
