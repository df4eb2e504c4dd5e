"""Every primitive block against numpy, through a session of the stock runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxblock.nets import ELEM, Outputs, Training, built, identity, manifest_of, mlp, run
from onnxtrain import onnxblock
from onnxtrain.errors import GraphBuildError
from onnxtrain.onnxblock import blocks

X = np.array([[0.5, 2.0, 1.5], [3.0, 0.25, 1.0]])
Y = np.array([[1.0, 4.0, 0.5], [2.0, 8.0, 0.125]])


@dataclass
class Case:
    name: str
    block: onnxblock.Block
    expected: Any
    inputs: list[str] = field(default_factory=lambda: ["x"])


CASES = [
    Case("Add", blocks.Add(), X + Y, ["x", "y"]),
    Case("Sub", blocks.Sub(), X - Y, ["x", "y"]),
    Case("Mul", blocks.Mul(), X * Y, ["x", "y"]),
    Case("Div", blocks.Div(), X / Y, ["x", "y"]),
    Case("Mul same input twice", blocks.Mul(), X * X, ["x", "x"]),
    Case("Abs", blocks.Abs(), np.abs(X)),
    Case("Log", blocks.Log(), np.log(X)),
    Case("Neg", blocks.Neg(), -X),
    Case("Sigmoid", blocks.Sigmoid(), 1 / (1 + np.exp(-X))),
    Case("Pow", blocks.Pow(3.0), X**3),
    Case("Pow integer exponent", blocks.Pow(2), X**2),
    Case("Clip", blocks.Clip(0.5, 1.5), np.clip(X, 0.5, 1.5)),
    Case("Clip minimum only", blocks.Clip(clip_min=1), np.maximum(X, 1)),
    Case("Clip maximum only", blocks.Clip(clip_max=1), np.minimum(X, 1)),
    Case("ReduceMean", blocks.ReduceMean(), X.mean(keepdims=True)),
    Case("ReduceMean scalar", blocks.ReduceMean(keepdims=False), X.mean()),
    Case("ReduceSum", blocks.ReduceSum(), X.sum(keepdims=True)),
    Case("ReduceSum scalar", blocks.ReduceSum(keepdims=False), X.sum()),
    Case("ReduceAllL2", blocks.ReduceAllL2(), np.sqrt((X**2).sum() + (Y**2).sum()), ["x", "y"]),
    Case("Cast", blocks.Cast(TensorProto.INT64), X.astype(np.int64)),
]


def pair(dtype: type, opset: int) -> onnx.ModelProto:
    """A model that hands x and y through as outputs u and v."""
    infos = {
        n: helper.make_tensor_value_info(n, ELEM[np.dtype(dtype)], ["n", 3]) for n in ("x", "y", "u", "v")
    }
    nodes = [helper.make_node("Identity", [a], [b]) for a, b in (("x", "u"), ("y", "v"))]
    graph = helper.make_graph(nodes, "pair", [infos["x"], infos["y"]], [infos["u"], infos["v"]])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_block_computes_what_numpy_does(case: Case, dtype: type, opset: int) -> None:
    outputs = Outputs(case.block)
    with onnxblock.base(pair(dtype, opset)):
        name = outputs(*case.inputs)
    result = run(outputs.to_model_proto(), {"x": X.astype(dtype), "y": Y.astype(dtype)})[name]
    assert result.shape == np.shape(case.expected)
    assert result.dtype == (np.int64 if case.name == "Cast" else dtype)
    np.testing.assert_allclose(result, case.expected, rtol=2e-6)


def test_every_documented_block_is_there() -> None:
    documented = (
        "Abs Add Block Cast Clip Constant Div InputLike LabelEncoder LayerNorm LayerNormNoBias Linear Log "
        "Mul Neg PassThrough Pow RINorm RMSNorm ReduceAllL2 ReduceMean ReduceSum SequenceConstruct Sigmoid Sub"
    )
    assert set(documented.split()) == set(blocks.__all__)


def test_constant_is_a_float32_initializer_and_no_parameter() -> None:
    block = Training(lambda y: blocks.ReduceSum(keepdims=False)(blocks.Mul()(blocks.Constant(0.5)(), y)))
    with onnxblock.base(mlp()) as accessor:
        constant = blocks.Constant(0.25)()
        tensor = next(t for t in accessor.model.graph.initializer if t.name == constant)
        assert (tensor.data_type, list(tensor.dims)) == (TensorProto.FLOAT, [1])
        block("y")
    assert [tensor.name for tensor in block.parameters()[0]] == ["w0", "b0", "w1", "b1"]


def test_linear_draws_from_the_global_generator_weight_first() -> None:
    outputs = Outputs(blocks.Linear(3, 2, alpha=0.5, beta=2.0))
    np.random.seed(7)
    with onnxblock.base(identity(["n", 3])):
        name = outputs("y")
    np.random.seed(7)
    weight, bias = np.random.randn(3, 2).astype(np.float32), np.random.randn(2).astype(np.float32)
    x = X.astype(np.float32)
    result = run(outputs.to_model_proto(), {"x": x})[name]
    np.testing.assert_allclose(result, 0.5 * x @ weight + 2.0 * bias, rtol=1e-5)


def test_linear_without_bias_has_one_parameter() -> None:
    outputs = Outputs(blocks.Linear(3, 2, bias=False))
    with onnxblock.base(identity(["n", 3], np.float64)):
        outputs("y")
    initializers = outputs.to_model_proto().graph.initializer
    assert [(t.data_type, list(t.dims)) for t in initializers] == [(TensorProto.DOUBLE, [3, 2])]


def test_two_linears_get_names_of_their_own() -> None:
    with onnxblock.base(identity(["n", 3])) as accessor:
        blocks.Linear(2, 2)(blocks.Linear(3, 2)("y"))
    names = [tensor.name for tensor in accessor.model.graph.initializer]
    assert len(set(names)) == 4


def test_pass_through_returns_its_arguments_and_adds_nothing() -> None:
    with onnxblock.base(mlp()) as accessor:
        before = accessor.model.SerializeToString(deterministic=True)
        assert blocks.PassThrough()("y", "x") == ("y", "x")
        assert accessor.model.SerializeToString(deterministic=True) == before


def test_sequence_construct_makes_a_sequence() -> None:
    outputs = Outputs(blocks.SequenceConstruct())
    with onnxblock.base(pair(np.float32, 17)):
        name = outputs("x", "y")
    x, y = X.astype(np.float32), Y.astype(np.float32)
    result = run(outputs.to_model_proto(), {"x": x, "y": y})[name]
    np.testing.assert_array_equal(result[0], x)
    np.testing.assert_array_equal(result[1], y)


def test_label_encoder_maps_keys_and_imports_its_domain() -> None:
    encoder = blocks.LabelEncoder(default_int64=-7, keys_int64s=[10, 20], values_int64s=[0, 1])
    outputs = Outputs(encoder)
    info = [helper.make_tensor_value_info(name, TensorProto.INT64, ["n"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with onnxblock.base(model):
        name = outputs("y")
    result = run(outputs.to_model_proto(), {"x": np.array([20, 10, 30])})[name]
    assert result.tolist() == [1, 0, -7]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"keys_int64s": [1]},
        {"keys_int64s": [1, 2], "values_floats": [1.0]},
        {"keys_int64s": [1], "keys_floats": [1.0]},
    ],
    ids=["nothing", "no values", "unequal lengths", "two keys"],
)
def test_label_encoder_needs_one_list_of_keys_and_one_of_values(arguments: dict[str, list[float]]) -> None:
    with pytest.raises(GraphBuildError, match="one list of keys and one of values"):
        blocks.LabelEncoder(**arguments)


@pytest.mark.parametrize("like", ["x", "y", "h0"], ids=["input", "output", "value in between"])
def test_input_like_adds_a_target_of_the_same_type(like: str) -> None:
    class Product(onnxblock.TrainingBlock):
        def build(self, y: str) -> str:
            extra = blocks.InputLike(like)("extra")
            total = blocks.ReduceSum(keepdims=False)
            return blocks.Add()(total(y), total(extra))

    block = built(Product())
    size = {"x": 6, "y": 4, "h0": 8}[like]
    assert manifest_of(block.to_model_proto()[0])["targets"] == [
        {"name": "extra", "dtype": "float32", "shape": ["n", size]}
    ]


def test_input_like_chooses_a_free_name() -> None:
    with onnxblock.base(mlp()):
        assert blocks.InputLike("x")() != blocks.InputLike("x")()
