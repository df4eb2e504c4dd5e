"""`Trainer.calibrate` beside scipy's optimizer and scikit-learn's losses and curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, softmax
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    log_loss,
    matthews_corrcoef,
    precision_recall_curve,
)

import models
from onnxtrain import Trainer
from onnxtrain.errors import InputError
from onnxtrain.runtime.calibration import PROPERTY, StoredCalibration
from onnxtrain.trainer._metrics.calibration import Sample, best_cut, fit_temperature, negative_log_likelihood

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 4)).astype(np.float32)
Y = (X[:, :3] + RNG.normal(size=(300, 3))).argmax(axis=1)


def scores_model(width: int | None, scale: float = 6.0, tail: str = "") -> onnx.ModelProto:
    """Overconfident scores, in proportion to the first inputs; [n] for a width of None."""
    columns = np.eye(4, width or 1, dtype=np.float32) * scale
    text = "m = MatMul(x, w)  " + ("y = Squeeze(m, one)" if width is None else f"y = {tail or 'Identity'}(m)")
    values = {"w": columns, **({"one": np.int64([1])} if width is None else {})}
    shape: list[int | str] = ["n"] if width is None else ["n", width]
    return models.make_model(models.parse_nodes(text), {"x": ["n", 4]}, {"y": shape}, values)


def run(path: Path, x: np.ndarray = X) -> np.ndarray:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Equation 3 of Guo et al. 2017, bin by bin."""
    total = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            total += inside.sum() * abs(right[inside].mean() - confidence[inside].mean())
    return total / len(confidence)


@pytest.mark.parametrize("scale", [0.3, 6.0])
@pytest.mark.parametrize("loss", ["cross_entropy", "nll"])
def test_classes_have_the_temperature_of_scipy(tmp_path: Path, loss: str, scale: float) -> None:
    trainer = Trainer(scores_model(3, scale, "LogSoftmax<axis=1>" if loss == "nll" else ""), loss)
    logits = trainer.predict(X).astype(np.float64)
    found = trainer.calibrate((X, Y), batch_size=64)

    def loss_at(log_temperature: float) -> float:
        return -log_softmax(logits / np.exp(log_temperature), axis=1)[np.arange(len(Y)), Y].mean()

    best = minimize_scalar(loss_at, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9})
    assert found.temperature == pytest.approx(np.exp(best.x), rel=1e-4)
    before, after = softmax(logits, axis=1), softmax(logits / found.temperature, axis=1)
    assert found.nll_before == pytest.approx(log_loss(Y, before), rel=1e-6)
    assert found.nll == pytest.approx(log_loss(Y, after), rel=1e-6)
    assert found.nll < found.nll_before
    for value, chance in ((found.ece_before, before), (found.ece, after)):
        assert value == pytest.approx(
            calibration_error(chance.max(axis=1), chance.argmax(axis=1) == Y), rel=1e-9
        )
    assert found.samples == len(Y)
    trainer.export(tmp_path / "calibrated.onnx")
    proba = trainer.predict_proba(X)
    np.testing.assert_allclose(proba, after, rtol=1e-4, atol=1e-6)
    written = run(tmp_path / "calibrated.onnx")
    # ONNX Runtime fuses MatMul and Div, which rounds once less.
    np.testing.assert_allclose(written, trainer.predict(X), rtol=1e-5, atol=1e-6)
    if loss == "nll":
        np.testing.assert_allclose(np.exp(written), after, rtol=1e-4, atol=1e-6)
    onnx.checker.check_model(onnx.load(tmp_path / "calibrated.onnx"), full_check=True)


@pytest.mark.parametrize("width", [None, 1, 3])
def test_yes_or_no_has_the_temperature_of_scipy(tmp_path: Path, width: int | None) -> None:
    truth = (X[:, : width or 1] + RNG.normal(size=(300, width or 1)) > 0).astype(np.float32)
    truth = truth[:, 0] if width is None else truth
    trainer = Trainer(scores_model(width), "bce_with_logits")
    logits = trainer.predict(X).astype(np.float64)
    found = trainer.calibrate(X, truth)
    flat, answers = logits.reshape(-1), truth.reshape(-1)

    def loss_at(temperature: float) -> float:
        return log_loss(answers, expit(flat / temperature))

    best = minimize_scalar(loss_at, bounds=(0.1, 50), method="bounded", options={"xatol": 1e-9})
    assert found.temperature == pytest.approx(best.x, rel=1e-4)
    assert found.nll == pytest.approx(best.fun, rel=1e-6)
    assert found.nll_before == pytest.approx(loss_at(1.0), rel=1e-6)
    chance = expit(flat / found.temperature)
    error = calibration_error(np.maximum(chance, 1 - chance), (flat > 0) == answers)
    assert found.ece == pytest.approx(error, rel=1e-9)
    trainer.export(tmp_path / "calibrated.onnx")
    np.testing.assert_allclose(run(tmp_path / "calibrated.onnx"), trainer.predict(X), rtol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_the_loss_is_never_worse_than_without(seed: int) -> None:
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(2, 5))
    scores = rng.normal(size=(12, classes)) * 10 ** rng.uniform(-3, 3)
    data = Sample(scores, rng.integers(0, classes, 12))
    found = fit_temperature(data)
    assert 0.01 <= found <= 100.0
    best = negative_log_likelihood(data, found)
    assert best <= negative_log_likelihood(data)
    tried = [negative_log_likelihood(data, t) for t in [1.0, *np.geomspace(0.01, 100, 200)]]
    assert best <= min(tried) * (1 + 1e-9)


def test_data_without_mistakes_ends_at_the_bound() -> None:
    assert fit_temperature(Sample(np.eye(3) * 5, np.arange(3))) == pytest.approx(0.01)


@pytest.mark.parametrize("metric", ["f1", "accuracy", "mcc"])
@pytest.mark.parametrize("seed", range(6))
def test_the_threshold_is_that_of_scikit_learn(metric: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(-1, 1, 80).astype(np.float32).round(1 + seed % 2)  # with ties
    truth = (scores + rng.normal(0, 1, 80) > -1.5).astype(np.int64)
    cut, value, before = best_cut(scores, truth, metric)
    function = {"f1": f1_score, "accuracy": accuracy_score, "mcc": matthews_corrcoef}[metric]
    tried = [function(truth, scores >= s) for s in np.unique(scores)]
    assert value == pytest.approx(max(*tried, function(truth, scores > 9)))
    assert function(truth, scores > np.float32(cut)) == pytest.approx(value)
    assert function(truth, scores > 0) == pytest.approx(before)
    if metric == "f1":
        precision, recall, _ = precision_recall_curve(truth, scores)
        assert value == pytest.approx(np.max(2 * precision * recall / np.maximum(precision + recall, 1e-300)))


@pytest.mark.parametrize(
    ("scores", "truth", "cut"),
    [
        ([-3.0, -1.0], [0, 1], -2.0),
        ([-1.0, 1.0], [0, 1], 0.0),  # 0 is kept where it is as good as any
        ([1.0, np.nextafter(np.float32(1), np.float32(2))], [0, 1], 1.0),  # no number in between
    ],
)
def test_the_threshold_is_between_two_scores(scores: Any, truth: Any, cut: float) -> None:
    assert best_cut(np.float32(scores), np.array(truth), "f1") == (
        cut,
        1.0,
        pytest.approx(f1_score(truth, np.array(scores) > 0)),
    )


@pytest.mark.parametrize("width", [None, 1])
def test_a_threshold_is_stored_and_exported(tmp_path: Path, width: int | None) -> None:
    truth = (X[:, 0] > 1.0).astype(np.float32).reshape((-1,) if width is None else (-1, 1))
    trainer = Trainer(scores_model(width), "bce_with_logits", directory=tmp_path / "run")
    found = trainer.calibrate(X, truth, threshold="f1")
    chance = trainer.predict_proba(X).reshape(-1)
    assert found.metric_value == 1.0 == f1_score(truth.reshape(-1), chance > found.threshold)
    assert found.metric_before == pytest.approx(f1_score(truth.reshape(-1), chance > 0.5))
    trainer.export(tmp_path / "calibrated.onnx")
    text = onnx.load(tmp_path / "calibrated.onnx").metadata_props[0]
    assert (text.key, json.loads(text.value)["threshold"]) == ("onnxtrain.calibration", found.threshold)
    stored = StoredCalibration.from_json(text.value, "")
    np.testing.assert_array_equal(stored.decided(run(tmp_path / "calibrated.onnx")), truth.reshape(-1))


@pytest.mark.parametrize("positive", [None, 0, 1])
def test_two_classes_have_a_threshold(tmp_path: Path, positive: int | None) -> None:
    truth = (X[:, 1] - X[:, 0] > 1).astype(np.int64)
    trainer = Trainer(scores_model(2), "cross_entropy", positive=positive)
    found = trainer.calibrate(X, truth, threshold="f1")
    of = 1 if positive is None else positive
    chance = trainer.predict_proba(X)[:, of]
    assert found.metric_value == 1.0 == f1_score(truth == of, chance > found.threshold)
    stored = StoredCalibration.from_json(str(trainer.state.properties[PROPERTY]), "")
    np.testing.assert_array_equal(stored.decided(trainer.predict(X)), truth)


def test_a_saved_run_stays_calibrated_until_it_is_trained(tmp_path: Path) -> None:
    trainer = Trainer(models.mlp(), "cross_entropy", directory=tmp_path / "run")
    raw = trainer.predict(X)
    trainer.calibrate(X, Y)
    calibrated = trainer.predict(X)
    assert not np.array_equal(raw, calibrated)
    np.testing.assert_array_equal(
        trainer.confusion_matrix(X, Y), Trainer(models.mlp(), "cross_entropy").confusion_matrix(X, Y)
    )
    assert trainer.evaluate(X, Y) == Trainer(models.mlp(), "cross_entropy").evaluate(X, Y)
    trainer.save(tmp_path / "copy")
    np.testing.assert_array_equal(Trainer.resume(tmp_path / "copy").predict(X), calibrated)
    # A second calibration measures the scores of the model, not those of the first one.
    assert Trainer.resume(tmp_path / "copy").calibrate(X, Y) == trainer.calibrate(X, Y)
    trainer.save_parameters(tmp_path / "weights")
    trainer.load_parameters(tmp_path / "weights")
    np.testing.assert_array_equal(trainer.predict(X), raw)
    trainer.calibrate(X, Y)
    trainer.fit(X, Y, verbose=False)
    assert PROPERTY not in trainer.state.properties


def test_chosen_outputs_are_exported_as_before(tmp_path: Path) -> None:
    trainer = Trainer(models.mlp(), "cross_entropy")
    trainer.export(tmp_path / "before.onnx", ["a"])
    trainer.calibrate(X, Y)
    trainer.export(tmp_path / "after.onnx", ["a"])
    assert (tmp_path / "before.onnx").read_bytes() == (tmp_path / "after.onnx").read_bytes()


def test_other_outputs_are_not_divided(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = models.mlp()
    model.graph.node.append(helper.make_node("Softmax", ["logits"], ["chance"], axis=1))
    model.graph.output.append(helper.make_tensor_value_info("chance", TensorProto.FLOAT, ["batch", 3]))
    trainer = Trainer(model, "cross_entropy", loss_input_names=["logits"])
    raw = trainer.predict(X)
    found = trainer.calibrate(X, Y)
    trainer.export(tmp_path / "calibrated.onnx")
    assert "only the output 'logits' is divided" in caplog.text
    session = ort.InferenceSession(str(tmp_path / "calibrated.onnx"), providers=["CPUExecutionProvider"])
    written = dict(zip(["logits", "chance"], session.run(["logits", "chance"], {"x": X}), strict=True))
    np.testing.assert_array_equal(written["logits"], raw["logits"] / np.float32(found.temperature))
    np.testing.assert_array_equal(written["chance"], raw["chance"])
    for name, array in trainer.predict(X).items():
        np.testing.assert_array_equal(written[name], array)


def test_ignored_labels_do_not_count() -> None:
    ignored = np.where(np.arange(len(Y)) % 3 == 0, -100, Y)
    trainer = Trainer(scores_model(3), "cross_entropy")
    some = trainer.calibrate(X, ignored)
    assert some == trainer.calibrate(X[ignored >= 0], Y[ignored >= 0])
    with pytest.raises(InputError, match="no labels"):
        trainer.calibrate(X, np.full(len(Y), -100))


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        ("mse", X[:, :3]),
        ("multi_margin", Y),
        ("kl_div", softmax(X[:, :3], axis=1)),
    ],
)
def test_losses_without_classes_are_refused(loss: str, target: np.ndarray) -> None:
    trainer = Trainer(scores_model(3), loss)
    with pytest.raises(
        InputError, match=r"Calibrating: the loss .* does not define the probability of one class"
    ):
        trainer.calibrate(X, target.astype(np.float32) if target.dtype == np.float64 else target)


def test_invalid_arguments_are_refused() -> None:
    trainer = Trainer(scores_model(3), "cross_entropy")
    with pytest.raises(InputError, match="a threshold decides between two classes, but the model has 3"):
        trainer.calibrate(X, Y, threshold="f1")
    with pytest.raises(InputError, match="threshold='recall' is unknown; choose f1, accuracy, mcc"):
        Trainer(scores_model(2), "cross_entropy").calibrate(X, Y % 2, threshold="recall")
    assert PROPERTY not in trainer.state.properties
    with pytest.raises(InputError, match="NaN or infinite"):
        trainer.calibrate(X * np.float32(5e37), Y)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"output": "y", "activation": "tanh"}', '{"output": "y", "activation": "exp", "a": 1}']
    + [
        f'{{"output": "y", "activation": "exp", "temperature": {t}}}'
        for t in ("0", "-1", '"a"', "1e999", "NaN")
    ],
)
def test_damaged_descriptions_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="calibration in 'run' is damaged"):
        StoredCalibration.from_json(text, "run")
