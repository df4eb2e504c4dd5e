"""The base model: contexts, names, checks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxblock.nets import mlp, run
from onnxtrain import onnxblock
from onnxtrain.errors import GraphBuildError, TrainingStateError
from onnxtrain.onnxblock.model_accessor import custom_op_library_path
from runtimes import needs_opset


def test_block_outside_of_a_base_is_reported() -> None:
    with pytest.raises(TrainingStateError, match="Abs: there is no base model"):
        onnxblock.blocks.Abs()("y")


@pytest.mark.parametrize(
    "inner", [lambda: onnxblock.base(mlp()), onnxblock.empty_base], ids=["base", "empty_base"]
)
@pytest.mark.parametrize(
    "outer", [lambda: onnxblock.base(mlp()), onnxblock.empty_base], ids=["base", "empty_base"]
)
def test_nested_base_is_reported_and_leaves_the_outer_one(outer: Any, inner: Any) -> None:
    with outer() as accessor:
        with pytest.raises(TrainingStateError, match="another base model is active"), inner():
            pass
        assert onnxblock.blocks.PassThrough()("a") == ("a",)
        assert accessor.model.graph is not None
    with pytest.raises(TrainingStateError):
        onnxblock.blocks.Constant(1.0)()


def test_base_is_left_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), onnxblock.base(mlp()):
        raise ZeroDivisionError
    with onnxblock.base(mlp()):
        onnxblock.blocks.Abs()("y")


@pytest.mark.parametrize("model", [None, "model.onnx"])
def test_base_takes_protos_only(model: Any) -> None:
    with pytest.raises(GraphBuildError, match="ModelProto"), onnxblock.base(model):
        pass


def test_path_of_a_base_without_one_is_reported() -> None:
    with onnxblock.base(mlp()) as accessor:
        assert not accessor.has_path
        with pytest.raises(TrainingStateError, match="model_path"):
            _ = accessor.path
    with onnxblock.base(mlp(), "somewhere/model.onnx") as accessor:
        assert accessor.has_path
        assert accessor.path == "somewhere/model.onnx"


@pytest.mark.parametrize("opset", [None, 13, 17, pytest.param(24, marks=needs_opset(24))])
def test_a_model_from_nothing_runs(opset: int | None) -> None:
    class Net(onnxblock.ForwardBlock):
        def build(self) -> str:
            self.base.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3]))
            return onnxblock.blocks.Sigmoid()(onnxblock.blocks.Linear(3, 2)("x"))

    np.random.seed(0)
    net = Net()
    with onnxblock.empty_base(opset):
        name = net()
    model = net.to_model_proto()
    assert {i.domain: i.version for i in model.opset_import} == {"": opset or 21}
    x = np.ones((4, 3), np.float32)
    weight, bias = (onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer)
    np.testing.assert_allclose(run(model, {"x": x})[name], 1 / (1 + np.exp(-(x @ weight + bias))), rtol=1e-5)


def test_new_names_avoid_those_of_the_model() -> None:
    model = mlp()
    model.graph.node[0].name = "Add"
    model.graph.node.insert(1, helper.make_node("Identity", ["h0"], ["Add_out"]))
    with onnxblock.base(model) as accessor:
        outputs = [onnxblock.blocks.Add()("y", "y") for _ in range(3)]
        outputs.append(onnxblock.loss.MSELoss()("y"))
        outputs.append(onnxblock.loss.MSELoss()("y"))
        onnx.checker.check_model(accessor.model, full_check=True)
        named = [node.name for node in accessor.model.graph.node if node.name]
    assert len(set(outputs)) == 5
    assert len(set(named)) == len(named)


def test_constants_of_several_blocks_get_names_of_their_own() -> None:
    class Clipped(onnxblock.ForwardBlock):
        def build(self, y: str) -> str:
            y = onnxblock.blocks.Pow(2.0)(y)  # one constant, then two with names that follow its name
            return onnxblock.blocks.Clip(0.1, 0.3)(onnxblock.blocks.Clip(0.05, 0.5)(y))

    block = Clipped()
    with onnxblock.base(mlp()) as accessor:
        name = block("y")
        names = [tensor.name for tensor in accessor.model.graph.initializer]
    assert len(set(names)) == len(names)
    x = np.random.default_rng(0).normal(0, 3, (4, 6)).astype(np.float32)
    expected = np.clip(run(mlp(), {"x": x})["y"] ** 2, 0.1, 0.3)
    np.testing.assert_allclose(run(block.to_model_proto(), {"x": x})[name], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["nope", "Y", 3, None])
def test_unknown_names_are_reported_with_the_known_ones(name: Any) -> None:
    with (
        onnxblock.base(mlp()),
        pytest.raises(GraphBuildError, match=r"Abs.*(outputs are 'y', its inputs 'x'|a str)"),
    ):
        onnxblock.blocks.Abs()(name)


class Append(onnxblock.Block):
    def __init__(self, *nodes: onnx.NodeProto) -> None:
        super().__init__()
        self.nodes = nodes

    def build(self) -> str:
        self.base.graph.node.extend(self.nodes)
        return self.nodes[-1].output[0]


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("Abs", ["missing"], ["z"])],
        [helper.make_node("Abs", ["y"], ["y"])],
        [helper.make_node("Abs", ["later"], ["z"]), helper.make_node("Abs", ["y"], ["later"])],
        [helper.make_node("Cast", ["y"], ["i"], to=7), helper.make_node("Add", ["i", "y"], ["z"])],
        [helper.make_node("Abs", ["y", "x"], ["z"])],
    ],
    ids=["missing input", "name taken", "wrong order", "mixed dtypes", "too many inputs"],
)
def test_invalid_nodes_of_users_are_reported(nodes: list[onnx.NodeProto]) -> None:
    with (
        onnxblock.base(mlp()),
        pytest.raises(GraphBuildError, match="Append: the resulting model is not valid"),
    ):
        Append(*nodes)()


def test_ops_that_onnx_does_not_know_pass() -> None:
    model = mlp()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    node = helper.make_node("BiasGelu", ["y", "b1"], ["z"], domain="com.microsoft")
    with onnxblock.base(model) as accessor:
        Append(node)()
        assert accessor.model.graph.node[-1].output[0] == "z"


def test_input_like_a_taken_name_is_reported() -> None:
    with onnxblock.base(mlp()), pytest.raises(GraphBuildError, match="already has a value 'h0'"):
        onnxblock.blocks.InputLike("y")("h0")


def test_input_like_a_value_of_unknown_dtype_is_reported() -> None:
    model = mlp()
    model.opset_import.append(helper.make_opsetid("elsewhere", 1))
    with onnxblock.base(model):
        Append(helper.make_node("Strange", ["y"], ["z"], domain="elsewhere"))()
        with pytest.raises(GraphBuildError, match="dtype of 'z' is unknown"):
            onnxblock.blocks.InputLike("z")("extra")


def test_custom_op_library_is_recorded_inside_its_block(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler to build a library")
    source, library = tmp_path / "ops.c", tmp_path / "libops.so"
    source.write_text("void *RegisterCustomOps(void *options, const void *api) { return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    assert custom_op_library_path() is None
    with onnxblock.custom_op_library(library) as path:
        assert path == custom_op_library_path() == str(library)
        with pytest.raises(TrainingStateError, match="already"), onnxblock.custom_op_library(library):
            pass
    assert custom_op_library_path() is None


def test_unusable_custom_op_libraries_are_reported(tmp_path: Path) -> None:
    with (
        pytest.raises(GraphBuildError, match="no such file"),
        onnxblock.custom_op_library(tmp_path / "none.so"),
    ):
        pass
    text = tmp_path / "text.so"
    text.write_text("not a library")
    with pytest.raises(GraphBuildError, match="cannot register"), onnxblock.custom_op_library(text):
        pass
