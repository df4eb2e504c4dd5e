"""`add_classes` beside a second layer and a concatenation in PyTorch, on files as both exporters write them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import models
from onnxtrain import Trainer, add_classes, make_batch_dynamic
from onnxtrain.errors import InputError, ModelError
from surgery.test_replace_head import CASES, Case, export

ADDED = 2


class Wider(nn.Module):
    """A layer with the scores of more classes after its own."""

    def __init__(self, old: nn.Module, weight: np.ndarray, bias: np.ndarray | None) -> None:
        super().__init__()
        self.old = old
        self.new: nn.Module
        if isinstance(old, nn.Conv2d):
            self.new, self.axis = nn.Conv2d(old.in_channels, len(weight), 1), 1
        else:
            assert isinstance(old, nn.Linear)
            self.new, self.axis = nn.Linear(old.in_features, len(weight), bias is not None), -1
        with torch.no_grad():
            self.new.weight.copy_(torch.tensor(weight))
            if bias is not None:
                self.new.bias.copy_(torch.tensor(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.old(x), self.new(x)], self.axis)


def wider(net: nn.Module, case: Case, values: dict[str, np.ndarray]) -> nn.Module:
    """The same surgery in PyTorch, with the new weights of the model."""
    net = copy.deepcopy(net).eval()
    weight = values["added.weight"]
    weight = weight if weight.shape[0] == ADDED else weight.T
    net.set_submodule(case.head, Wider(net.get_submodule(case.head), weight, values.get("added.bias")))
    if case.softmax is not None:
        net.set_submodule(case.softmax, nn.Identity())
    if isinstance(net[-1], nn.Flatten) and isinstance(net[-2], nn.Unflatten):
        net[-2] = nn.Unflatten(1, (3 + ADDED, 1, 1))
    return net


def run(model: Any, x: np.ndarray) -> np.ndarray:
    content = model if isinstance(model, onnx.ModelProto) else onnx.load(model)
    session = ort.InferenceSession(content.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def values_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def logits_of(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without a Softmax or Sigmoid at its end."""
    model = copy.deepcopy(model)
    last = model.graph.node[-1]
    if last.op_type in ("Softmax", "Sigmoid"):
        model.graph.output[0].name = last.input[0]
        del model.graph.node[-1]
    return model


def class_axis(scores: np.ndarray) -> int:
    return scores.shape.index(3 + ADDED, 1)


@pytest.mark.sample(every=8)
@pytest.mark.filterwarnings("ignore")  # of the exporters
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", CASES)
def test_old_scores_are_bit_equal_and_new_ones_are_those_of_torch(
    name: str, exporter: str, tmp_path: Path
) -> None:
    case = CASES[name]
    torch.manual_seed(len(name))
    net = case.make().eval()
    path = export(net, case.shape, tmp_path / "net.onnx", exporter, "dynamic")
    if (name, exporter) == ("reshaped", "torchscript"):
        with pytest.raises(ModelError, match=r"Adding classes: Reshape .* its shape is computed at run time"):
            add_classes(path, ADDED)
        return
    new = add_classes(path, ADDED, seed=3)
    onnx.checker.check_model(new, full_check=True)
    x = np.random.default_rng(0).normal(size=(5, *case.shape)).astype(np.float32)
    scores, old = run(new, x), run(logits_of(onnx.load(path)), x)
    if name == "no bias, log softmax":
        # The sum over the classes has more terms; differences between classes stay.
        scores_of_old = scores[:, :3]
        np.testing.assert_allclose(
            scores_of_old - scores_of_old[:, :1], old - old[:, :1], rtol=1e-5, atol=1e-6
        )
    else:
        np.testing.assert_array_equal(np.take(scores, range(3), class_axis(scores)), old)
    expected = wider(net, case, values_of(new)).double()(torch.tensor(x, dtype=torch.float64))
    np.testing.assert_allclose(scores, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    # All parameters of the new layer are found and trained.
    target = np.zeros((5, *np.delete(scores.shape[1:], class_axis(scores) - 1)), np.int64)
    trainer = Trainer(
        new, "bce_with_logits" if name == "sigmoid" else "cross_entropy", requires_grad="added.*"
    )
    trained = [key for key, parameter in trainer.parameters if parameter.requires_grad]
    assert trained == [key for key in values_of(new) if key.startswith("added.")]
    if name not in ("sigmoid", "tokens"):
        trainer.fit(x, target, verbose=False)


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_a_step_on_the_new_rows_is_that_of_torch_and_keeps_old_scores(tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = CASES["mlp"]
    net = case.make().eval()
    path = export(net, case.shape, tmp_path / "net.onnx", "torchscript", "dynamic")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 5)).astype(np.float32), rng.integers(0, 5, 16)
    new = add_classes(path, ADDED)
    trainer = Trainer(new, "cross_entropy", "sgd", 0.5, requires_grad="added.*")
    wide = wider(net, case, values_of(new)).double()
    for parameter in wide.parameters():
        parameter.requires_grad_(False)
    head = wide.get_submodule(case.head).new
    optimizer = torch.optim.SGD(head.requires_grad_(True).parameters(), 0.5)
    for _ in range(5):
        trainer.fit(x, y, batch_size=16, verbose=False)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wide(torch.tensor(x, dtype=torch.float64)), torch.tensor(y)).backward()
        optimizer.step()
    for name, value in (("added.weight", head.weight), ("added.bias", head.bias)):
        found = trainer.parameters[name].data
        assert not np.array_equal(found, values_of(new)[name])
        found = found if found.shape == tuple(value.shape) else found.T
        np.testing.assert_allclose(found, value.detach().numpy(), rtol=1e-4, atol=1e-6)
    old = run(path, x)
    np.testing.assert_array_equal(trainer.predict(x)[:, :3], old)
    trainer.export(tmp_path / "trained.onnx")
    np.testing.assert_array_equal(run(tmp_path / "trained.onnx", x)[:, :3], old)


@pytest.mark.thorough
def test_new_classes_are_learned(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(4, 4)) * 3
    labels = rng.integers(0, 4, 400)
    x = (centers[labels] + rng.normal(size=(400, 4))).astype(np.float32)
    base = Trainer(models.mlp(), "cross_entropy", learning_rate=0.03)
    base.fit(x[labels < 3], labels[labels < 3], epochs=15, verbose=False)
    base.export(tmp_path / "three.onnx")
    trainer = Trainer(add_classes(tmp_path / "three.onnx", 1), "cross_entropy", learning_rate=0.03)
    trainer.fit(x, labels, epochs=15, verbose=False)
    assert trainer.evaluate(x, labels)["accuracy"] > 0.95


def test_classes_can_be_added_again(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    once = add_classes(models.mlp(), 2, seed=1)
    onnx.save(once, tmp_path / "once.onnx")
    twice = add_classes(tmp_path / "once.onnx", 3, seed=2)
    assert run(twice, x).shape == (6, 8)
    np.testing.assert_array_equal(run(twice, x)[:, :5], run(once, x))
    assert [node.op_type for node in twice.graph.node].count("Concat") == 1
    trainer = Trainer(twice, "cross_entropy", requires_grad="added.*")
    assert [n for n, p in trainer.parameters if p.requires_grad] == [
        "added.weight", "added.bias", "added.weight_2", "added.bias_2",
    ]  # fmt: skip
    trainer.fit(x, np.arange(6) + 2, verbose=False)
    trainer.export(tmp_path / "trained.onnx")
    np.testing.assert_array_equal(run(tmp_path / "trained.onnx", x)[:, :3], run(models.mlp(), x))
    again = add_classes(tmp_path / "trained.onnx", 1)
    np.testing.assert_array_equal(run(again, x)[:, :8], run(tmp_path / "trained.onnx", x))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_the_dtype_is_that_of_the_layer(dtype: Any) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weight = np.random.default_rng(0).normal(size=(4, 3)).astype(dtype)
    nodes = models.parse_nodes("y = Gemm(x, w, b)")
    model = models.make_model(
        nodes, {"x": ["n", 4]}, {"y": ["n", 3]}, {"w": weight, "b": np.zeros(3, dtype)}, dtype=kind
    )
    new = add_classes(model, 2)
    assert {array.dtype for array in values_of(new).values()} == {np.dtype(dtype)}
    x = np.random.default_rng(1).normal(size=(3, 4)).astype(dtype)
    np.testing.assert_array_equal(run(new, x)[:, :3], run(model, x))


def test_a_cast_and_transposed_weight_is_understood() -> None:
    weight = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float16)
    nodes = [
        helper.make_node("Cast", ["w"], ["c"], to=TensorProto.FLOAT),
        *models.parse_nodes("t = Transpose<perm=[1, 0]>(c)  y = MatMul(x, t)"),
    ]
    model = models.make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 3]}, {"w": weight})
    new, x = add_classes(model, 2), np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    added = values_of(new)["added.weight"]
    assert (added.shape, added.dtype) == ((4, 2), np.float32)
    np.testing.assert_array_equal(run(new, x)[:, :3], run(model, x))
    np.testing.assert_allclose(run(new, x)[:, 3:], x @ added, rtol=1e-5)


def test_a_softmax_can_be_kept() -> None:
    model = models.mlp()
    model.graph.node.append(helper.make_node("Softmax", ["logits"], ["p"], axis=1))
    model.graph.output[0].name = "p"
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    kept = run(add_classes(model, 2, logits=False), x)
    np.testing.assert_allclose(kept.sum(axis=1), 1, rtol=1e-6)
    assert (run(add_classes(model, 2), x).sum(axis=1) != 1).all()


def test_outputs_of_the_old_head_are_removed(caplog: pytest.LogCaptureFixture) -> None:
    model = models.mlp()
    model.graph.node.append(helper.make_node("ArgMax", ["logits"], ["best"], axis=1))
    model.graph.output.append(helper.make_tensor_value_info("best", TensorProto.INT64, ["batch", 1]))
    new = add_classes(model, 2, output="logits")
    assert [value.name for value in new.graph.output] == ["logits"]
    assert "'best' are removed" in caplog.text


def test_the_seed_determines_the_values_and_the_model_is_not_changed() -> None:
    model = ir.from_proto(models.mlp())
    first, second, other = (add_classes(model, 2, seed=seed) for seed in (0, 0, 1))
    assert isinstance(first, ir.Model)
    arrays = [new.graph.initializers["added.weight"].const_value.numpy() for new in (first, second, other)]
    np.testing.assert_array_equal(arrays[0], arrays[1])
    assert not np.array_equal(arrays[0], arrays[2])
    # As nn.Linear with 8 inputs.
    assert 0.1 < np.abs(arrays[0]).max() <= 1 / np.sqrt(8)
    assert "added.weight" not in model.graph.initializers


def test_a_fixed_batch_and_another_concat_are_understood() -> None:
    nodes = models.parse_nodes("a = MatMul(x, v)  b = MatMul(x, w)  y = Concat<axis=1>(a, b)")
    values = {"v": np.ones((4, 2), np.float32), "w": np.ones((4, 2), np.float32)}
    model = models.make_model(nodes, {"x": [1, 4]}, {"y": [1, 4]}, values)
    # Two heads of the network itself are no classes that were added before.
    with pytest.raises(ModelError, match="Adding classes: the model does not end in a linear layer"):
        add_classes(model, 2)
    fixed = models.make_model(
        models.parse_nodes("y = MatMul(x, v)"), {"x": [1, 4]}, {"y": [1, 2]}, {"v": values["v"]}
    )
    assert run(make_batch_dynamic(add_classes(fixed, 2)), np.ones((3, 4), np.float32)).shape == (3, 4)


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2", 10**8])
def test_invalid_counts_are_refused(count: Any) -> None:
    with pytest.raises(InputError, match="Adding classes: count must be a positive integer"):
        add_classes(models.mlp(), count)


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="Adding classes: the model does not end in a linear layer 'fc'"):
        add_classes(models.mlp(), 2, head="fc")
