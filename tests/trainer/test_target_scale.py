"""Standardized targets beside scikit-learn: the same training, with predictions and metrics in the target's units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.compose import TransformedTargetRegressor
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from sklearn.preprocessing import StandardScaler

import models
from onnxtrain import Recipe, Trainer
from onnxtrain.errors import GraphBuildError, InputError
from onnxtrain.losses import HuberLoss, TargetScale
from onnxtrain.tables import TableEncoder


class _Network(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no annotations
    """The same network as a scikit-learn regressor, trained on whatever `TransformedTargetRegressor` gives it."""

    def __init__(self, loss: Any, outputs: int, weight: np.ndarray | None) -> None:
        self.loss, self.outputs, self.weight = loss, outputs, weight

    def fit(self, x: np.ndarray, y: np.ndarray) -> _Network:
        self.trainer = Trainer(models.mlp(features=3, classes=self.outputs), self.loss, learning_rate=0.01)
        y = y.reshape(len(y), -1).astype(np.float32)
        self.history = self.trainer.fit(x, y, **FIT, sample_weight=self.weight)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        result: np.ndarray = self.trainer.predict(x)
        return result


FIT: dict[str, Any] = {"epochs": 4, "batch_size": 16, "verbose": False, "validation": 0.2}


def houses(outputs: int, rows: int = 96) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 3)).astype(np.float32)
    y = x @ rng.standard_normal((3, outputs)) + 0.1 * rng.standard_normal((rows, outputs))
    return x, (y * np.array([1e5, 3.0])[:outputs] + np.array([3e5, -7.0])[:outputs]).astype(np.float32)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", ["mse", HuberLoss(delta=0.5)])
@pytest.mark.parametrize("outputs", [1, 2])
def test_training_is_that_of_transformed_target_regressor(outputs: int, loss: Any, weighted: bool) -> None:
    x, y = houses(outputs)
    weight = np.random.default_rng(1).uniform(0.5, 2, len(x)).astype(np.float32) if weighted else None
    expected = TransformedTargetRegressor(
        _Network(loss, outputs, weight), transformer=StandardScaler(), check_inverse=False
    ).fit(x, y)
    scaler = StandardScaler().fit(y)
    scale = TargetScale(scaler.mean_, scaler.scale_)
    trainer = Trainer(
        models.mlp(features=3, classes=outputs),
        recipe=Recipe(loss=loss, target_scale=scale),
        learning_rate=0.01,
        metrics=["mae", "rmse", "r2"],
    )
    history = trainer.fit(x, y, **FIT, sample_weight=weight)
    predicted = trainer.predict(x)
    np.testing.assert_allclose(predicted, expected.predict(x).reshape(len(x), outputs), rtol=1e-4)
    # The loss is that of the standardized target.
    np.testing.assert_allclose(history["loss"], expected.regressor_.history["loss"], rtol=1e-4)
    np.testing.assert_allclose(history["val_loss"], expected.regressor_.history["val_loss"], rtol=1e-4)
    values = trainer.evaluate(x, y)
    assert values["mae"] == pytest.approx(mean_absolute_error(y, predicted), rel=1e-4)
    if outputs == 1:
        assert values["rmse"] == pytest.approx(root_mean_squared_error(y, predicted), rel=1e-4)
        assert values["r2"] == pytest.approx(r2_score(y, predicted), rel=1e-4)


def test_exported_saved_and_resumed_models_return_the_units_of_the_target(tmp_path: Path) -> None:
    x, y = houses(2)
    scale = TargetScale(y.mean(axis=0), y.std(axis=0))
    trainer = Trainer(
        models.mlp(features=3, classes=2),
        recipe=Recipe(loss="l1", target_scale=scale),
        directory=tmp_path / "run",
    )
    trainer.fit(x, y, epochs=2, verbose=False)
    expected = trainer.predict(x)
    # The network has hardly learned: its predictions are around the mean in the target's units.
    assert (abs(expected.mean(axis=0) - y.mean(axis=0)) < y.std(axis=0)).all()
    trainer.export(tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx")
    assert [value.name for value in session.get_outputs()] == [trainer.prediction]
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-6)
    resumed = Trainer.resume(tmp_path / "run")
    np.testing.assert_array_equal(resumed.predict(x), expected)
    assert resumed.evaluate(x, y) == trainer.evaluate(x, y)
    # Neither mean nor deviation is a parameter.
    assert {name for name, _ in trainer.parameters} == {
        name for name, _ in Trainer(models.mlp(features=3, classes=2), "l1").parameters
    }


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"loss": "cross_entropy"}, "the targets of CrossEntropyLoss are no quantities that can be standardized"),
        ({"loss": "poisson_nll"}, "the targets of PoissonNLLLoss are no quantities"),
        ({"loss": "bce_with_logits"}, "the targets of BCEWithLogitsLoss are no quantities"),
        ({"loss": "mse", "target_scale": TargetScale([1, 2, 3], [1, 1, 1])}, "3 columns, but the target .* has 2"),
        ({"loss": "mse", "target_scale": TargetScale(1e9, 2.0)}, "too coarse in float32, whose numbers are 64 apart"),
        ({"loss": "mse", "loss_input_names": ["hidden"]}, "target_scale converts the output that the loss reads"),
        ({"loss": None}, "target_scale needs a loss of onnxtrain.losses, e.g. loss='mse'"),
    ],
)  # fmt: skip
def test_targets_that_cannot_be_standardized_are_refused(recipe: dict[str, Any], message: str) -> None:
    model = models.make_model(
        models.parse_nodes("hidden = MatMul(x, w) y = Relu(hidden)"),
        {"x": ["n", 3]},
        {"y": ["n", 2]},
        {"w": np.ones((3, 2), np.float32)},
    )
    with pytest.raises(GraphBuildError, match=message):
        Trainer(model, recipe=Recipe(**{"target_scale": TargetScale(1.0, 2.0)} | recipe))


@pytest.mark.parametrize(
    ("mean", "deviation"), [(0, 0), (0, -1), (np.nan, 1), ([1, 2], 1), ("a", 1), ([], []), ([[1]], [[1]])]
)
def test_scales_that_mean_nothing_are_refused(mean: Any, deviation: Any) -> None:
    with pytest.raises(GraphBuildError, match=r"making TargetScale: (mean|deviation) is"):
        TargetScale(mean, deviation)


def test_encoder_computes_the_scale_of_the_training_rows() -> None:
    import pandas as pd

    x, y = houses(2)
    frame = pd.DataFrame(
        {"a": x[:, 0], "p": y[:, 0].astype(float), "q": y[:, 1].astype(float), "c": 3.0, "t": "u"}
    )
    rows = np.arange(0, 96, 2)
    encoder = TableEncoder(target=["p", "q"], inputs="a", scale_target=True).fit(frame, rows=rows)
    expected = StandardScaler().fit(frame[["p", "q"]].iloc[rows])
    assert encoder.target_scale_ is not None
    np.testing.assert_allclose(encoder.target_scale_.mean, expected.mean_)
    np.testing.assert_allclose(encoder.target_scale_.deviation, expected.scale_)
    assert TableEncoder.from_json(encoder.to_json()).target_scale_ == encoder.target_scale_
    # The encoded target keeps its units; the graph standardizes it.
    np.testing.assert_array_equal(encoder.transform_target(frame), frame[["p", "q"]])
    # Whole numbers to standardize are no labels.
    whole = pd.DataFrame({"a": [1.0, 2.0], "p": [10, 30]})
    assert TableEncoder(target="p", scale_target=True).fit(whole).transform_target(whole).dtype == np.float64
    constant = TableEncoder(target="c", inputs="a", scale_target=True).fit(frame)
    assert constant.target_scale_ == TargetScale(3.0, 1.0)
    assert TableEncoder(target="p", inputs="a").fit(frame).target_scale_ is None
    with pytest.raises(
        InputError, match="scale_target standardizes numbers to predict, but the target has classes"
    ):
        TableEncoder(target="t", inputs="a", scale_target=True).fit(frame)
