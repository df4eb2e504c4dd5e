"""Training blocks as users write them, end to end."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

from onnxblock.nets import Training, built, manifest_of, mlp, parameters_of, run, torch_forward, torch_mlp
from onnxtrain import onnxblock
from onnxtrain.errors import DifferentiationError, GraphBuildError, NothingToTrain, TrainingStateError
from onnxtrain.onnxblock import blocks
from onnxtrain.onnxblock.checkpoint_utils import STATISTIC_KEY
from onnxtrain.onnxblock.onnxblock import build_forward
from onnxtrain.passes import canonicalize, is_constant, load_model, to_proto
from onnxtrain.recipe import Recipe
from onnxtrain.training.training_graph import build_training_graphs
from runtimes import needs_opset
from tolerances import NORM_RELATIVE, norm_relative_error

GRADIENT = NORM_RELATIVE[np.dtype(np.float32)]


class Regression(onnxblock.TrainingBlock):
    def __init__(self) -> None:
        super().__init__()
        self.loss = onnxblock.loss.MSELoss()

    def build(self, y: str) -> Any:
        return self.loss(y), y


class WeightedAverage(onnxblock.TrainingBlock):
    """The documented example: two losses on two targets, weighted by constants of shape [1]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = onnxblock.loss.MSELoss(), onnxblock.loss.MSELoss()
        self.weight1, self.weight2 = onnxblock.blocks.Constant(0.4), onnxblock.blocks.Constant(0.6)
        self.add, self.mul = onnxblock.blocks.Add(), onnxblock.blocks.Mul()

    def build(self, first: str, second: str) -> str:
        return self.add(
            self.mul(self.weight1(), self.first(first, target_name="target1")),
            self.mul(self.weight2(), self.second(second, target_name="target2")),
        )


class RootMeanSquare(onnxblock.Block):
    """A loss made of primitives, with a regulariser on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.sub, self.square, self.mean = (
            onnxblock.blocks.Sub(),
            onnxblock.blocks.Pow(2.0),
            onnxblock.blocks.ReduceMean(keepdims=False),
        )
        self.root, self.norm, self.add = (
            onnxblock.blocks.Pow(0.5),
            onnxblock.blocks.ReduceAllL2(),
            onnxblock.blocks.Add(),
        )
        self.scale, self.mul = onnxblock.blocks.Constant(0.01), onnxblock.blocks.Mul()

    def build(self, y: str) -> str:
        target = blocks.InputLike(y)("target")
        error = self.root(self.mean(self.square(self.sub(y, target))))
        return self.add(error, self.mul(self.scale(), self.norm("w0", "w1")))


class RawNodes(onnxblock.Block):
    """A loss that writes into the ModelProto itself: nodes, an initializer, an input."""

    def build(self, y: str) -> str:
        graph = self.base.graph
        graph.input.append(helper.make_tensor_value_info("wanted", TensorProto.FLOAT, ["n", 4]))
        graph.initializer.append(numpy_helper.from_array(np.array(3.0, np.float32), "exponent_3"))
        graph.node.extend(
            [
                helper.make_node("Sub", [y, "wanted"], ["raw_difference"]),
                helper.make_node("Abs", ["raw_difference"], ["raw_absolute"]),
                helper.make_node("Pow", ["raw_absolute", "exponent_3"], ["raw_cube"]),
            ]
        )
        return onnxblock.blocks.ReduceMean(keepdims=False)("raw_cube")


def batch(rows: int = 5) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(11)
    return (generator.normal(0, 1, (rows, size)).astype(np.float32) for size in (6, 4))  # type: ignore[return-value]


def check_against_torch(
    block: onnxblock.TrainingBlock, model: onnx.ModelProto, feeds: dict[str, np.ndarray], loss: Any
) -> None:
    """Loss and gradients of the training model, and loss of the eval model, against PyTorch in float64."""
    training, evaluation = block.to_model_proto()
    feeds = feeds | parameters_of(model)
    leaves = torch_mlp(parameters_of(model))
    expected = loss(leaves)
    expected.backward()
    result = run(training, feeds)
    name = manifest_of(training)["loss"]
    for value in (result[name], run(evaluation, feeds)[name]):
        assert norm_relative_error(value, expected.detach().numpy()) < GRADIENT
    for parameter, leaf in leaves.items():
        assert norm_relative_error(result[f"{parameter}_grad"], leaf.grad.numpy()) < GRADIENT, parameter


@pytest.mark.parametrize("opset", [13, 17, 21, pytest.param(23, marks=needs_opset(23))])
def test_weighted_average_of_two_losses(opset: int) -> None:
    model, block = mlp(opset=opset), WeightedAverage()
    with onnxblock.base(model):
        block("y", "y")
    x, target1 = batch()
    target2 = target1[::-1].copy() * 0.5

    def loss(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        y = torch_forward(leaves, x)
        return 0.4 * F.mse_loss(y, torch.tensor(target1).double()) + 0.6 * F.mse_loss(
            y, torch.tensor(target2).double()
        )

    training, _ = block.to_model_proto()
    assert [value.name for value in training.graph.input] == [
        "x",
        "target1",
        "target2",
        "w0",
        "b0",
        "w1",
        "b1",
    ]
    check_against_torch(block, model, {"x": x, "target1": target1, "target2": target2}, loss)


def test_loss_of_primitives() -> None:
    model, block = mlp(), Training(RootMeanSquare())
    with onnxblock.base(model):
        block("y")
    x, target = batch()

    def loss(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        error = F.mse_loss(torch_forward(leaves, x), torch.tensor(target).double()).sqrt()
        return error + 0.01 * torch.sqrt((leaves["w0"] ** 2).sum() + (leaves["w1"] ** 2).sum())

    check_against_torch(block, model, {"x": x, "target": target}, loss)


@pytest.mark.parametrize("opset", [13, 21])
def test_block_may_append_nodes_to_the_base_model(opset: int) -> None:
    model, block = mlp(opset=opset), Training(RawNodes())
    block.requires_grad("exponent_3", False)
    with onnxblock.base(model):
        block("y")
    x, target = batch()
    training, _ = block.to_model_proto()
    # An input that a block adds by hand is an ordinary input: the block has not said that it is a target.
    assert [value["name"] for value in manifest_of(training)["inputs"]] == ["x", "wanted"]

    def loss(leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        return ((torch_forward(leaves, x) - torch.tensor(target).double()).abs() ** 3).mean()

    feeds = {"x": x, "wanted": target, "exponent_3": np.array(3.0, np.float32)}
    check_against_torch(block, model, feeds, loss)


class OldReduction(onnxblock.Block):
    """Writes a node that is valid up to opset 17 only: ReduceMean with its axes as an attribute."""

    def build(self, y: str) -> str:
        self.base.graph.node.append(helper.make_node("ReduceMean", [y], ["mean"], axes=[0, 1], keepdims=0))
        return "mean"


def test_block_is_built_in_the_opset_of_the_model() -> None:
    forward, outputs = build_forward(OldReduction(), mlp(opset=13), ["y"], additional_outputs=["h0"])
    assert outputs == ["mean", "h0"]
    graphs = build_training_graphs(
        canonicalize(forward), outputs[0], Recipe(additional_output_names=outputs[1:])
    )
    x = np.ones((2, 6), np.float32)
    result = run(to_proto(graphs.training), {"x": x, **parameters_of(mlp())})
    expected = torch_forward(torch_mlp(parameters_of(mlp())), x).mean().item()
    assert result["mean"] == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(result["b1_grad"], np.full(4, 0.25), rtol=1e-6)


def test_infer_shapes_on_base_sees_what_a_block_has_appended() -> None:
    seen = {}

    class Looking(onnxblock.Block):
        def build(self, y: str) -> str:
            self.base.graph.node.append(helper.make_node("Transpose", [y], ["turned"]))
            for info in self.infer_shapes_on_base().graph.value_info:
                seen[info.name] = [dim.dim_param or dim.dim_value for dim in info.type.tensor_type.shape.dim]
            return "turned"

    with onnxblock.base(mlp()):
        Looking()("y")
    assert seen["turned"] == [4, "n"]
    assert seen["h0"] == ["n", 8]


def test_further_names_become_additional_outputs() -> None:
    model, block = mlp(), Regression()
    with onnxblock.base(model) as accessor:
        loss, y = block("y")
        assert [value.name for value in accessor.model.graph.output][:2] == [
            loss,
            y,
        ]  # now the training model
    training, evaluation = block.to_model_proto()
    assert manifest_of(training)["outputs"] == [loss, y]
    x, target = batch()
    result = run(evaluation, {"x": x, "target": target, **parameters_of(model)})
    np.testing.assert_allclose(
        result[y], torch_forward(torch_mlp(parameters_of(model)), x).detach().numpy(), rtol=1e-5
    )


def test_base_leaves_the_model_of_the_caller_alone() -> None:
    model = mlp()
    before = model.SerializeToString(deterministic=True)
    with onnxblock.base(model):
        Regression()("y")
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("calls", "trainable", "frozen"),
    [
        ([], ["w0", "b0", "w1", "b1"], []),
        ([("w0", False)], ["b0", "w1", "b1"], ["w0"]),
        ([("b1", True), ("w1", True)], ["w1", "b1"], []),
        ([("w1", True), ("b0", False)], ["w1"], ["b0"]),
        ([("w1", True), ("w0", True), ("w0", False)], ["w1"], ["w0"]),
        ([("w1", False), ("w1", True)], ["w1"], []),
    ],
    ids=[
        "all by default",
        "one frozen",
        "two named",
        "named and frozen",
        "frozen later",
        "trained after all",
    ],
)
def test_requires_grad_selects(
    calls: list[tuple[str, bool]], trainable: list[str], frozen: list[str]
) -> None:
    model, block = mlp(), Regression()
    for name, value in calls:
        block.requires_grad(name, value)
    with onnxblock.base(model):
        block("y")
    lists = block.parameters()
    assert [[tensor.name for tensor in group] for group in lists] == [trainable, frozen]
    for tensor in (*lists[0], *lists[1]):
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), parameters_of(model)[tensor.name])
    training, _ = block.to_model_proto()
    gradients = [output.name for output in training.graph.output][2:]
    assert gradients == [f"{name}_grad" for name in trainable]


def test_parameters_of_a_linear_block_are_trained() -> None:
    block = built(Training(lambda y: onnxblock.loss.CrossEntropyLoss()(onnxblock.blocks.Linear(4, 3)(y))))
    assert [tensor.name for tensor in block.parameters()[0]][-2:] == ["linear.weight", "linear.bias"]


def test_running_statistics_are_marked_among_the_frozen_ones() -> None:
    names = ["scale", "bias", "mean", "var"]
    values = [numpy_helper.from_array(np.full(4, i + 1, np.float32), name) for i, name in enumerate(names)]
    node = helper.make_node("BatchNormalization", ["x", *names], ["y", "m", "v"], training_mode=1)
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    graph = helper.make_graph([node], "norm", info[:1], info[1:], values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    block = Training(lambda y: onnxblock.loss.MSELoss()(onnxblock.blocks.Linear(4, 2)(y)))
    block.requires_grad("scale", False)
    block.requires_grad("bias", False)
    with onnxblock.base(model):
        block("y")
    trainable, frozen = block.parameters()
    assert [tensor.name for tensor in trainable] == ["linear.weight", "linear.bias"]
    assert [tensor.name for tensor in frozen] == ["scale", "bias", "mean", "var"]
    marked = [any(e.key == STATISTIC_KEY for e in tensor.metadata_props) for tensor in frozen]
    assert marked == [False, False, True, True]
    statistics = manifest_of(block.to_model_proto()[0])["statistics"]
    assert [entry["name"] for entry in statistics] == ["mean", "var"]


def test_constants_of_blocks_are_marked_after_conversion() -> None:
    with onnxblock.base(mlp(opset=13)) as accessor:
        onnxblock.blocks.Mul()("y", onnxblock.blocks.Constant(0.5)())
        onnxblock.loss.CrossEntropyLoss(weight=np.ones(4, np.float32))("y")
        model = load_model(accessor.model)
    parameters = [name for name, value in model.graph.initializers.items() if not is_constant(value)]
    assert parameters == ["w0", "b0", "w1", "b1"]


class Bad(onnxblock.TrainingBlock):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def build(self, y: str) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (Bad("nope"), GraphBuildError, "no value 'nope'"),
        (Bad(None), GraphBuildError, "returned None"),
        (Bad(()), GraphBuildError, "returned"),
        (Bad("y"), GraphBuildError, "not a scalar"),
        (Training(onnxblock.loss.MSELoss(reduction="none")), GraphBuildError, "not a scalar"),
    ],
    ids=["unknown", "nothing", "empty", "matrix", "unreduced loss"],
)
def test_unusable_results_are_reported(block: onnxblock.TrainingBlock, error: type, message: str) -> None:
    with onnxblock.base(mlp()), pytest.raises(error, match=message):
        block("y")


def test_unknown_parameters_are_reported() -> None:
    block = Regression()
    block.requires_grad("w9")
    with onnxblock.base(mlp()), pytest.raises(GraphBuildError, match="w9"):
        block("y")


def test_everything_frozen_is_reported() -> None:
    block = Regression()
    for name in ("w0", "b0", "w1", "b1"):
        block.requires_grad(name, False)
    with onnxblock.base(mlp()), pytest.raises(NothingToTrain):
        block("y")


@pytest.mark.parametrize("read", [Regression.parameters, Regression.to_model_proto])
def test_results_before_building_are_reported(read: Any) -> None:
    with pytest.raises(TrainingStateError, match="not been built"):
        read(Regression())


class _OfInput(onnxblock.TrainingBlock):
    def __init__(self) -> None:
        super().__init__()
        self.loss = onnxblock.loss.MSELoss()

    def build(self, output: str) -> tuple[str, str]:
        return self.loss(output), output


def test_gradient_of_an_input_is_an_output_of_the_training_model() -> None:
    w = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x, int64[n] i) => (float[n, 3] y)
        { m = MatMul(x, w)  t = Tanh(m)  f = Cast<to = 1>(i)  r = Constant<value_ints = [-1, 1]>()
          c = Reshape(f, r)  y = Add(t, c) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    block = _OfInput()
    block.requires_grad("x")
    block.requires_grad("i", False)
    with onnxblock.base(model):
        block("y")
    training, evaluation = block.to_model_proto()
    assert [value.name for value in training.graph.output][-2:] == ["w_grad", "x_grad"]
    assert len(evaluation.graph.output) == 2
    x, target = np.ones((2, 4), np.float32), np.zeros((2, 3), np.float32)
    feeds = {"x": x, "i": np.array([0, 1]), "target": target, "w": w}
    gradient = ort.InferenceSession(training.SerializeToString()).run(["x_grad"], feeds)[0]
    twin = torch.tensor(x, requires_grad=True)
    y = torch.tanh(twin @ torch.tensor(w)) + torch.tensor([[0.0], [1.0]])
    torch.nn.functional.mse_loss(y, torch.tensor(target)).backward()
    assert twin.grad is not None
    np.testing.assert_allclose(gradient, twin.grad.numpy(), rtol=1e-5, atol=1e-7)


def test_integer_inputs_have_no_gradient() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (int64[n] i) => (float[n] y) <float[1] w = {2.0}>
        { f = Cast<to = 1>(i)  y = Mul(f, w) }"""
    )
    block = _OfInput()
    block.requires_grad("i")
    with (
        onnxblock.base(model),
        pytest.raises(DifferentiationError, match="'i' is INT64; only floating-point"),
    ):
        block("y")
