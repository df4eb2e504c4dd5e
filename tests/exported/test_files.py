"""`benchmarks/files/judge.py` says that a right gradient is right, and that a wrong one is wrong."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import quantize_dynamic

from onnxtrain.autodiff import local_rules, vjp

PLACE = Path(__file__).parents[2] / "benchmarks" / "files"


OWN = ("judge", "judges", "differences", "files", "surrogate", "quantized_ops", "reference", "rounding")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The modules of the folder by name. Others may have the names, so that they do not stay in `sys.modules`."""
    for name in OWN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(PLACE))
    importlib.import_module("judge")
    found = {name: sys.modules[name] for name in OWN}
    for name in OWN:
        monkeypatch.delitem(sys.modules, name)
    return found


@pytest.fixture
def judge(programs: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    return programs["judge"].judge  # type: ignore[no-any-return]


def write(path: Path, text: str, **weights: tuple[int, ...]) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 19, "com.microsoft": 1]> g {text}')
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        array = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return path


def test_a_net_is_right_and_with_a_wrong_rule_it_is_wrong(
    judge: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    text = "(float[N, 4] x) => (float[N, 3] y) { h = MatMul(x, w)  t = Tanh(h)  y = Add(t, b) }"
    path = write(tmp_path / "net.onnx", text, w=(4, 3), b=(3,))
    assert judge(path)["verdict"] == "trained"
    with local_rules():
        vjp("Tanh", wrt=("input",), override=True)(lambda op, n, ct: op.Mul(ct, op.Sub(1.0, n.out.output)))
        assert judge(path)["verdict"] == "wrong"


FUSED = "(float[N, 4] x) => (float[N, 3] y) { a = MatMul(x, w)  b = com.microsoft.BiasGelu(a, c)  y = MatMul(b, v) }"
SHAPES = {"w": (4, 6), "c": (6,), "v": (6, 3)}
FEEDS = {"x": np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)}


def test_ops_of_onnxruntime_are_judged_in_float64(
    judge: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    path = write(tmp_path / "net.onnx", FUSED, **SHAPES)
    found = judge(path, feeds=FEEDS)
    assert (found["verdict"], found["parameters"]) == ("trained", 3), found
    assert found["judge"] == "file, float64, reference evaluator"
    assert found["error"] < 1e-5
    assert found["losses"][-1] < found["losses"][0]
    with local_rules():
        vjp("Gelu", wrt=("X",))(lambda op, n, ct: op.Mul(ct, op.Sigmoid(op.Mul(n.X, 1.702))))
        assert judge(path, feeds=FEEDS)["verdict"] == "wrong"


@pytest.mark.filterwarnings("ignore")  # of the quantizer
def test_a_file_of_the_quantizer_is_judged_as_if_nothing_was_rounded(
    judge: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    quantize_dynamic(write(tmp_path / "net.onnx", FUSED, **SHAPES), tmp_path / "quantized.onnx")
    found = judge(tmp_path / "quantized.onnx", feeds=FEEDS)
    assert found["verdict"] == "trained", found
    assert found["judge"] == "file, rounded as before, float64, reference evaluator"


def test_parameters_are_found_under_other_names_and_transposed(
    programs: dict[str, Any], tmp_path: Path
) -> None:
    """Exporters fold the transpose of a weight into another initializer, beside it if the weight is tied."""
    text = "(float[N, 4] x) => (float[N, 4] y) { h = MatMul(x, w)  t = Add(h, z)  y = MatMul(t, w_t) }"
    model = onnx.load(write(tmp_path / "net.onnx", text, w=(4, 3)))
    w = onnx.numpy_helper.to_array(model.graph.initializer[0])
    for name, array in {"w_t": w.T, "z": np.zeros(3, np.float32)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
    places = programs["judges"]._places
    assert places(model, {"w": w}) == {"w": [("w", False), ("w_t", True)]}
    assert places(model, {"fc.weight": w.T}) == {"fc.weight": [("w_t", False), ("w", True)]}
    assert places(model, {"z": np.zeros(3)}) == {"z": [("z", False)]}
    with pytest.raises(LookupError, match="no parameter other"):
        places(model, {"other": 2 * w})


def test_a_quantized_net_is_compared_without_its_jumps(
    judge: Callable[..., dict[str, Any]], tmp_path: Path
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


def test_what_holds_no_float_has_no_parameter(judge: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = write(tmp_path / "net.onnx", "(float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }")
    assert judge(path)["verdict"] == "no parameter"
