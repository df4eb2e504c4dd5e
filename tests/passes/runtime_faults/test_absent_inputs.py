"""Absent optional inputs at the end of a node, which end the process in a fusion of ONNX Runtime 1.32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

import onnxtrain
from fresh_process import python
from onnxtrain.ortmodule.sessions._session import suited
from onnxtrain.passes import AbsentInputsPass

HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "own": 1]>'
PLAIN = f"""{HEAD} net (float[1, 2, 4] x, float[4] w) => (float loss) {{
    n = LayerNormalization<epsilon = 0.00001>(x, w, "")  s = Sin(n)  loss = ReduceSum<keepdims = 0>(s) }}"""
SKIP = f"""{HEAD} net (float[1, 2, 4] x, float[1, 2, 4] r, float[4] w) => (float loss) {{
    n = com.microsoft.SkipLayerNormalization(x, r, w)  s = Sin(n)  loss = ReduceSum<keepdims = 0>(s) }}"""
IN_A_FUNCTION = f"""{HEAD} net (float[1, 2, 4] x, float[4] w) => (float loss) {{
    n = own.norm(x, w)  s = Sin(n)  loss = ReduceSum<keepdims = 0>(s) }}
    <domain: "own", opset_import: ["": 21]> norm (x, w) => (n) {{
        n = LayerNormalization<epsilon = 0.00001>(x, w, "") }}"""
WAYS = {
    "differentiate": lambda model: onnxtrain.differentiate(model, "loss", ["x", "w"]),
    "vjp": lambda model: onnxtrain.vjp(model, ["loss"], ["x", "w"]),
    "hessian_vector_product": lambda model: onnxtrain.hessian_vector_product(model, "loss", ["x", "w"]),
}


def shortened(text: str) -> onnx.ModelProto:
    model = ir.from_proto(onnx.parser.parse_model(text))
    AbsentInputsPass()(model)
    return ir.to_proto(model)


def absent_at_the_end(model: onnx.ModelProto) -> list[str]:
    graphs = [model.graph, *model.functions]
    names = []
    for graph in graphs:
        for node in graph.node:
            graphs += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
            names += [node.op_type] * (len(node.input) > 0 and not node.input[-1])
    return names


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", [PLAIN, SKIP, IN_A_FUNCTION], ids=["plain", "skip", "function"])
def test_derivative_models_have_none(text: str, way: str) -> None:
    assert absent_at_the_end(WAYS[way](onnx.parser.parse_model(text))) == []


def test_suited_models_of_ortmodule_have_none() -> None:
    model = ir.from_proto(onnx.parser.parse_model(PLAIN))
    assert absent_at_the_end(ir.to_proto(suited(model, torch.device("cpu")))) == []


def test_what_ops_must_have_and_what_lies_between_stays() -> None:
    """A Loop keeps the place of its condition, without which onnx's shape inference fails."""
    model = shortened(f"""{HEAD} net (float[2, 3] x, int64 three) => (float[k, 2, 3] y) <float six = {{6.0}}> {{
        y = Loop(three, "") <body = b (int64 i, bool c) => (bool d, float[2, 3] o) {{
            d = Identity(c)  u = Clip(x, "", six)  v = Clip(u, "", "")  o = Dropout(v, "", "") }}>
    }}""")
    (loop,) = model.graph.node
    assert list(loop.input) == ["three", ""]
    inputs = {node.op_type: list(node.input) for node in loop.attribute[0].g.node}
    assert inputs == {"Identity": ["c"], "Clip": ["u"], "Dropout": ["v"]}
    assert [list(node.input) for node in loop.attribute[0].g.node if node.output[0] == "u"] == [
        ["x", "", "six"]
    ]
    onnx.checker.check_model(model, full_check=True)
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3) * 2, "three": np.array(3)}
    (y,) = ort.InferenceSession(model.SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(y, np.minimum(feeds["x"], 6)[None].repeat(3, 0))


_MAKE_SESSIONS = """
import sys
import onnxruntime
for path in sys.argv[1:]:
    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
"""


def exit_code(models: list[onnx.ModelProto], folder: Path) -> int:
    """Return the exit code of a process that opens sessions of these models."""
    paths = [folder / f"{number}.onnx" for number in range(len(models))]
    for model, path in zip(models, paths, strict=True):
        onnx.save(model, path)
    return python("-c", _MAKE_SESSIONS, *paths, code=None).returncode


def test_sessions_of_gradients_do_not_end_the_process(tmp_path: Path) -> None:
    models = [onnx.parser.parse_model(text) for text in (PLAIN, SKIP, IN_A_FUNCTION)]
    assert exit_code([way(model) for model in models for way in WAYS.values()], tmp_path) == 0


def test_without_the_pass_a_session_ends_the_process(tmp_path: Path) -> None:
    """If this fails, a new ONNX Runtime opens such models: the pass may go."""
    assert exit_code([onnx.parser.parse_model(PLAIN)], tmp_path) != 0
