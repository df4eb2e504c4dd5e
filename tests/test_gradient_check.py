"""Finite differences do not see through what stops gradients."""

from __future__ import annotations

import dataclasses
import io
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.autodiff import NodeView
from onnxtrain.autodiff._registry import RULES
from onnxtrain.emitter import Emitter
from onnxtrain.functional import check_gradients
from onnxtrain.functional.finite_differences import compare

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
nn = torch.nn


def normalised() -> onnx.ModelProto:
    """A linear layer, RINorm, and a nonlinear map."""
    from onnxtrain.nn import RINorm

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), RINorm(4), nn.Tanh())
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.randn(2, 5, 3),), buffer, input_names=["x"], output_names=["y"])
    return onnx.load_from_string(buffer.getvalue())


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_stopped_statistics_are_constants(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if precision == "float32":
        monkeypatch.setattr("onnxtrain.functional.float64_reference.ReferenceEvaluator", None)
    results = check_gradients(normalised())
    assert {result.precision for result in results} == {precision}
    assert {result.shape for result in results} == {(4, 3), (4,)}
    assert all(result.passed for result in results)


def test_output_behind_which_gradients_stop_has_none() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 2] x) => (float[n, 2] y) <float[2] w = {1., 2.}, bool yes = {1}>
        { a = Mul(x, w)  y = Where(yes, a, a) }"""
    )
    (result,) = check_gradients(model, wrt=["w"])
    assert (result.derivative, result.difference) == (0.0, 0.0)


def test_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES["", "Tanh"]
    wrong = dataclasses.replace(rule, function=lambda op, n, ct: op.Mul(ct, 0.9))
    monkeypatch.setitem(RULES, ("", "Tanh"), wrong)
    results = check_gradients(normalised())
    assert not any(result.passed for result in results)


def test_random_inputs_have_the_sizes_of_the_given_ones() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 2] x, float[n] z) => (float[n] y) <float[2] w = {1., 2.}>
        { a = MatMul(x, w)  y = Mul(a, z) }"""
    )
    (result,) = check_gradients(model, inputs={"x": np.ones((7, 2), np.float32)})
    assert result.passed


def test_a_reference_that_errs_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output is compared with onnxruntime's first; a right gradient would differ from its differences."""
    from onnx.reference.ops.op_tanh import Tanh

    monkeypatch.setattr(Tanh, "_run", lambda self, x: (np.tanh(1.1 * x),))
    results = check_gradients(normalised())
    assert {result.precision for result in results} == {"float32"}
    assert all(result.passed for result in results)


def attention() -> onnx.ModelProto:
    """One head with biases. Softmax is blind to the bias of the keys, which moves all scores of a query alike."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, s, 8] x) => (float[n, s, 8] y) {
            qx = MatMul(x, wq)  q = Add(qx, bq)  kx = MatMul(x, wk)  k = Add(kx, bk)  vx = MatMul(x, wv)
            t = Transpose<perm = [0, 2, 1]>(k)  z = MatMul(q, t)  a = Softmax<axis = -1>(z)  y = MatMul(a, vx) }""")
    rng = np.random.default_rng(0)
    shapes = {"wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "bq": (8,), "bk": (8,)}
    for name, shape in shapes.items():
        value = rng.standard_normal(shape) / len(shape)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    return model


@pytest.mark.parametrize("seed", range(5))
def test_a_gradient_of_rounding_alone_agrees(seed: int) -> None:
    """Its terms are of the size of the others' gradients, and cancel."""
    results = {result.name: result for result in check_gradients(attention(), seed=seed)}
    assert all(result.passed for result in results.values()), results
    assert 0 < results["bk"].norm < 1e-5 * results["bq"].norm


@pytest.mark.parametrize("part", [1e-1, 1e-3, 1e-5])
def test_terms_that_do_not_cancel_as_they_should_are_found(
    part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule of Softmax that is wrong by a small part of its terms: the bias of the keys has a gradient then."""
    rule = RULES["", "Softmax"]

    def wrong(op: Emitter, n: NodeView, ct: ir.Value) -> ir.Value:
        return op.Add(rule.function(op, n, ct), op.Mul(op.Mul(ct, n.out.output), part))

    monkeypatch.setitem(RULES, ("", "Softmax"), dataclasses.replace(rule, function=wrong))
    for seed in range(3):
        results = {result.name: result for result in check_gradients(attention(), seed=seed)}
        assert results["bk"].verdict == "differs", results["bk"]
        # The rule of Softmax has no part in this one.
        assert results["wv"].passed


def test_a_kink_at_the_parameter_is_inconclusive() -> None:
    """ReLU of zeros has slope 0 as in PyTorch; central differences have one half."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 2] x) => (float[n, 2] y) <float[2] w = {0.0, 0.0}, float[2] b = {1.0, 2.0}>
        { a = Mul(x, w)  r = Relu(a)  y = Add(r, b) }""")
    kinked, smooth = check_gradients(model, wrt=["w", "b"])
    assert (kinked.verdict, smooth.verdict) == ("inconclusive", "agrees")
    assert "kink" in kinked.reason
    assert not kinked.passed


def test_a_wrong_gradient_beside_a_kink_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        RULES,
        ("", "Relu"),
        dataclasses.replace(RULES["", "Relu"], function=lambda op, n, ct: op.Mul(ct, 3.0)),
    )
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[1, 1] x) => (float[1, 1] y) <float[1] w = {0.0}> { a = Mul(x, w)  y = Relu(a) }""")
    (result,) = check_gradients(model)
    assert result.verdict == "differs"


GELU = {
    "Gelu": "g = Gelu(h)",
    "Erf": """r = Constant<value_float = 0.70710678>()  s = Mul(h, r)  e = Erf(s)
        i = Constant<value_float = 1.0>()  f = Add(e, i)  q = Mul(h, f)
        o = Constant<value_float = 0.5>()  g = Mul(q, o)""",
}


@pytest.mark.parametrize("spelling", GELU)
def test_gelu_is_differenced_in_float64(spelling: str) -> None:
    """Of a transformer's two layers; onnx's own Erf rounds to float32, and so differences to a hundredth."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[n, 8] x) => (float[n, 8] y) {{
            h = Gemm(x, w, b)  {GELU[spelling]}
            d = MatMul(g, v)  t = Add(d, x)  y = LayerNormalization(t, scale) }}""")
    rng = np.random.default_rng(0)
    for name, shape in {"w": (8, 16), "b": (16,), "v": (16, 8), "scale": (8,)}.items():
        array = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    results = check_gradients(model)
    assert [result.name for result in results] == ["w", "b", "v", "scale"]
    assert max(result.error for result in results) < 1e-4


@pytest.mark.parametrize(
    ("function", "derivative", "verdict"),
    [
        (lambda t: np.sin(3 * t), 3.0, "agrees"),
        (lambda t: np.sin(3 * t), 2.9, "differs"),
        (lambda t: abs(t - 2e-5) + t, 0.0, "agrees"),  # a kink between the first step and the second
        (lambda t: max(t, 0.0), 0.0, "inconclusive"),
        (lambda t: max(t, 0.0), 1.2, "differs"),
        (lambda t: t + 1e-2 * np.sin(1e9 * t), 1.0, "inconclusive"),  # noise at every step
        (lambda t: t + 1e-8 * np.sin(1e9 * t), 1.0, "agrees"),  # at the first ones only
    ],
)
def test_differences_are_taken_at_steps_where_they_settle(function, derivative: float, verdict: str) -> None:
    found = compare(lambda t: float(function(t)), derivative, 1e-5, 1e-4)
    assert found.verdict == verdict
    assert bool(found.reason) == (verdict == "inconclusive")
