"""The estimators beside scikit-learn: its own checks, its searches and pipelines, and models that it fits exactly."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes, load_iris
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.estimator_checks import check_estimator

import models
from onnxtrain import OnnxClassifier, OnnxRegressor, make_batch_dynamic
from onnxtrain.errors import InputError
from onnxtrain.losses import CrossEntropyLoss
from onnxtrain.surgery._perceptron import perceptron

LINEAR: dict[str, Any] = {
    "hidden_layer_sizes": (),
    "learning_rate": 0.05,
    "random_state": 0,
    "batch_size": 1000,
}
"""Settings of a model that scikit-learn fits exactly: of one layer, trained on all samples at once."""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [OnnxClassifier, OnnxRegressor])
def test_passes_the_checks_of_scikit_learn(kind: Any) -> None:
    """All about 60 of them: a check that is skipped warns, which is an error here."""
    check_estimator(kind())


def iris() -> tuple[Any, Any]:
    x, y = load_iris(return_X_y=True)
    return StandardScaler().fit_transform(x), np.array(["setosa", "versicolor", "virginica"])[y]


@pytest.mark.parametrize("class_weight", [None, "balanced", {"setosa": 5.0, "virginica": 0.5}])
def test_a_linear_classifier_is_the_logistic_regression(class_weight: Any) -> None:
    """With weight decay 0.05 the minimum is finite, and is that of LogisticRegression without the intercept's decay."""
    x, y = iris()
    x, y = x[20:], y[20:]
    # Before version 1.7 LogisticRegression balances classes whatever the samples weigh.
    weights = (
        np.ones(len(y)) if class_weight == "balanced" else np.random.default_rng(0).uniform(0.5, 2, len(y))
    )
    total = weights * (1 if class_weight is None else compute_sample_weight(class_weight, y))
    decay = 0.05
    expected = LogisticRegression(
        C=1 / (decay * total.sum()), class_weight=class_weight, tol=1e-10, max_iter=5000
    )
    expected.fit(x, y, sample_weight=weights)

    from onnxtrain.optimizers import SGD, ParameterGroup

    optimizer = SGD(momentum=0.9, weight_decay=decay, groups=[ParameterGroup("*.bias", weight_decay=0.0)])
    classifier = OnnxClassifier(optimizer=optimizer, class_weight=class_weight, epochs=1500, **LINEAR)
    classifier.set_params(learning_rate=0.5).fit(x, y, sample_weight=weights)
    np.testing.assert_allclose(classifier.predict_proba(x), expected.predict_proba(x), atol=1e-4)
    np.testing.assert_array_equal(classifier.predict(x), expected.predict(x))
    np.testing.assert_array_equal(classifier.classes_, expected.classes_)
    assert classifier.score(x, y) == expected.score(x, y)


def test_balanced_classes_and_sample_weights_are_copies_of_the_samples() -> None:
    x, y = iris()
    times = np.random.default_rng(0).integers(0, 4, len(y))
    estimator = OnnxClassifier(class_weight="balanced", epochs=20, **LINEAR)
    expected = clone(estimator).fit(np.repeat(x, times, axis=0), np.repeat(y, times))
    estimator.fit(x, y, sample_weight=times)
    np.testing.assert_allclose(estimator.predict_proba(x), expected.predict_proba(x), rtol=1e-9)
    with pytest.raises(ValueError, match=r"names \['rose'\], but the classes are"):
        OnnxClassifier(class_weight={"rose": 2.0}).fit(x, y)
    with pytest.raises(ValueError, match="must be 'balanced', a dict or None, received 'auto'"):
        OnnxClassifier(class_weight="auto").fit(x, y)


def test_a_linear_regressor_is_the_linear_regression() -> None:
    x, y = load_diabetes(return_X_y=True)
    x, y = StandardScaler().fit_transform(x)[:, [2, 3, 8]], np.stack([y / 100, y[::-1] / 50], axis=1)
    weights = np.random.default_rng(0).uniform(0.5, 2, len(y))
    expected = LinearRegression().fit(x, y, sample_weight=weights)
    regressor = OnnxRegressor(optimizer="sgd", epochs=800, **LINEAR).set_params(learning_rate=0.3)
    regressor.fit(x, y, sample_weight=weights)
    np.testing.assert_allclose(regressor.predict(x), expected.predict(x), atol=1e-5)
    assert regressor.score(x, y) == pytest.approx(expected.score(x, y), abs=1e-6)
    single = clone(regressor).fit(x, y[:, 0], sample_weight=weights)
    assert single.predict(x).shape == (len(x),)
    np.testing.assert_allclose(single.predict(x), expected.predict(x)[:, 0], atol=1e-5)


def test_search_pipeline_and_cross_validation() -> None:
    x, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), OnnxClassifier(learning_rate=0.01, epochs=40, random_state=0))
    rates = [1e-5, 1e-2]
    search = GridSearchCV(pipeline, {"onnxclassifier__learning_rate": rates}, cv=3).fit(x, y)
    assert search.best_params_ == {"onnxclassifier__learning_rate": 1e-2}
    assert search.best_score_ > 0.9
    scores = cross_val_score(pipeline, x, y, cv=3, scoring="neg_log_loss")
    assert (scores > -0.5).all()
    data, quantity = load_diabetes(return_X_y=True)
    regressor = make_pipeline(
        StandardScaler(), OnnxRegressor(hidden_layer_sizes=(8,), epochs=60, random_state=0)
    )
    scaled = TransformedTargetRegressor(regressor, transformer=StandardScaler())
    assert (cross_val_score(scaled, data, quantity, cv=3) > 0.3).all()


def test_saved_file_predicts_what_the_estimator_predicts(tmp_path: Path) -> None:
    x, y = iris()
    classifier = OnnxClassifier(epochs=5, dtype="float32", random_state=0).fit(x, y)
    classifier.save(tmp_path / "model.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"), full_check=True)
    scores = ort.InferenceSession(tmp_path / "model.onnx").run(None, {"x": x.astype(np.float32)})[0]
    expected = torch.softmax(torch.tensor(scores), 1)
    np.testing.assert_allclose(classifier.predict_proba(x), expected, rtol=1e-6)
    assert classifier.predict_proba(x).dtype == np.float32
    # Each gets its own session, and what it learns is its own.
    for other in (pickle.loads(pickle.dumps(classifier)), copy.deepcopy(classifier), copy.copy(classifier)):
        np.testing.assert_array_equal(other.predict_proba(x), classifier.predict_proba(x))
        other.fit(x[::-1], y)
        np.testing.assert_allclose(classifier.predict_proba(x), expected, rtol=1e-6)


def test_dtype_is_that_of_the_data_unless_it_is_given() -> None:
    x, y = iris()
    for data, dtype, element in (
        (x, None, "double"),
        (x.astype(np.float32), None, "float"),
        (x, "float32", "float"),
    ):
        classifier = OnnxClassifier(epochs=1, dtype=dtype, random_state=0).fit(data, y)
        session = ort.InferenceSession(classifier.onnx_model_)
        assert session.get_inputs()[0].type == f"tensor({element})"


def test_perceptron_computes_and_begins_as_pytorch_does() -> None:
    model = perceptron(3, (16, 8), 2, np.dtype(np.float64), seed=0)
    onnx.checker.check_model(model, full_check=True)
    twin = torch.nn.Sequential(
        torch.nn.Linear(3, 16),
        torch.nn.ReLU(),
        torch.nn.Linear(16, 8),
        torch.nn.ReLU(),
        torch.nn.Linear(8, 2),
    ).double()
    values = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in model.graph.initializer}
    for name, parameter in twin.named_parameters():
        # PyTorch's own values are drawn from the same interval.
        bound = 1 / np.sqrt(twin[int(name[0])].in_features)
        assert parameter.abs().max() <= bound
        assert 0.4 * bound < values[name].abs().max() <= bound
    twin.load_state_dict(values)
    x = np.random.default_rng(0).standard_normal((5, 3))
    result = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(result, twin(torch.tensor(x)).detach(), rtol=1e-12)


def images(classes: int) -> tuple[Any, Any]:
    """Images whose brightness tells the class."""
    labels = np.arange(60) % classes
    noise = np.random.default_rng(0).standard_normal((60, 2, 6, 6))
    return (noise + 2 * labels[:, None, None, None]).astype(np.float32), labels * 10


@pytest.mark.parametrize("kind", ["path", "proto", "ir"])
def test_fine_tunes_a_model_and_replaces_its_head(kind: str, tmp_path: Path) -> None:
    proto = models.conv_bn(training=True)
    onnx.save(proto, tmp_path / "model.onnx")
    model = {"path": tmp_path / "model.onnx", "proto": proto, "ir": ir.from_proto(proto)}[kind]
    for classes in (3, 5):
        x, y = images(classes)
        estimator = clone(OnnxClassifier(model, epochs=80, learning_rate=0.01, batch_size=20, random_state=0))
        estimator.fit(x, y)
        assert estimator.predict_proba(x).shape == (60, classes)
        assert set(estimator.predict(x)) <= {10 * label for label in range(classes)}
        assert estimator.score(x, y) > 0.8
        new = {t.name: t.dims for t in onnx.load_from_string(estimator.onnx_model_).graph.initializer}
        old = {t.name: t.dims for t in proto.graph.initializer}
        assert (new.keys() == old.keys()) or classes != 3
    with pytest.raises(ValueError, match="has 1 features, but OnnxClassifier is expecting 2"):
        estimator.predict(x[:, :1])


def test_a_softmax_at_the_end_is_left_out_and_a_sigmoid_of_a_regression_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = iris()
    text = """<ir_version: 10, opset_import: ["": 21]>
        net (float[n, 4] x) => (float[n, 3] y) <float[4, 3] w = {W}> { z = MatMul(x, w) y = FUNCTION(z) }"""
    numbers = np.random.default_rng(0).standard_normal(12)
    values = ", ".join(f"{number:.3f}" for number in numbers)
    softmax, sigmoid = (
        onnx.parser.parse_model(text.replace("W", values).replace("FUNCTION", f))
        for f in ("Softmax", "Sigmoid")
    )
    frozen = {"epochs": 1, "learning_rate": 0.0}
    classifier = OnnxClassifier(softmax, **frozen).fit(x, y)
    expected = ort.InferenceSession(softmax.SerializeToString()).run(None, {"x": x.astype(np.float32)})[0]
    np.testing.assert_allclose(classifier.predict_proba(x), expected, rtol=1e-5)
    assert "Softmax" in caplog.text
    session = ort.InferenceSession(classifier.onnx_model_)
    assert [value.name for value in session.get_outputs()] == ["y"]
    np.testing.assert_allclose(
        session.run(None, {"x": x.astype(np.float32)})[0],
        x @ numbers.round(3).reshape(4, 3),
        rtol=1e-3,
        atol=1e-5,
    )
    regressor = OnnxRegressor(sigmoid, **frozen).fit(x, np.ones((150, 3)))
    expected = ort.InferenceSession(sigmoid.SerializeToString()).run(None, {"x": x.astype(np.float32)})[0]
    np.testing.assert_allclose(regressor.predict(x), expected, rtol=1e-5)


def test_models_that_do_not_fit_are_refused() -> None:
    x, y = iris()
    fixed = models.make_model(
        models.parse_nodes("y = MatMul(x, w)"),
        {"x": [5, 4]},
        {"y": [5, 3]},
        {"w": np.ones((4, 3), np.float32)},
    )
    with pytest.raises(
        InputError, match=r"has a fixed batch size of 5. Pass model=onnxtrain.make_batch_dynamic"
    ):
        OnnxClassifier(fixed).fit(x, y)
    assert OnnxClassifier(make_batch_dynamic(fixed), epochs=1).fit(x, y).predict(x).shape == (150,)
    from trainer.problems import two_inputs

    with pytest.raises(InputError, match="supports models with one input, received left, right"):
        OnnxRegressor(two_inputs()).fit(x, x[:, 0])
    for sizes in (8, (8, 0), (2.5,), "8"):
        with pytest.raises(
            ValueError, match=r"hidden_layer_sizes must contain positive integers, e\.g\. \(100,\)"
        ):
            OnnxClassifier(hidden_layer_sizes=sizes).fit(x, y)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too large for float32"):
        OnnxClassifier(dtype="float32").fit(x * 1e39, y)


def test_options_reach_the_trainer_and_the_fit() -> None:
    x, y = iris()
    estimator = OnnxClassifier(
        loss=CrossEntropyLoss(label_smoothing=0.1),
        epochs=50,
        validation=0.2,
        patience=2,
        learning_rate=0.3,
        trainer_options={"frozen_params": "0.*", "metrics": ["f1"]},
        fit_options={"epochs": 40},
        random_state=0,
    ).fit(x, y)
    assert {"val_loss", "val_f1"} <= set(estimator.history_.keys())
    assert estimator.n_iter_ == len(estimator.history_) < 40
    values = {
        t.name: onnx.numpy_helper.to_array(t)
        for t in onnx.load_from_string(estimator.onnx_model_).graph.initializer
    }
    seed = np.random.RandomState(0).randint(2**31 - 1)
    first = perceptron(4, (100,), 3, np.dtype(np.float64), seed)
    for tensor in first.graph.initializer:
        same = np.array_equal(onnx.numpy_helper.to_array(tensor), values[tensor.name])
        assert same == tensor.name.startswith("0.")


def test_frames_give_names_of_features() -> None:
    x, y = load_iris(return_X_y=True, as_frame=True)
    estimator = OnnxClassifier(epochs=1).fit(x, y)
    assert list(estimator.feature_names_in_) == list(x.columns)
    with pytest.raises(ValueError, match="feature names should match"):
        estimator.predict(pd.DataFrame(x.to_numpy(), columns=list("abcd")))


def test_scikit_learn_is_imported_when_an_estimator_is_used() -> None:
    import fresh_process

    code = """
import sys
sys.modules["sklearn"] = None
from onnxtrain import Trainer
try:
    from onnxtrain import OnnxClassifier
except ModuleNotFoundError as error:
    print(error)
"""
    printed = fresh_process.python("-c", code).stdout
    assert printed.startswith("scikit-learn is not installed")
    assert "pip install 'onnxtrain[sklearn]'" in printed


def test_masked_values_are_refused() -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.array([0, 1] * 3)
    hidden = np.ma.array(x, mask=x > 10)
    estimator = OnnxClassifier(epochs=1).fit(np.ma.array(x), y)
    for call in (
        lambda: estimator.predict(hidden),
        lambda: clone(estimator).fit(hidden, y),
        lambda: clone(estimator).fit(x, np.ma.array(y, mask=y > 0)),
        lambda: OnnxRegressor(epochs=1).fit(x, y, np.ma.array(np.ones(6), mask=y > 0)),
    ):
        with pytest.raises(InputError, match="values are missing"):
            call()
