"""Loss blocks against PyTorch: values and gradients, in models of several opsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from onnxblock.nets import (
    Outputs,
    Training,
    built,
    identity,
    manifest_of,
    mlp,
    parameters_of,
    run,
    torch_forward,
    torch_mlp,
)
from onnxtrain import onnxblock
from onnxtrain.errors import GraphBuildError
from onnxtrain.onnxblock import loss as losses
from tolerances import NORM_RELATIVE, norm_relative_error

WEIGHT = np.array([0.2, 1.5, 0.7, 2.0], np.float32)
Twin = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Case:
    name: str
    make: Callable[..., onnxblock.Block]
    twin: Callable[..., torch.Tensor]
    target: str = "float"


def _weight() -> torch.Tensor:
    return torch.tensor(WEIGHT, dtype=torch.float64)


CASES = [
    Case("mse", losses.MSELoss, F.mse_loss),
    Case("l1", losses.L1Loss, F.l1_loss),
    Case(
        "huber", lambda reduction: losses.HuberLoss(reduction, delta=0.7), lambda *a,
        **k: F.huber_loss(*a, delta=0.7, **k),
    ),
    Case(
        "smooth_l1", lambda reduction: losses.SmoothL1Loss(reduction, beta=0.5), lambda *a,
        **k: F.smooth_l1_loss(*a, beta=0.5, **k),
    ),
    Case(
        "bce", lambda reduction: losses.BCEWithLogitsLoss(None, reduction),
        F.binary_cross_entropy_with_logits, "probability",
    ),
    Case(
        "bce weighted", lambda reduction: losses.BCEWithLogitsLoss(WEIGHT, reduction, WEIGHT * 2), lambda *a,
        **k: F.binary_cross_entropy_with_logits(*a, weight=_weight(), pos_weight=_weight() * 2, **k),
        "probability",
    ),
    Case(
        "cross-entropy", lambda reduction: losses.CrossEntropyLoss(reduction=reduction), F.cross_entropy,
        "label",
    ),
    Case(
        "cross-entropy weighted",
        lambda reduction: losses.CrossEntropyLoss(WEIGHT, reduction, ignore_index=1), lambda *a,
        **k: F.cross_entropy(*a, weight=_weight(), ignore_index=1, **k), "label",
    ),
    Case(
        "cross-entropy smoothed",
        lambda reduction: losses.CrossEntropyLoss(reduction=reduction, label_smoothing=0.1), lambda *a,
        **k: F.cross_entropy(*a, label_smoothing=0.1, **k), "label",
    ),
    Case("nll", lambda reduction: losses.NLLLoss(reduction=reduction), F.nll_loss, "label"),
]  # fmt: skip


def _target(kind: str, rows: int, columns: int) -> np.ndarray:
    generator = np.random.default_rng(3)
    if kind == "label":
        return generator.integers(0, columns, rows)
    numbers = (
        generator.uniform(0, 1, (rows, columns))
        if kind == "probability"
        else generator.normal(0, 1, (rows, columns))
    )
    return numbers.astype(np.float32)


def _torch(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array if array.dtype == np.int64 else array.astype(np.float64))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value_matches_torch(case: Case, reduction: str, opset: int) -> None:
    outputs = Outputs(case.make(reduction=reduction))
    with onnxblock.base(identity(["n", 4], opset=opset)):
        name = outputs("y")
    x, target = np.random.default_rng(1).normal(0, 2, (5, 4)).astype(np.float32), _target(case.target, 5, 4)
    model = outputs.to_model_proto()
    result = run(model, {"x": x, model.graph.input[1].name: target})[name]
    expected = case.twin(_torch(x), _torch(target), reduction=reduction).numpy()
    assert result.shape == expected.shape
    assert norm_relative_error(result, expected) < NORM_RELATIVE[np.dtype(np.float32)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_match_torch(case: Case) -> None:
    model, block = mlp(), Training(case.make(reduction="mean"))
    with onnxblock.base(model):
        name = block("y")
    training, _ = block.to_model_proto()
    x, target = np.random.default_rng(2).normal(0, 1, (7, 6)).astype(np.float32), _target(case.target, 7, 4)
    parameters = parameters_of(model)
    feeds = {"x": x, manifest_of(training)["targets"][0]["name"]: target, **parameters}
    result = run(training, feeds)
    leaves = torch_mlp(parameters)
    loss = case.twin(torch_forward(leaves, x), _torch(target), reduction="mean")
    loss.backward()
    assert norm_relative_error(result[name], loss.detach().numpy()) < 1e-6
    for parameter, leaf in leaves.items():
        assert (
            norm_relative_error(result[f"{parameter}_grad"], leaf.grad.numpy())
            < NORM_RELATIVE[np.dtype(np.float32)]
        )


@pytest.mark.parametrize(
    ("make", "name", "labels"),
    [
        (losses.MSELoss, "target", None),
        (losses.CrossEntropyLoss, "labels", {"count": 4, "ignore_index": -100}),
        (lambda: losses.CrossEntropyLoss(ignore_index=2), "labels", {"count": 4, "ignore_index": 2}),
    ],
    ids=["mse", "cross-entropy", "ignore_index"],
)
@pytest.mark.parametrize("opset", [13, 21])
def test_manifest_describes_the_target(
    make: Any, name: str, labels: dict[str, int] | None, opset: int
) -> None:
    block = built(Training(make()), mlp(opset=opset))
    (target,) = manifest_of(block.to_model_proto()[0])["targets"]
    assert target["name"] == name
    assert target.get("class_labels") == labels
    assert target["dtype"] == ("int64" if labels else "float32")
    assert target["shape"] == (["n"] if labels else ["n", 4])


def test_target_may_be_an_input_like_another_value() -> None:
    class Shared(onnxblock.TrainingBlock):
        def build(self, y: str) -> str:
            target = onnxblock.blocks.InputLike(y)("wanted")
            add = onnxblock.blocks.Add()
            return add(losses.MSELoss()(y, target), losses.L1Loss()(y, target))

    block = built(Shared())
    assert [value["name"] for value in manifest_of(block.to_model_proto()[0])["targets"]] == ["wanted"]


def test_labels_shared_by_two_losses_keep_their_range() -> None:
    class Shared(onnxblock.TrainingBlock):
        def build(self, y: str) -> str:
            first = losses.CrossEntropyLoss()(y)
            return onnxblock.blocks.Add()(first, losses.CrossEntropyLoss(label_smoothing=0.2)(y))

    block = built(Shared())
    (target,) = manifest_of(block.to_model_proto()[0])["targets"]
    assert target["class_labels"] == {"count": 4, "ignore_index": -100}


def test_input_like_used_as_labels_gets_their_range() -> None:
    model, block = (
        mlp(),
        Training(lambda y: losses.CrossEntropyLoss()(y, onnxblock.blocks.InputLike("group")("wanted"))),
    )
    model.graph.input.append(helper.make_tensor_value_info("group", TensorProto.INT64, ["n"]))
    with onnxblock.base(model):
        block("y")
    (target,) = manifest_of(block.to_model_proto()[0])["targets"]
    assert (target["name"], target["class_labels"]) == ("wanted", {"count": 4, "ignore_index": -100})


def test_target_may_be_computed_in_the_model() -> None:
    model, block = mlp((6, 3, 6)), Training(lambda y: losses.MSELoss()(y, target_name="x"))
    with onnxblock.base(model):
        name = block("y")
    x = np.random.default_rng(5).normal(0, 1, (3, 6)).astype(np.float32)
    training, _ = block.to_model_proto()
    assert manifest_of(training)["targets"] == []
    result = run(training, {"x": x, **parameters_of(model)})[name]
    expected = F.mse_loss(torch_forward(torch_mlp(parameters_of(model)), x), _torch(x)).item()
    assert result == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.MSELoss(reduction="average"), "reduction"),
        (lambda: losses.CrossEntropyLoss(weight=np.ones((2, 2))), "weight"),
        (lambda: losses.HuberLoss(delta=-1), "delta"),
    ],
    ids=["reduction", "weight", "delta"],
)
def test_wrong_settings_are_reported_when_the_block_is_made(make: Any, message: str) -> None:
    with pytest.raises(GraphBuildError, match=message):
        make()


def test_weights_that_do_not_fit_the_scores_are_reported() -> None:
    with onnxblock.base(mlp()), pytest.raises(GraphBuildError, match="3 entries"):
        losses.CrossEntropyLoss(weight=np.ones(3))("y")
