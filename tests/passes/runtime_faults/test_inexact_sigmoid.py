"""ExactSigmoidPass, beside float64 NumPy."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.passes import ExactSigmoidPass
from passes._models import run

SIGMOID = """<ir_version: 10, opset_import: ["": 21]>
    net ({dtype}[n] x) => ({dtype}[n] y) {{ y = Sigmoid(x) }}"""
BRANCH = """<ir_version: 10, opset_import: ["": 21]>
    net (float[n] x, bool c) => (float[n] y) {
        y = If(c) <
            then_branch = a () => (float[n] t) { t = Sigmoid(x) }, else_branch = b () => (float[n] e) { e = Neg(x) }
        >
    }"""


def points() -> np.ndarray:
    """Points around 0, at which the sigmoid is small, subnormal, 0 and 1, and NaN."""
    finite = np.array([0.0, 1e-3, 0.5, 5, 9, 16, 18, 40, 80, 95, 104, 1e4, np.inf], np.float32)
    return np.concatenate([-finite, finite, [np.float32(np.nan)]])


def expected(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x.astype(np.float64)))


def test_sigmoid_is_exact() -> None:
    model = ir.from_proto(onnx.parser.parse_model(SIGMOID.format(dtype="float")))
    assert ExactSigmoidPass()(model).modified
    assert not ExactSigmoidPass()(model).modified
    x = points()
    np.testing.assert_allclose(run(ir.to_proto(model), {"x": x})[0], expected(x), rtol=1e-6, atol=1e-38)


def test_sigmoid_in_a_branch_is_exact() -> None:
    model = ir.from_proto(onnx.parser.parse_model(BRANCH))
    assert ExactSigmoidPass()(model).modified
    x = points()
    y = run(ir.to_proto(model), {"x": x, "c": np.array(True)})[0]
    np.testing.assert_allclose(y, expected(x), rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("dtype", ["double", "float16"])
def test_other_dtypes_stay(dtype: str) -> None:
    model = ir.from_proto(onnx.parser.parse_model(SIGMOID.format(dtype=dtype)))
    assert not ExactSigmoidPass()(model).modified


def test_the_kernel_of_onnxruntime_is_inexact() -> None:
    """If this fails, a new ONNX Runtime is exact: ExactSigmoidPass may go."""
    x = np.full(8, -16, np.float32)
    y = run(onnx.parser.parse_model(SIGMOID.format(dtype="float")), {"x": x})[0]
    assert abs(y / expected(x) - 1).max() > 0.1
