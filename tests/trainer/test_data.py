"""Data is checked as a whole before anything is trained, and converted only where no meaning is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxtrain import Trainer
from onnxtrain.errors import InputError
from trainer import problems


@pytest.fixture(scope="module")
def classifier() -> Trainer:
    problem = problems.classes()
    return Trainer(problem.model, problem.loss)


@pytest.fixture(scope="module")
def regressor() -> Trainer:
    return Trainer(problems.line().model, "mse")


X, LABELS = np.zeros((6, 4), np.float32), np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X, LABELS[:5], r"different numbers of samples \(x: 6, labels: 5\)"),
        (X[:0], LABELS[:0], "There are no samples"),
        (X[:, :3], LABELS, r"received shape \[6, 3\]; axis 1 must be 4"),
        (X[:, 0], LABELS, r"rank 1 instead of 2"),
        (
            X,
            LABELS[:, None],
            r"one integer per sample, received shape \[6, 1\]. Pass labels\[:, 0\]",
        ),
        (X, np.eye(3)[LABELS], r"they are one-hot. Pass labels.argmax\(axis=1\)"),
        (X, np.eye(3, dtype=np.int64)[LABELS], r"they are one-hot. Pass labels.argmax\(axis=1\)"),
        (X, LABELS[:, None] * np.ones(2, np.int64), r"'labels'.*rank 2 instead of 1"),
        (X, LABELS + 1, r"class labels must be 0 to 2, or -100.*received 3 at index \[2\]"),
        (X, -LABELS, r"received -1 at index \[1\] \(4 such labels\)"),
        (
            X,
            LABELS.astype(float),
            r"'labels' should be int64, received dtype float64. Class labels are integers",
        ),
        (X, LABELS.astype(str), r"should be int64, received dtype <U21"),
        (X.astype(np.uint8), LABELS, r"should be float32, received dtype uint8. Convert with"),
        (X.astype(complex), LABELS, "received dtype complex128"),
        (X == 0, LABELS, "received dtype bool"),
        (np.array([[1, 2], [3]], object), LABELS, "not a rectangular array of numbers"),
        ([[1.0, 2.0], [3.0]], LABELS, "not an array of one shape"),
        (np.float32(1), LABELS, "no batch axis"),
        (np.where(np.eye(6, 4) > 0, np.nan, 0), LABELS, r"contains NaN \(first in sample 0\)"),
        (np.where(np.eye(6, 4, k=-2) > 0, np.inf, 0), LABELS, r"contains infinity \(first in sample 2\)"),
        (np.where(np.eye(6, 4, k=-2) > 0, -np.inf, 0).astype(np.float16), LABELS, "use numpy.finfo"),
        (X.astype(float) + 1e39, LABELS, r"values too large for float32 \(largest: 1e\+39\)"),
        (X, None, r"needs targets \(labels\), received None"),
        ({"image": X}, LABELS, r"inputs are x; received image \(missing: x; unknown: image\)"),
        (X, np.array([2**63] * 6, np.uint64), "do not fit into int64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unusable_data_is_refused(classifier: Trainer, x: Any, y: Any, message: str) -> None:
    before = {name: p.data.copy() for name, p in classifier.parameters}
    with pytest.raises(InputError, match=message):
        classifier.fit(x, y, verbose=False)
    with pytest.raises(InputError, match=message):
        classifier.evaluate(x, y)
    if y is not None:
        with pytest.raises(InputError, match="Validation data: .*" + message):
            classifier.fit(X, LABELS, validation=(x, y), verbose=False)
    for name, parameter in classifier.parameters:
        np.testing.assert_array_equal(parameter.data, before[name])


@pytest.mark.parametrize(
    "x",
    [
        X.astype(np.float64),
        X.astype(np.float16),
        np.asfortranarray(X),
        X[::-1],
        X.tolist(),
        [X],
        {"x": X},
        X.astype(">f4"),
    ],
    ids=["float64", "float16", "fortran", "negative-stride", "list", "list-of-arrays", "dict", "big-endian"],
)
@pytest.mark.parametrize(
    "y",
    [
        LABELS,
        LABELS.astype(np.uint8),
        LABELS.tolist(),
        {"labels": LABELS.astype(np.int32)},
        LABELS.astype(object),
    ],
)
def test_usable_data_is_accepted(classifier: Trainer, x: Any, y: Any) -> None:
    assert classifier.evaluate(x, y) == classifier.evaluate(X, LABELS)


def test_ignored_labels_are_accepted_and_do_not_count(classifier: Trainer) -> None:
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    predicted = np.asarray(classifier.predict(x)).argmax(axis=1)
    labels = np.array([predicted[0], predicted[1], (predicted[2] + 1) % 3, -100, -100, -100])
    assert classifier.evaluate(x, labels)["accuracy"] == pytest.approx(2 / 3)


def test_target_of_wrong_shape_does_not_broadcast(regressor: Trainer) -> None:
    problem = problems.line()
    with pytest.raises(InputError, match="rank 1 instead of 2"):
        regressor.fit(problem.x, problem.y[:, 0], verbose=False)


def test_data_is_not_changed(regressor: Trainer) -> None:
    problem = problems.line()
    x, y = problem.x.astype(np.float64), problem.y.copy()
    regressor.fit(x, y, verbose=False)
    np.testing.assert_array_equal(x, problem.x)
    np.testing.assert_array_equal(y, problem.y)


def test_several_inputs_by_order_and_by_name() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((10, 2)), rng.standard_normal((10, 3))
    trainer = Trainer(problems.two_inputs(), "mse", loss_input_names=["sum"], frozen_params=["v"])
    target = np.ones((10, 1))
    scores = trainer.evaluate([left, right], target)
    assert scores == trainer.evaluate({"right": right, "left": left}, target)
    assert set(scores) == {"loss", "mae", "rmse"}
    outputs = trainer.predict((left, right), batch_size=3)
    assert {name: value.shape for name, value in outputs.items()} == {"sum": (10, 1), "product": (10, 2)}
    with pytest.raises(InputError, match=r"has 2 inputs \(left, right\); received 1 arrays"):
        trainer.predict([left])
    with pytest.raises(InputError, match=r"received ndarray. Pass a list in this order"):
        trainer.predict(left)
    with pytest.raises(InputError, match=r"different numbers of samples \(left: 10, right: 9\)"):
        trainer.predict([left, right[:9]])


def test_a_model_of_fixed_batch_size_trains_as_a_dynamic_one(caplog: pytest.LogCaptureFixture) -> None:
    problem, fixed = problems.line(samples=42), problems.line(samples=42, batch=8)
    trainer = Trainer(fixed.model, "mse", "sgd", learning_rate=0.05)
    dynamic = Trainer(problem.model, "mse", "sgd", learning_rate=0.05)
    trainer.fit(problem.x, problem.y, shuffle=False, verbose=False)
    assert "2 of 42 samples are left out of each epoch: the model takes exactly 8 at a time" in caplog.text
    dynamic.fit(problem.x[:40], problem.y[:40], batch_size=8, shuffle=False, verbose=False)
    np.testing.assert_allclose(trainer.parameters["w"].data, dynamic.parameters["w"].data, rtol=1e-6)
    prediction = trainer.predict(problem.x)
    assert prediction.shape == (42, 1)
    np.testing.assert_allclose(prediction, dynamic.predict(problem.x), rtol=1e-5)
    with pytest.raises(
        InputError, match="batch_size is 16, but the model was exported with a fixed batch of 8"
    ):
        trainer.fit(problem.x, problem.y, batch_size=16, verbose=False)
    with pytest.raises(InputError, match="takes exactly 8 samples at a time, received 5 to train on"):
        trainer.fit(problem.x[:5], problem.y[:5], verbose=False)


def test_integer_targets_of_a_regression() -> None:
    problem = problems.line()
    with pytest.raises(
        InputError, match=r"If they are quantities, convert with .astype\('float32'\); if they are"
    ):
        Trainer(problem.model, "mse").fit(problem.x, problem.y.astype(int), verbose=False)


def _scaled(inputs: Any, targets: Any) -> tuple[Any, Any]:
    return inputs.astype(np.float32) / 255, targets


def test_validation_and_predictions_of_bytes_are_those_of_the_arrays_that_a_transform_makes() -> None:
    """Images may stay uint8 in memory, whatever validates and predicts."""
    problem = problems.classes(samples=40)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 4)).astype(np.uint8)
    floats, labels = _scaled(images, problem.y)
    batches = [(images[:10], labels[:10]), (images[10:20], labels[10:20])]
    float_batches = [_scaled(*batch) for batch in batches]
    for of_bytes, of_floats in (
        (0.25, 0.25),
        ((images[:9], labels[:9]), (floats[:9], labels[:9])),
        (batches, float_batches),
    ):
        trainer, plain = (
            Trainer(problem.model, "cross_entropy", metrics=["accuracy", "f1_macro"]) for _ in range(2)
        )
        trainer.fit(
            images, labels, epochs=2, validation=of_bytes, verbose=False, batch_size=8,
            transform=_scaled, validation_transform=_scaled,
        )  # fmt: skip
        plain.fit(floats, labels, epochs=2, validation=of_floats, verbose=False, batch_size=8)
        assert trainer.history.epochs == plain.history.epochs
    for call in ("evaluate", "confusion_matrix"):
        np.testing.assert_equal(
            getattr(trainer, call)(images, labels, transform=_scaled), getattr(plain, call)(floats, labels)
        )
    np.testing.assert_array_equal(trainer.predict(images, transform=_scaled), plain.predict(floats))
    np.testing.assert_array_equal(
        trainer.predict_proba(batches, transform=_scaled), plain.predict_proba(floats[:20])
    )
    found = trainer.find_learning_rate(images, labels, steps=5, transform=_scaled)
    assert found.losses == plain.find_learning_rate(floats, labels, steps=5).losses


def test_errors_of_data_that_is_not_transformed_name_the_argument() -> None:
    problem = problems.classes(samples=40)
    images = np.zeros((40, 4), np.uint8)
    trainer = Trainer(problem.model, "cross_entropy")

    def shifted(x: Any, y: Any, rng: np.random.Generator) -> tuple[Any, Any]:
        return _scaled(x, y)[0] + np.float32(rng.normal()), y

    for validation in (0.25, (images, problem.y)):
        with pytest.raises(
            InputError, match=r"Validation data: .*received dtype uint8.*pass validation_transform="
        ):
            trainer.fit(images, problem.y, validation=validation, transform=shifted, verbose=False)
    with pytest.raises(InputError, match="validation_transform needs validation data"):
        trainer.check_data(images, problem.y, transform=_scaled, validation_transform=_scaled)
    trainer.fit(images, problem.y, transform=shifted, verbose=False)
    for call in (lambda: trainer.evaluate(images, problem.y), lambda: trainer.predict(images)):
        with pytest.raises(InputError, match=r"received dtype uint8.*to convert it, pass transform="):
            call()
