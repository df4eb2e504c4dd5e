"""A transform that only converts, such as uint8 images to floats, also converts other data than that of training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import models
from onnxtrain import Trainer
from onnxtrain.errors import InputError

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (40, 4), dtype=np.uint8)
Y = (X[:, :3].argmax(axis=1)).astype(np.int64)


def scale(inputs: Any, targets: Any) -> tuple[Any, Any]:
    return inputs.astype(np.float32) / 255, targets


def jitter(inputs: Any, targets: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    return inputs.astype(np.float32) / 255 + rng.normal(0, 0.1, (len(inputs), 1)).astype(np.float32), targets


def seldom(inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Augments a tenth of the samples, with numbers of `numpy.random`."""
    return inputs.astype(np.float32) / 255 * np.where(np.random.rand(len(inputs), 1) < 0.1, -1, 1), targets


class Dataset:
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return X[index], int(Y[index])


def fitted(*data: Any, **settings: Any) -> Trainer:
    trainer = Trainer(models.mlp(), "cross_entropy")
    trainer.fit(*data, epochs=2, batch_size=8, verbose=False, **settings)
    return trainer


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("validation", [0.25, (X[:12], Y[:12]), Dataset()])
@pytest.mark.parametrize("data", [(X, Y), (Dataset(),)])
def test_validation_data_is_converted(validation: Any, data: Any) -> None:
    by_default = fitted(*data, transform=scale, validation=validation)
    by_hand = fitted(*data, transform=scale, validation=validation, validation_transform=scale)
    assert by_default.history.epochs == by_hand.history.epochs
    assert "val_loss" in by_default.history.last


def test_evaluation_and_prediction_are_converted() -> None:
    trainer = fitted(X, Y, transform=scale)
    x = X.astype(np.float32) / 255
    assert trainer.evaluate(X, Y) == trainer.evaluate(x, Y)
    np.testing.assert_array_equal(trainer.predict(X), trainer.predict(x))
    np.testing.assert_array_equal(trainer.predict_proba(X), trainer.predict_proba(x))
    np.testing.assert_array_equal(trainer.confusion_matrix(X, Y), trainer.confusion_matrix(x, Y))
    assert trainer.evaluate(Dataset()) == pytest.approx(trainer.evaluate(x, Y))


def test_data_that_fits_is_not_converted() -> None:
    x = X.astype(np.float32)
    trainer = fitted(x, Y, transform=scale, validation=(x, Y))
    assert {f"val_{key}": value for key, value in trainer.evaluate(x, Y, batch_size=8).items()} == {
        key: trainer.history.last[key] for key in ("val_loss", "val_accuracy")
    }
    assert trainer.evaluate(x, Y) != trainer.evaluate(x / 255, Y)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("transform", [jitter, seldom])
@pytest.mark.parametrize("data", [(X, Y), (Dataset(),)])
def test_augmentation_is_not_applied_to_other_data(transform: Any, data: Any) -> None:
    for validation in (0.25, (X[:12], Y[:12])):
        with pytest.raises(InputError, match="pass validation_transform="):
            fitted(*data, transform=transform, validation=validation)
    trainer = fitted(*data, transform=transform)
    for use in (trainer.evaluate, trainer.confusion_matrix):
        with pytest.raises(InputError, match="pass transform="):
            use(*data)
    with pytest.raises(InputError, match="pass transform="):
        trainer.predict(X)


def test_another_error_stays() -> None:
    with pytest.raises(InputError, match=r"fraction of 1\.5"):
        fitted(X, Y, transform=scale, validation=1.5)
    trainer = fitted(X, Y, transform=scale)
    with pytest.raises(InputError, match="shape"):
        trainer.evaluate(X[:, :3].astype(np.float32), Y)
    # A transform that needs targets cannot convert data to predict.
    shifted = fitted(X, Y, transform=lambda x, y: (x.astype(np.float32) / 255, y + 0))
    with pytest.raises(InputError, match="pass transform="):
        shifted.predict(X)
