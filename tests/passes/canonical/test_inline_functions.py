"""Functions that are inlined keep their values apart from those of bodies beside them, and are counted first."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
import pytest

from onnxtrain import Trainer
from onnxtrain.cli import main
from onnxtrain.errors import ModelError
from onnxtrain.passes import canonicalize, load_model, to_proto
from onnxtrain.passes.canonical import inline_functions
from passes._models import normal, run

BESIDE_A_BODY = """<ir_version: 10, opset_import: ["": 21, "own": 1]>
    net (float[3] x, bool which) => (float[3] y) {
        doubled = own.twice(x)
        y = If (which) <
            then_branch = upper () => (float[3] a) { sum = Add(doubled, x)  a = Neg(sum) },
            else_branch = lower () => (float[3] b) { sum = Mul(doubled, x)  b = Abs(sum) }
        >
    }
    <domain: "own", opset_import: ["": 21]>
    twice (v) => (w) { sum = Add(v, v)  w = Identity(sum) }"""


def test_a_value_of_a_function_has_the_name_of_one_in_a_body() -> None:
    model = onnx.parser.parse_model(BESIDE_A_BODY)
    onnx.checker.check_model(model)
    inlined = to_proto(canonicalize(load_model(model)))
    onnx.checker.check_model(inlined)
    for which in (False, True):
        given = {"x": normal(3), "which": np.array(which)}
        np.testing.assert_array_equal(run(inlined, given)[0], run(model, given)[0])


def nested_calls(
    levels: int, *, calls: str = "t = own.f{0}(v, which)  w = own.f{0}(t, which)", opset: int = 21
) -> str:
    """A model whose functions call the one before them twice each: 2^(levels - 1) Tanh, and a MatMul."""
    bodies = ["w = Tanh(v)", *(calls.format(level) for level in range(levels - 1))]
    header = f'<domain: "own", opset_import: ["": {opset}, "own": 1]>'
    functions = " ".join(
        f"{header} f{level} (v, which) => (w) {{ {body} }}" for level, body in enumerate(bodies)
    )
    return f"""<ir_version: 10, opset_import: ["": 21, "own": 1]>
        net (float[n, 2] x, bool which) => (float[n, 2] y) <float[2, 2] weight = {{1, 2, 3, 4}}> {{
            h = MatMul(x, weight)  y = own.f{levels - 1}(h, which) }} {functions}"""


THROUGH_BRANCHES = """w = If (which) <
    then_branch = a () => (o) {{ o = own.f{0}(v, which) }}, else_branch = b () => (p) {{ p = own.f{0}(v, which) }} >"""


@pytest.mark.parametrize(
    "text",
    [
        nested_calls(40),
        nested_calls(40, opset=18),
        nested_calls(18),
        nested_calls(40, calls=THROUGH_BRANCHES),
    ],
    ids=["2^39 nodes", "of an older opset", "131,072 nodes", "in branches"],
)
def test_nested_calls_are_counted_before_they_are_inlined(text: str) -> None:
    with pytest.raises(ModelError, match=r"would expand to [\d,]{7,} nodes, more than the limit of 100,000"):
        canonicalize(load_model(onnx.parser.parse_model(text)))


@pytest.mark.parametrize("calls", ["t = own.f{0}(v, which)  w = own.f{0}(t, which)", THROUGH_BRANCHES])
def test_the_number_is_that_of_the_inlined_graph(monkeypatch: pytest.MonkeyPatch, calls: str) -> None:
    model = onnx.parser.parse_model(nested_calls(7, calls=calls))
    inlined = load_model(onnx.inliner.inline_local_functions(model))
    monkeypatch.setattr(inline_functions, "MOST_NODES", 0)
    with pytest.raises(ModelError) as caught:
        canonicalize(load_model(model))
    number = re.search(r"would expand to ([\d,]+) nodes", str(caught.value))
    assert number is not None
    assert int(number[1].replace(",", "")) == len(list(inlined.graph.all_nodes()))
    monkeypatch.undo()
    given = {"x": normal(3, 2), "which": np.array(True)}
    # onnxruntime computes a chain of Tanh in the same order.
    expected = run(model, given)[0]
    np.testing.assert_array_equal(run(to_proto(canonicalize(load_model(model))), given)[0], expected)


def test_functions_that_nothing_calls_do_not_count() -> None:
    text = nested_calls(40).replace("y = own.f39(h, which)", "y = own.f3(h, which)")
    inlined = to_proto(canonicalize(load_model(onnx.parser.parse_model(text))))
    assert [node.op_type for node in inlined.graph.node] == ["MatMul", *["Tanh"] * 8]
    assert not inlined.functions


def test_a_long_chain_of_functions_is_inlined() -> None:
    text = nested_calls(1500, calls="w = own.f{0}(v, which)")
    inlined = to_proto(canonicalize(load_model(onnx.parser.parse_model(text))))
    assert [node.op_type for node in inlined.graph.node] == ["MatMul", "Tanh"]


@pytest.mark.parametrize("body", ["w = own.f1(v, which)", "w = own.f0(v, which)"])
def test_functions_that_call_themselves_are_refused(body: str) -> None:
    text = nested_calls(2).replace("w = Tanh(v)", body)
    with pytest.raises(ModelError, match=r"Cyclic dependency|Cycle detected"):
        canonicalize(load_model(onnx.parser.parse_model(text)))


def test_builder_and_commands_refuse_nested_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = onnx.parser.parse_model(nested_calls(40))
    with pytest.raises(ModelError, match="the limit of 100,000"):
        Trainer(model, "mse")
    path = str(tmp_path / "model.onnx")
    onnx.save(model, path)
    for command in (
        ["ops", path],
        ["check", path],
        ["artifacts", path, "--loss", "mse", "-o", str(tmp_path / "o")],
    ):
        monkeypatch.setattr("sys.argv", ["onnxtrain", *command])
        with pytest.raises(SystemExit, match="1"):
            main()
        assert "more than the limit of 100,000" in capsys.readouterr().err
