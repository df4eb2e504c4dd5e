"""Models whose functions call one another: ONNX Runtime does not get those that it would inline for hours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import models
from onnxtrain import Trainer
from onnxtrain.errors import ModelLoadError
from onnxtrain.runtime.function_calls import check_function_calls
from onnxtrain.runtime.state import CheckpointState

OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]


def function(name: str, nodes: list[onnx.NodeProto]) -> onnx.FunctionProto:
    return helper.make_function("own", name, ["a"], ["z"], nodes, OPSETS)


def chain(ops: list[tuple[str, str]]) -> list[onnx.NodeProto]:
    """Nodes that apply ops, as pairs of domain and op, to `a` one after the other."""
    names = ["a", *(f"v{i}" for i in range(len(ops) - 1)), "z"]
    pairs = zip(ops, names[:-1], names[1:], strict=True)
    return [helper.make_node(op, [source], [target], domain=domain) for (domain, op), source, target in pairs]


def nested(levels: int, calls: int = 2) -> list[onnx.FunctionProto]:
    return [
        function("f0", chain([("", "Tanh")])),
        *(function(f"f{i}", chain([("own", f"f{i - 1}")] * calls)) for i in range(1, levels)),
    ]


def model_of(functions: list[onnx.FunctionProto], calls: int = 1) -> onnx.ModelProto:
    shapes = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "az"]
    graph = helper.make_graph(chain([("own", functions[-1].name)] * calls), "g", shapes[:1], shapes[1:])
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=10, functions=functions)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    trainer = Trainer(models.mlp(), "cross_entropy")
    trainer.fit(np.ones((4, 4), np.float32), np.zeros(4, int), epochs=1, verbose=False)
    trainer.save(directory)
    return directory


@pytest.mark.parametrize("role", ["training", "eval", "optimizer"])
def test_a_received_run_ends_in_an_error(saved: Path, role: str) -> None:
    path = saved / f"{role}_model.onnx"
    before = path.read_bytes()
    model = onnx.load(path)
    model.functions.extend(nested(40))
    model.opset_import.append(OPSETS[1])
    model.graph.node.insert(0, helper.make_node("f39", [model.graph.input[0].name], ["evil"], domain="own"))
    onnx.save(model, path)
    message = r"'f39' would expand to 549,755,813,888 nodes, more than the limit of [\d,]+"
    try:
        with pytest.raises(ModelLoadError, match=message):
            Trainer.resume(saved)
    finally:
        path.write_bytes(before)
    # The files of artifacts have functions of their own, and pass.
    assert Trainer.resume(saved).global_step == 1
    assert CheckpointState.load_checkpoint(saved / "checkpoint")


@pytest.mark.parametrize(
    "model",
    [
        model_of([function("f0", chain([("", "Tanh")] * 50))], calls=3000),
        model_of([*nested(80, calls=1)]),
        # As exporters write modules: one layer, called by a stack of them, called by the model.
        model_of(
            [
                function("linear", chain([("", "Tanh")] * 3)),
                function("layer", chain([("own", "linear")] * 7)),
                function("stack", chain([("own", "layer")] * 100)),
                function("net", chain([("own", "stack")])),
            ]
        ),
        model_of(nested(13)),
    ],
    ids=["many calls", "a long chain", "modules", "8,192 nodes"],
)
def test_ordinary_functions_pass(model: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(model, tmp_path / "m.onnx")
    check_function_calls(str(tmp_path / "m.onnx"))
    check_function_calls(model.SerializeToString())


@pytest.mark.parametrize("levels", [16, 40, 3000])
def test_nested_functions_are_refused(levels: int) -> None:
    with pytest.raises(ValueError, match="nested calls"):
        check_function_calls(model_of(nested(levels)).SerializeToString())


def test_calls_in_branches_count() -> None:
    def branching(level: int) -> onnx.NodeProto:
        out = helper.make_tensor_value_info("o", onnx.TensorProto.FLOAT, None)
        call = helper.make_node(f"f{level}", ["a"], ["o"], domain="own")
        branch = helper.make_graph([call], "b", [], [out])
        return helper.make_node("If", ["a"], ["z"], then_branch=branch, else_branch=branch)

    functions = [
        function("f0", chain([("", "Tanh")])),
        *(function(f"f{i + 1}", [branching(i)]) for i in range(40)),
    ]
    with pytest.raises(ValueError, match="nested calls"):
        check_function_calls(model_of(functions).SerializeToString())


def test_functions_that_call_themselves_are_left_to_onnxruntime() -> None:
    check_function_calls(model_of([function("f0", chain([("own", "f0")]))]).SerializeToString())


def test_bytes_that_are_no_model_are_left_to_onnxruntime(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    check_function_calls(str(tmp_path / "m.onnx"))
    check_function_calls(b"\xff" * 40)
