"""The loss of several batches is torch's loss of all their samples, whatever it is the mean over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onnxtrain import Trainer
from onnxtrain.losses import BCEWithLogitsLoss, CrossEntropyLoss, Loss, MSELoss, NLLLoss
from tolerances import NORM_RELATIVE, norm_relative_error
from trainer import problems
from trainer.problems import AtEachStep

WEIGHT = [1.0, 5.0, 0.2]
F32 = np.dtype(np.float32)
functional = torch.nn.functional


def labels() -> np.ndarray:
    """101 labels of three classes; the first 8, and four of ten others, do not count."""
    rng = np.random.default_rng(0)
    return np.where((np.arange(101) < 8) | (rng.random(101) < 0.4), -100, rng.integers(0, 3, 101))


def floats() -> np.ndarray:
    return np.random.default_rng(0).random((101, 3)).astype(np.float32)


CLASSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ignored": (CrossEntropyLoss, functional.cross_entropy, {}),
    "another-index": (CrossEntropyLoss, functional.cross_entropy, {"ignore_index": 1}),
    "weighted": (CrossEntropyLoss, functional.cross_entropy, {"weight": WEIGHT}),
    "weight-0": (CrossEntropyLoss, functional.cross_entropy, {"weight": [0.0, 1.0, 0.0]}),
    "smoothed": (CrossEntropyLoss, functional.cross_entropy, {"label_smoothing": 0.2}),
    "smoothed-weighted": (
        CrossEntropyLoss,
        functional.cross_entropy,
        {"label_smoothing": 0.2, "weight": WEIGHT},
    ),
    "summed": (CrossEntropyLoss, functional.cross_entropy, {"reduction": "sum"}),
    "summed-weighted": (CrossEntropyLoss, functional.cross_entropy, {"reduction": "sum", "weight": WEIGHT}),
    "nll": (NLLLoss, functional.nll_loss, {"weight": WEIGHT}),
}
FLOATS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mse": (MSELoss, functional.mse_loss, {}),
    "mse-summed": (MSELoss, functional.mse_loss, {"reduction": "sum"}),
    "bce": (BCEWithLogitsLoss, functional.binary_cross_entropy_with_logits, {"pos_weight": WEIGHT}),
    "probabilities": (CrossEntropyLoss, functional.cross_entropy, {"weight": WEIGHT, "label_smoothing": 0.1}),
}


def case(name: str) -> tuple[Loss, Any, np.ndarray]:
    """Our loss, torch's, and a target."""
    make, function, options = (CLASSES | FLOATS)[name]
    twin = {k: torch.tensor(v).double() if isinstance(v, list) else v for k, v in options.items()}
    extra = {"probabilities": True} if name == "probabilities" else {}
    target = np.abs(labels()) % 3 if name == "another-index" else labels() if name in CLASSES else floats()
    if name == "another-index":
        target[:8] = 1

    def reference(scores: torch.Tensor, wanted: np.ndarray) -> torch.Tensor:
        value = torch.tensor(wanted)
        return function(scores, value.double() if value.is_floating_point() else value, **twin)

    return make(**options, **extra), reference, target


def torch_step(
    model: onnx.ModelProto, loss: Any, x: np.ndarray, y: np.ndarray, rate: float
) -> dict[str, np.ndarray]:
    """The parameters of `models.mlp` after one step of gradient descent over all samples."""
    p = {
        t.name: torch.tensor(onnx.numpy_helper.to_array(t).astype(np.float64), requires_grad=True)
        for t in model.graph.initializer
    }
    scores = torch.tanh(torch.tensor(x).double() @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
    loss(scores, y).backward()
    return {name: (value - rate * value.grad).detach().numpy() for name, value in p.items()}


@pytest.mark.parametrize("name", [*CLASSES, *FLOATS])
def test_evaluation_does_not_depend_on_the_batch_size(name: str) -> None:
    loss, reference, target = case(name)
    problem = problems.classes(samples=101)
    trainer = Trainer(problem.model, loss)
    scores = torch.tensor(trainer.predict(problem.x)).double()
    for size in (101, 16, 8, 1):
        result = trainer.evaluate(problem.x, target, batch_size=size)["loss"]
        assert result == pytest.approx(reference(scores, target).item(), rel=2e-6)


@pytest.mark.parametrize("name", [*CLASSES, *FLOATS])
@pytest.mark.parametrize("size", [16, 8])
def test_accumulated_step_matches_torch_over_all_samples(name: str, size: int) -> None:
    loss, reference, target = case(name)
    problem = problems.classes(samples=101)
    trainer = Trainer(problem.model, loss, "sgd", learning_rate=0.1)
    expected = torch_step(problem.model, reference, problem.x, target, 0.1)
    trainer.fit(problem.x, target, batch_size=size, accumulate=13, shuffle=False, verbose=False)
    for key, parameter in trainer.parameters:
        assert norm_relative_error(parameter.data, expected[key]) < NORM_RELATIVE[F32]


@pytest.mark.parametrize("name", ["ignored", "smoothed-weighted", "weight-0"])
def test_batch_without_a_label_that_counts_is_left_out(name: str) -> None:
    loss, _, target = case(name)
    problem = problems.classes(samples=101)
    target[:8] = 0 if name == "weight-0" else -100
    losses = AtEachStep(lambda _, loss: loss)
    both = [Trainer(problem.model, loss, learning_rate=0.01) for _ in range(2)]
    options: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": False}
    history = both[0].fit(problem.x, target, callbacks=[losses], **options)
    assert math.isfinite(history.last["loss"])
    assert np.isfinite(losses.seen).all()
    both[1].fit(problem.x[8:], target[8:], **options)
    for key, parameter in both[0].parameters:
        np.testing.assert_array_equal(parameter.data, both[1].parameters[key].data)


def test_epoch_without_a_label_that_counts_changes_nothing() -> None:
    problem = problems.classes(samples=20)
    trainer = Trainer(problem.model, "cross_entropy")
    before = {name: p.data.copy() for name, p in trainer.parameters}
    history = trainer.fit(problem.x, np.full(20, -100), epochs=2, batch_size=8, accumulate=2, verbose=False)
    assert math.isnan(history.last["loss"])
    assert math.isnan(history.last["accuracy"])
    assert all(np.array_equal(p.data, before[name]) for name, p in trainer.parameters)


def test_resumed_run_knows_what_the_loss_is_the_mean_over(tmp_path: Path) -> None:
    problem = problems.classes(samples=101)
    trainer = Trainer(problem.model, CrossEntropyLoss(weight=WEIGHT), directory=tmp_path)
    trainer.save(tmp_path)
    expected = trainer.evaluate(problem.x, labels(), batch_size=101)["loss"]
    result = Trainer.resume(tmp_path).evaluate(problem.x, labels(), batch_size=8)["loss"]
    assert result == pytest.approx(expected, rel=2e-6)


def test_labels_that_the_model_reshapes_are_found() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 4] x, int64[n, 1] given) => (float[n, 3] y, int64[n] wanted)
        <float[4, 3] w = {1., 0., 0., 0., 1., 0., 0., 0., 1., 1., 1., 1.}, int64[1] axis = {1}>
        { y = MatMul(x, w)  wanted = Squeeze(given, axis) }"""
    )
    problem = problems.classes(samples=101)
    trainer = Trainer(model, CrossEntropyLoss(weight=WEIGHT), metrics=[], loss_input_names=["y", "wanted"])
    assert trainer.manifest.loss_mean is not None
    assert trainer.manifest.loss_mean.labels == "given"
    given = labels()[:, None]
    whole, parts = (trainer.evaluate(problem.x, given, batch_size=size)["loss"] for size in (101, 8))
    assert parts == pytest.approx(whole, rel=2e-6)
