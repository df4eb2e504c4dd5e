"""The judge of `benchmarks/hugging_face` tells a right gradient from a wrong one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import quantize_dynamic

from onnxtrain.autodiff import vjp
from onnxtrain.autodiff._registry import local_rules

FOLDER = Path(__file__).parents[1] / "benchmarks" / "hugging_face"
FEEDS = {"x": np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)}


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    names = ("judge", "reference", "rounding")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    monkeypatch.syspath_prepend(FOLDER)
    import judge

    yield judge
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        main (float[n, 4] x) => (float[n, 3] y) { a = MatMul(x, w)  b = com.microsoft.BiasGelu(a, c)  y = MatMul(b, v) }
    """)
    for name, shape in {"w": (4, 6), "c": (6,), "v": (6, 3)}.items():
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        )
    path = tmp_path / "file.onnx"
    onnx.save(model, path)
    return path


def test_what_is_right_is_found_right(judge: ModuleType, file: Path) -> None:
    outcome = judge.judge(file, FEEDS)
    assert (outcome.verdict, outcome.judge, outcome.parameters) == ("right", "float64", 3)
    assert outcome.worst < 1e-5
    assert outcome.losses[-1] < outcome.losses[0]


@pytest.mark.filterwarnings("ignore")  # of the quantiser
def test_a_quantised_file_is_judged_as_if_nothing_was_rounded(judge: ModuleType, file: Path) -> None:
    quantised = file.with_name("quantised.onnx")
    quantize_dynamic(file, quantised)
    outcome = judge.judge(quantised, FEEDS, straight_through=True)
    assert (outcome.verdict, outcome.judge) == ("right", "float64")


def test_what_is_wrong_is_found_wrong(judge: ModuleType, file: Path) -> None:
    with local_rules():
        vjp("Gelu", wrt=("X",))(lambda op, n, ct: op.Mul(ct, op.Sigmoid(op.Mul(n.X, 1.702))))
        assert judge.judge(file, FEEDS).verdict == "wrong"
