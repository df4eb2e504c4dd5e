"""`benchmarks/files/judge.py` says that a right gradient is right, and that a wrong one is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxtrain.autodiff import local_rules, vjp

PLACE = Path(__file__).parents[2] / "benchmarks" / "files"


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, Any]]:
    monkeypatch.syspath_prepend(str(PLACE))
    found: Callable[[Path], dict[str, Any]] = __import__("judge").judge
    for name in ("judge", "judges", "differences", "files", "surrogate", "quantized_ops"):
        monkeypatch.delitem(sys.modules, name)  # names that others may have
    return found


def write(path: Path, text: str, **weights: tuple[int, ...]) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 19]> g {text}')
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        array = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return path


def test_a_net_is_right_and_with_a_wrong_rule_it_is_wrong(
    judge: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    text = "(float[N, 4] x) => (float[N, 3] y) { h = MatMul(x, w)  t = Tanh(h)  y = Add(t, b) }"
    path = write(tmp_path / "net.onnx", text, w=(4, 3), b=(3,))
    assert judge(path)["verdict"] == "trained"
    with local_rules():
        vjp("Tanh", wrt=("input",), override=True)(lambda op, n, ct: op.Mul(ct, op.Sub(1.0, n.out.output)))
        assert judge(path)["verdict"] == "wrong"


def test_a_quantized_net_is_compared_without_its_jumps(
    judge: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    text = """(float[N, 4] x) => (float[N, 3] y) <int8 z = {3}> {
        q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z)
        m = MatMul(d, w)
        y = Tanh(m)
    }"""
    path = write(tmp_path / "net.onnx", text, w=(4, 3), s=())
    found = judge(path)
    assert found["verdict"] == "trained", found
    assert found["straight_through"]
    assert "rounded as before" in found["judge"]


def test_what_holds_no_float_has_no_parameter(
    judge: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    path = write(tmp_path / "net.onnx", "(float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }")
    assert judge(path)["verdict"] == "no parameter"
