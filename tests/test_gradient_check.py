"""Finite differences do not see through what stops gradients."""

from __future__ import annotations

import dataclasses
import io
import warnings

import numpy as np
import onnx
import pytest

from onnxtrain.autodiff._registry import RULES
from onnxtrain.gradient_check import check_gradients

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
        monkeypatch.setattr("onnxtrain.gradient_check.ReferenceEvaluator", None)
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
