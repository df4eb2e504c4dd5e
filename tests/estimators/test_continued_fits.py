"""`partial_fit`, `warm_start`, early stopping and sparse samples beside scikit-learn's perceptrons."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import models
from onnxtrain import OnnxClassifier, OnnxRegressor, Trainer
from onnxtrain.surgery._perceptron import perceptron

SETTINGS: dict[str, Any] = {"hidden_layer_sizes": (8,), "random_state": 0, "learning_rate": 0.01}


def iris() -> tuple[Any, Any]:
    x, y = load_iris(return_X_y=True)
    return StandardScaler().fit_transform(x), np.array(["setosa", "versicolor", "virginica"])[y]


def diabetes() -> tuple[Any, Any]:
    x, y = load_diabetes(return_X_y=True)
    return StandardScaler().fit_transform(x), (y - y.mean()) / y.std()


def sparse(x: Any) -> Any:
    return scipy.sparse.csr_matrix(np.where(np.abs(x) < 0.7, 0, x))


def test_partial_fit_takes_the_steps_of_one_trainer() -> None:
    """Calls on parts of the data are epochs of a `Trainer` on these parts, with one optimizer state."""
    x, y = iris()
    parts = [slice(0, 100), slice(50, 150), slice(0, 150)]
    classifier = OnnxClassifier(**SETTINGS)
    classifier.partial_fit(x[:100], y[:100], classes=np.unique(y))
    seed = np.random.RandomState(0).randint(2**31 - 1)
    trainer = Trainer(
        perceptron(4, (8,), 3, np.dtype(np.float64), seed), "cross_entropy", learning_rate=0.01, seed=seed
    )
    labels = np.unique(y, return_inverse=True)[1]
    for index, part in enumerate(parts):
        if index:
            classifier.partial_fit(x[part], y[part])
        trainer.fit(x[part], labels[part], batch_size=128, verbose=False)
        assert classifier.n_iter_ == index + 1
    expected = trainer.predict_proba(x)
    np.testing.assert_array_equal(classifier.predict_proba(x), expected)


@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy])
def test_a_copy_continues_with_its_own_optimizer_state(copied: Any) -> None:
    x, y = diabetes()
    regressor = OnnxRegressor(**SETTINGS)
    for _ in range(3):
        regressor.partial_fit(x, y)
    other = copied(regressor)
    before = regressor.predict(x)
    np.testing.assert_array_equal(other.predict(x), before)
    other.partial_fit(x, y)
    # The original is unchanged, and its next step is the same.
    np.testing.assert_array_equal(regressor.predict(x), before)
    regressor.partial_fit(x, y)
    np.testing.assert_array_equal(other.predict(x), regressor.predict(x))
    # Pickled twice without a step between, and after one.
    again = copied(copied(other)).partial_fit(x, y)
    np.testing.assert_array_equal(again.predict(x), regressor.partial_fit(x, y).predict(x))


def test_partial_fit_refuses_what_scikit_learn_refuses() -> None:
    x, y = iris()
    with pytest.raises(ValueError, match="classes must be passed on the first call to partial_fit"):
        OnnxClassifier().partial_fit(x, y)
    classifier = OnnxClassifier(**SETTINGS).partial_fit(x, y, classes=np.unique(y))
    with pytest.raises(ValueError, match="is not the same as on last call to partial_fit"):
        classifier.partial_fit(x, y, classes=["setosa"])
    with pytest.raises(ValueError, match=r"y has the labels \['rose'\], but the classes are \['setosa'"):
        classifier.partial_fit(x[:1], ["rose"])
    with pytest.raises(ValueError, match="has 3 features, but OnnxClassifier is expecting 4"):
        classifier.partial_fit(x[:, :3], y)
    with pytest.raises(ValueError, match="class_weight='balanced' needs all samples"):
        OnnxClassifier(class_weight="balanced").partial_fit(x, y, classes=np.unique(y))
    with pytest.raises(ValueError, match="partial_fit does not support early_stopping=True"):
        OnnxRegressor(early_stopping=True).partial_fit(*diabetes())
    regressor = OnnxRegressor(**SETTINGS).partial_fit(x, x[:, 0])
    with pytest.raises(ValueError, match="y has 2 targets, but the regressor was fitted to 1"):
        regressor.partial_fit(x, x[:, :2])


def test_partial_fit_weights_and_continues_a_fit() -> None:
    x, y = iris()
    weights = np.random.default_rng(0).integers(0, 3, len(y))
    once = {**SETTINGS, "batch_size": 1000}
    weighted = OnnxClassifier(class_weight={"setosa": 2.0}, **once).partial_fit(
        x, y, classes=np.unique(y), sample_weight=weights
    )
    times = weights * np.where(y == "setosa", 2, 1)
    copies = OnnxClassifier(**once).partial_fit(
        np.repeat(x, times, axis=0), np.repeat(y, times), classes=np.unique(y)
    )
    np.testing.assert_allclose(weighted.predict_proba(x), copies.predict_proba(x), rtol=1e-9)
    # From the fitted weights on: another epoch at rate 0 changes nothing.
    classifier = OnnxClassifier(epochs=3, **SETTINGS).fit(x, y)
    expected = classifier.predict_proba(x)
    classifier.set_params(learning_rate=0.0).partial_fit(x, y)
    np.testing.assert_array_equal(classifier.predict_proba(x), expected)
    # A later fit begins anew.
    classifier.set_params(learning_rate=0.01).fit(x, y)
    np.testing.assert_array_equal(classifier.predict_proba(x), expected)


@pytest.mark.parametrize("kind", ["perceptron", "batch norm"])
def test_warm_start_continues_from_the_weights(kind: str) -> None:
    if kind == "perceptron":
        x, y = iris()
        settings = {**SETTINGS, "batch_size": 1000, "optimizer": "sgd", "learning_rate": 0.1}
    else:
        labels = np.arange(60) % 3
        noise = np.random.default_rng(0).standard_normal((60, 2, 6, 6))
        x, y = (noise + 2 * labels[:, None, None, None]).astype(np.float32), labels
        settings = {"model": models.conv_bn(training=True), "batch_size": 1000, "random_state": 0}
        settings |= {"optimizer": "sgd", "learning_rate": 0.01}
    # Without momentum and with one batch an epoch, twice three epochs are six.
    warm = OnnxClassifier(epochs=3, warm_start=True, **settings).fit(x, y).fit(x, y)
    whole = OnnxClassifier(epochs=6, **settings).fit(x, y)
    np.testing.assert_allclose(warm.predict_proba(x), whole.predict_proba(x), rtol=1e-5, atol=1e-7)
    assert warm.n_iter_ == 3
    cold = OnnxClassifier(epochs=3, **settings).fit(x, y).fit(x, y)
    assert not np.allclose(cold.predict_proba(x), whole.predict_proba(x), rtol=1e-3)


def test_warm_start_refuses_another_shape() -> None:
    x, y = iris()
    classifier = OnnxClassifier(epochs=1, warm_start=True, **SETTINGS).fit(x, y)
    with pytest.raises(
        ValueError, match=r"warm_start=True needs the classes of the previous call to fit, \['setosa'"
    ):
        classifier.fit(x[:100], y[:100])
    with pytest.raises(ValueError, match="has 3 features, but OnnxClassifier is expecting 4"):
        classifier.fit(x[:, :3], y)
    with pytest.raises(
        ValueError, match=r"has no parameter '0.weight' of shape \[5, 4\]. Pass the same model"
    ):
        classifier.set_params(hidden_layer_sizes=(5,)).fit(x, y)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [OnnxClassifier, OnnxRegressor])
def test_early_stopping_follows_scikit_learns_rule(kind: Any, weighted: bool) -> None:
    """The split of `train_test_split`, scores of `score`, and the weights of the best epoch."""
    x, y = iris() if kind is OnnxClassifier else diabetes()
    weights = np.random.default_rng(0).uniform(0.5, 2, len(y)) if weighted else None
    settings = {
        **SETTINGS,
        "early_stopping": True,
        "validation_fraction": 0.2,
        "n_iter_no_change": 3,
        "tol": 1e-3,
    }
    estimator = kind(epochs=60, **settings).fit(x, y, sample_weight=weights)
    scores = estimator.validation_scores_
    assert len(scores) == estimator.n_iter_ < 60
    # scikit-learn's rule, written down again.
    best, waited, stops = -np.inf, 0, []
    for score in scores:
        waited = waited + 1 if score < best + 1e-3 else 0
        best = max(best, score)
        stops.append(waited > 3)
    assert stops == [False] * (len(scores) - 1) + [True]
    assert estimator.best_validation_score_ == best == max(scores)

    seed = np.random.RandomState(0).randint(2**31 - 1)
    arrays = [x, y] if weights is None else [x, y, weights]
    parts = train_test_split(
        *arrays, test_size=0.2, random_state=seed, stratify=y if kind is OnnxClassifier else None
    )
    held_out, weight = (parts[1], parts[3]), parts[5] if weighted else None
    assert estimator.score(*held_out, sample_weight=weight) == pytest.approx(best, rel=1e-9)
    score = accuracy_score if kind is OnnxClassifier else r2_score
    assert score(held_out[1], estimator.predict(held_out[0]), sample_weight=weight) == pytest.approx(best)
    # Trained on the other samples alone, for as many epochs as the best.
    twin = kind(epochs=scores.index(best) + 1, **SETTINGS)
    twin.fit(parts[0], parts[2], sample_weight=parts[4] if weighted else None)
    np.testing.assert_allclose(twin.predict(held_out[0]) == estimator.predict(held_out[0]), True)
    plain = kind(epochs=2, **SETTINGS).fit(x, y)
    assert (plain.validation_scores_, plain.best_validation_score_) == (None, None)
    with pytest.raises(ValueError, match="early_stopping holds out samples of its own"):
        clone(estimator).set_params(patience=3).fit(x, y)


@pytest.mark.thorough
def test_sparse_samples_are_trained_on_as_dense_ones() -> None:
    x, y = iris()
    matrix = sparse(x)
    weights = np.random.default_rng(0).uniform(0.5, 2, len(y))
    for form in (matrix, matrix.tocsc(), matrix.tocoo()):
        classifiers = [
            OnnxClassifier(epochs=3, **SETTINGS).fit(data, y, sample_weight=weights)
            for data in (form, matrix.toarray())
        ]
        expected = classifiers[1].predict_proba(matrix.toarray())
        np.testing.assert_array_equal(classifiers[0].predict_proba(form), expected)
    target = np.stack([x[:, 0], x[:, 1]], axis=1)
    settings = {**SETTINGS, "validation": 0.2, "patience": 2, "dtype": "float32"}
    regressors = [
        OnnxRegressor(epochs=4, **settings).fit(data, target) for data in (matrix, matrix.toarray())
    ]
    np.testing.assert_array_equal(regressors[0].predict(matrix), regressors[1].predict(matrix.toarray()))
    stopped = [
        OnnxClassifier(epochs=4, early_stopping=True, **SETTINGS).fit(data, y).validation_scores_
        for data in (matrix, matrix.toarray())
    ]
    assert stopped[0] == stopped[1]
    partial = [
        OnnxClassifier(**SETTINGS).partial_fit(data, y, classes=np.unique(y)).predict_proba(x)
        for data in (matrix, matrix.toarray())
    ]
    np.testing.assert_array_equal(*partial)
    matrix.data[0] = np.nan
    with pytest.raises(ValueError, match="Input X contains NaN"):
        OnnxClassifier(epochs=1).fit(matrix, y)


def test_rows_of_a_sparse_matrix_become_dense_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that would take 80 GB as an array."""
    kind = scipy.sparse.csr_matrix
    rows: list[int] = []
    dense = kind.toarray

    def toarray(self: Any, *arguments: Any, **named: Any) -> Any:
        rows.append(self.shape[0])
        return dense(self, *arguments, **named)

    monkeypatch.setattr(kind, "toarray", toarray)
    rng = np.random.default_rng(0)
    places = rng.integers(0, 200_000, 900), rng.integers(0, 50_000, 900)
    matrix = kind((rng.standard_normal(900), places), shape=(200_000, 50_000))
    picked = matrix[:70]
    classifier = OnnxClassifier(
        hidden_layer_sizes=(), epochs=1, batch_size=16, dtype="float32", random_state=0
    )
    classifier.fit(picked, np.arange(70) % 2)
    assert max(rows) <= 16
    assert classifier.predict(matrix[:40]).shape == (40,)
    assert max(rows) <= 16
