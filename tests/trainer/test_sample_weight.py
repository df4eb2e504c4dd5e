"""A sample of weight w counts as w copies of it would, in the loss, the gradients and the validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onnxtrain import Trainer, onnxblock
from onnxtrain.errors import InputError
from onnxtrain.losses import BCEWithLogitsLoss, CrossEntropyLoss, MSELoss
from tolerances import NORM_RELATIVE, norm_relative_error
from trainer import problems
from trainer.problems import AtEachStep

F32 = np.dtype(np.float32)
CLASS_WEIGHT = [1.0, 5.0, 0.2]
functional = torch.nn.functional
TIMES = np.random.default_rng(7).integers(0, 4, 101)
"""Whole weights, so that torch can be given copies."""


def ignoring() -> np.ndarray:
    labels = np.random.default_rng(0).integers(0, 3, 101)
    labels[::5] = -100
    return labels


def floats() -> np.ndarray:
    return np.random.default_rng(0).random((101, 3)).astype(np.float32)


CASES: dict[str, tuple[Any, Any, Any]] = {
    "labels": (CrossEntropyLoss(), functional.cross_entropy, ignoring),
    "class-weights": (
        CrossEntropyLoss(weight=CLASS_WEIGHT, label_smoothing=0.1),
        lambda s, t: functional.cross_entropy(
            s, t, weight=torch.tensor(CLASS_WEIGHT).double(), label_smoothing=0.1
        ),
        ignoring,
    ),
    "mse": (MSELoss(), functional.mse_loss, floats),
    "mse-sum": (MSELoss(reduction="sum"), lambda s, t: functional.mse_loss(s, t, reduction="sum"), floats),
    "bce": (BCEWithLogitsLoss(), functional.binary_cross_entropy_with_logits, floats),
}


def torch_loss(
    model: onnx.ModelProto, loss: Any, x: np.ndarray, y: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of `models.mlp` over all samples in float64, and its gradients."""
    p = {
        t.name: torch.tensor(onnx.numpy_helper.to_array(t).astype(np.float64), requires_grad=True)
        for t in model.graph.initializer
    }
    scores = torch.tanh(torch.tensor(x).double() @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
    target = torch.tensor(y)
    value = loss(scores, target.double() if target.is_floating_point() else target)
    value.backward()
    return value.item(), {name: leaf.grad.numpy() for name, leaf in p.items()}


@pytest.mark.parametrize("name", CASES)
def test_step_and_loss_match_torch_with_copies_of_the_samples(name: str) -> None:
    """Thirteen batches of 8, the last of them incomplete, make one step of gradient descent."""
    loss, twin, make = CASES[name]
    problem, target = problems.classes(samples=101), make()
    value, gradients = torch_loss(
        problem.model, twin, np.repeat(problem.x, TIMES, 0), np.repeat(target, TIMES, 0)
    )
    rate = 1e-3 if name == "mse-sum" else 0.1
    trainer = Trainer(problem.model, loss, "sgd", learning_rate=rate)
    before = {key: p.data.copy() for key, p in trainer.parameters}
    history = trainer.fit(
        problem.x,
        target,
        sample_weight=TIMES,
        batch_size=8,
        accumulate=13,
        shuffle=False,
        verbose=False,
        validation=(problem.x, target, TIMES),
    )
    assert history.last["loss"] == pytest.approx(value, rel=1e-5)
    for key, parameter in trainer.parameters:
        expected = before[key] - rate * gradients[key]
        assert norm_relative_error(parameter.data, expected) < NORM_RELATIVE[F32]
    for size in (101, 16, 1):
        result = trainer.evaluate(problem.x, target, batch_size=size, sample_weight=TIMES)["loss"]
        assert result == pytest.approx(history.last["val_loss"], rel=2e-6)
    copies = trainer.evaluate(np.repeat(problem.x, TIMES, 0), np.repeat(target, TIMES, 0))["loss"]
    assert copies == pytest.approx(history.last["val_loss"], rel=2e-6)


def test_weights_that_are_no_whole_numbers() -> None:
    problem = problems.classes(samples=50)
    weights = np.random.default_rng(1).random(50)
    trainer = Trainer(problem.model, "cross_entropy")
    scores = torch.tensor(trainer.predict(problem.x)).double()
    terms = functional.cross_entropy(scores, torch.tensor(problem.y), reduction="none").numpy()
    result = trainer.evaluate(problem.x, problem.y, sample_weight=weights, batch_size=7)["loss"]
    assert result == pytest.approx((terms * weights).sum() / weights.sum(), rel=1e-6)


def test_a_model_in_float64_takes_weights_from_its_first_fit_on() -> None:
    """Opened before the models are rebuilt to take weights, the data learns their dtype afterwards."""
    from trainer.test_sam import doubled

    x, y = np.random.default_rng(0).standard_normal((TIMES.size, 4)), np.arange(TIMES.size) % 3
    value, gradients = torch_loss(
        doubled(), functional.cross_entropy, np.repeat(x, TIMES, 0), np.repeat(y, TIMES, 0)
    )
    trainer = Trainer(doubled(), "cross_entropy", "sgd", learning_rate=0.125)
    before = {key: p.data.copy() for key, p in trainer.parameters}
    history = trainer.fit(x, y, sample_weight=TIMES, batch_size=TIMES.size, verbose=False)
    assert history.last["loss"] == pytest.approx(value, rel=1e-12)
    for key, parameter in trainer.parameters:
        np.testing.assert_allclose(
            parameter.data, before[key] - 0.125 * gradients[key], rtol=1e-10, atol=1e-12
        )


def test_batches_bring_weights_as_their_third_entry_or_by_name() -> None:
    problem = problems.classes(samples=40)
    weights = TIMES[:40].astype(np.float32)
    parts = [slice(i, i + 8) for i in range(0, 40, 8)]
    streams = [
        [(problem.x[part], problem.y[part], weights[part]) for part in parts],
        [{"x": problem.x[part], "labels": problem.y[part], "sample_weight": weights[part]} for part in parts],
    ]
    whole = Trainer(problem.model, "cross_entropy")
    whole.fit(problem.x, problem.y, sample_weight=weights, batch_size=8, shuffle=False, verbose=False)
    for stream in streams:
        trainer = Trainer(problem.model, "cross_entropy")
        trainer.fit(stream, verbose=False)
        for key, parameter in trainer.parameters:
            np.testing.assert_array_equal(parameter.data, whole.parameters[key].data)


def test_batch_whose_weights_are_all_0_is_left_out() -> None:
    problem = problems.classes(samples=24)
    weights = np.ones(24)
    weights[8:16] = 0
    losses = AtEachStep(lambda _, loss: loss)
    options: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": False}
    trainers = [Trainer(problem.model, "cross_entropy") for _ in range(2)]
    trainers[0].fit(problem.x, problem.y, sample_weight=weights, callbacks=[losses], **options)
    kept = weights > 0
    trainers[1].fit(problem.x[kept], problem.y[kept], sample_weight=np.ones(16), **options)
    assert len(losses.seen) == 2
    for key, parameter in trainers[0].parameters:
        np.testing.assert_array_equal(parameter.data, trainers[1].parameters[key].data)


def test_fit_with_weights_resumes_from_one_without(tmp_path: Path) -> None:
    """Moments and parameters stay; the run's files are those of models with weights, which a resumed run has too."""
    problem = problems.classes(samples=40)
    options: dict[str, Any] = {"batch_size": 8, "verbose": False}
    first = Trainer(problem.model, "cross_entropy", directory=tmp_path / "first")
    first.fit(problem.x, problem.y, **options)
    first.fit(problem.x, problem.y, sample_weight=np.full(40, 2.0), **options)
    second = Trainer(problem.model, "cross_entropy")
    second.fit(problem.x, problem.y, **options)
    second.fit(problem.x, problem.y, **options)
    for key, parameter in first.parameters:
        assert norm_relative_error(parameter.data, second.parameters[key].data) < 1e-5
    resumed = Trainer.resume(tmp_path / "first")
    assert [spec.name for spec in resumed.manifest.targets] == ["labels", "sample_weight"]
    weights = TIMES[:40]
    assert resumed.evaluate(problem.x, problem.y, sample_weight=weights) == first.evaluate(
        problem.x, problem.y, sample_weight=weights
    )
    first.export(tmp_path / "out.onnx")
    assert [value.name for value in onnx.load(tmp_path / "out.onnx").graph.input] == ["x"]


def test_run_that_is_resumed_without_its_model_says_so(tmp_path: Path) -> None:
    problem = problems.classes(samples=16)
    Trainer(problem.model, "cross_entropy", directory=tmp_path).save(tmp_path)
    with pytest.raises(
        InputError, match=r"models of this run take no sample weights\. Start a new run with sample_weight"
    ):
        Trainer.resume(tmp_path).fit(problem.x, problem.y, sample_weight=np.ones(16), verbose=False)


class Block(onnxblock.Block):
    def build(self, name: str, target: str = "target") -> str:
        return onnxblock.loss.CrossEntropyLoss()(name)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(15), r"different numbers of samples \(x: 16, labels: 16, sample_weight: 15\)"),
        (-np.ones(16), "finite and non-negative, received -1.0 for sample 0"),
        (np.full(16, np.nan), "finite and non-negative, received nan for sample 0"),
        (np.ones((16, 1)), "rank 2 instead of 1"),
        (np.zeros(16), "All sample weights are 0"),
        (np.array(["a"] * 16), "should be numbers, received dtype <U1"),
    ],
    ids=["length", "negative", "nan", "column", "zeros", "text"],
)
def test_unusable_weights_are_errors(weights: Any, message: str) -> None:
    problem = problems.classes(samples=16)
    trainer = Trainer(problem.model, "cross_entropy")
    for call in (trainer.fit, trainer.check_data, trainer.evaluate):
        with pytest.raises(InputError, match=message):
            call(problem.x, problem.y, sample_weight=weights)


def test_loss_that_cannot_weigh_samples() -> None:
    problem = problems.classes(samples=16)
    trainer = Trainer(problem.model, Block(), metrics=[])
    with pytest.raises(InputError, match=r"sample weights need a loss of onnxtrain\.losses"):
        trainer.fit(problem.x, problem.y, sample_weight=np.ones(16), verbose=False)
    trainer.fit(problem.x, problem.y, verbose=False)
