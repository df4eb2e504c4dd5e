"""The loss of several batches is torch's loss of all their samples, whatever it is the mean over."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onnxtrain import Trainer
from onnxtrain.losses import BCEWithLogitsLoss, CrossEntropyLoss, Loss, MSELoss, NLLLoss
from onnxtrain.runtime.manifest import LossMean
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
    alone, trainer = Trainer(problem.model, "cross_entropy"), Trainer(problem.model, "cross_entropy")
    epochs = iter([problem.y, np.full(20, -100)])

    def batches() -> Iterator[tuple[Any, Any]]:
        targets = next(epochs)
        for first in range(0, 20, 8):
            yield problem.x[first : first + 8], targets[first : first + 8]

    history = trainer.fit(batches, epochs=2, accumulate=2, verbose=False)
    alone.fit(problem.x, problem.y, batch_size=8, accumulate=2, shuffle=False, verbose=False)
    assert math.isfinite(history.epochs[0]["loss"])
    assert math.isnan(history.last["loss"])
    assert math.isnan(history.last["accuracy"])
    expected = {name: p.data for name, p in alone.parameters}
    assert all(np.array_equal(p.data, expected[name]) for name, p in trainer.parameters)


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


def with_loss(nodes: str, labels: str = "int64[n] kind", constants: str = "") -> onnx.ModelProto:
    """A linear model that computes its loss from scores `y` and the input `kind`."""
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 4] x, {labels}) => (float loss)
        <float[4, 3] w = {{1., 0., 0., 0., 1., 0., 0., 0., 1., 1., 1., 1.}}, float[3] weight = {{1., 5., 0.2}},
         int64[1] one = {{1}} {constants}>
        {{ y = MatMul(x, w)  {nodes} }}"""
    )


WEIGHTED = torch.tensor(WEIGHT).double()
IN_THE_MODEL: dict[str, tuple[str, Any]] = {
    "ignored": (
        "loss = SoftmaxCrossEntropyLoss<ignore_index = -100>(y, kind)",
        lambda y, t: functional.cross_entropy(y, t),
    ),
    "weighted, of narrow labels": (
        "t = Cast<to = 6>(kind)  loss = SoftmaxCrossEntropyLoss<ignore_index = -100>(y, t, weight)",
        lambda y, t: functional.cross_entropy(y, t, weight=WEIGHTED),
    ),
    "half of a negative log-likelihood": (
        """p = LogSoftmax(y)  nll = NegativeLogLikelihoodLoss<ignore_index = -100>(p, kind, weight)
        two = Constant<value_float = 2.0>()  loss = Div(nll, two)""",
        lambda y, t: functional.cross_entropy(y, t, weight=WEIGHTED) / 2,
    ),
    "summed": (
        """loss = SoftmaxCrossEntropyLoss<ignore_index = -100, reduction = "sum">(y, kind)""",
        lambda y, t: functional.cross_entropy(y, t, reduction="sum"),
    ),
}


@pytest.mark.parametrize("name", IN_THE_MODEL)
def test_loss_in_the_model_is_the_mean_over_its_labels(name: str) -> None:
    """Evaluation in batches, and steps that accumulate batches, one of which has no label that counts."""
    nodes, reference = IN_THE_MODEL[name]
    problem, kind = problems.classes(samples=101), labels()
    trainer = Trainer(with_loss(nodes), None, "sgd", learning_rate=0.1, frozen_params="weight")
    w = torch.tensor(trainer.parameters["w"].data.astype(np.float64), requires_grad=True)
    loss = reference(torch.tensor(problem.x).double() @ w, torch.tensor(kind))
    loss.backward()
    data = {"x": problem.x, "kind": kind}
    for size in (101, 16, 8):
        result = trainer.evaluate(data, batch_size=size)["loss"]
        assert result == pytest.approx(loss.item(), rel=2e-6)
    trainer.fit(data, batch_size=8, accumulate=13, shuffle=False, verbose=False)
    assert w.grad is not None
    expected = (w - 0.1 * w.grad).detach().numpy()
    assert norm_relative_error(trainer.parameters["w"].data, expected) < NORM_RELATIVE[F32]


class LanguageModel(torch.nn.Module):
    """Scores of the next token, and a loss that shifts the labels in one of two ways."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7)
        self.padded = padded

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.embedding(tokens))
        if self.padded:
            # As transformers' models do.
            labels = functional.pad(labels, (0, 1), value=-100)
        else:
            scores = scores[:, :-1]
        return functional.cross_entropy(scores.reshape(-1, 7), labels[..., 1:].reshape(-1))


@pytest.mark.parametrize("padded", [False, True])
def test_exported_language_model_counts_labels_without_the_first(padded: bool) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 7, (12, 5))
    wanted = np.where(rng.random((12, 5)) < 0.5, -100, tokens)
    wanted[:4, 1:] = -100
    torch.manual_seed(0)
    module = LanguageModel(padded).eval()
    arguments = (torch.tensor(tokens), torch.tensor(wanted))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        program = torch.onnx.export(
            module, arguments, dynamo=True, verbose=False, dynamic_shapes=({0: "batch"},) * 2
        )
    assert program is not None
    trainer = Trainer(program.model_proto, None)
    mean = trainer.manifest.loss_mean
    assert mean is not None
    assert (mean.labels, mean.shift, mean.ignore_index) == ("labels", 1, -100)
    expected = module(*arguments).item()
    for size in (12, 4, 1):
        result = trainer.evaluate({"tokens": tokens, "labels": wanted}, batch_size=size)["loss"]
        assert result == pytest.approx(expected, rel=2e-6)


LOSS = "loss = SoftmaxCrossEntropyLoss<ignore_index = -100>"
OTHERS: dict[str, tuple[str, str]] = {
    "computed": ("int64[n] kind", f"t = Add(kind, one)  {LOSS}(y, t)"),
    "not integers": ("float[n] kind", f"t = Cast<to = 7>(kind)  {LOSS}(y, t)"),
    "without the last": (
        "int64[n, 2] kind",
        f"s = Slice(kind, zero, one, one)  t = Squeeze(s, one)  {LOSS}(y, t)",
    ),
    "the middle one": (
        "int64[n, 3] kind",
        f"s = Slice(kind, one, two, one)  t = Squeeze(s, one)  {LOSS}(y, t)",
    ),
    "of other samples": ("int64[m] kind", f"t = Slice(kind, one, end, zero)  {LOSS}(y, t)"),
    "reshaped, then cut": (
        "int64[m] kind",
        f"k = Reshape(kind, rows)  s = Slice(k, one, end, one)  t = Squeeze(s, one)  {LOSS}(y, t)",
    ),
    "padded with labels that count": (
        "int64[n, 1] kind",
        f"k = Pad(kind, pads, fill)  s = Slice(k, one, end, one)  t = Squeeze(s, one)  {LOSS}(y, t)",
    ),
    "cut, with weights": (
        "int64[n, 2] kind",
        f"s = Slice(kind, one, end, one)  t = Squeeze(s, one)  {LOSS}(y, t, weight)",
    ),
    "a mean of terms, those that do not count among them": (
        "int64[n] kind",
        """terms = SoftmaxCrossEntropyLoss<ignore_index = -100, reduction = "none">(y, kind)
        loss = ReduceMean<keepdims = 0>(terms)""",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_labels_that_no_input_counts_leave_a_mean_over_samples(name: str) -> None:
    numbers = """, int64[1] zero = {0}, int64[1] two = {2}, int64[1] end = {9223372036854775807},
        int64[2] rows = {-1, 2}, int64[4] pads = {0, 0, 0, 1}, int64 fill = {0}"""
    model = with_loss(OTHERS[name][1], OTHERS[name][0], numbers)
    trainer = Trainer(model, None, frozen_params="weight")
    assert trainer.manifest.loss_mean == LossMean()


def test_labels_behind_the_first_are_counted() -> None:
    nodes = f"s = Slice(kind, one, end, one)  t = Squeeze(s, one)  {LOSS}(y, t)"
    model = with_loss(nodes, "int64[n, 2] kind", ", int64[1] end = {2}")
    assert Trainer(model, None).manifest.loss_mean == LossMean("kind", -100, shift=1)
