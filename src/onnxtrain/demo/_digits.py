"""Runs the demo: trains an ONNX model on real data, and checks the exported `.onnx` file."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from onnxtrain.demo._model import digits_network
from onnxtrain.demo._plots import plot_confusion, plot_history
from onnxtrain.errors import InputError, OnnxTrainError
from onnxtrain.trainer import Trainer

if TYPE_CHECKING:
    from onnxtrain.trainer import History

Array = npt.NDArray[Any]

_BATCH_SIZE, _LEARNING_RATE, _TEST_SHARE = 32, 4e-3, 0.2


@dataclass(frozen=True)
class DemoResult:
    """Result of the demo.

    Attributes:
        test_accuracy: accuracy on the test images, computed by the trainer.
        exported_accuracy: accuracy of the exported file on the same images, in a plain `InferenceSession`.
        largest_difference: largest absolute difference between the logits of the trainer and of the exported file.
        test_loss: mean cross-entropy on the test images.
        parameters: number of trained elements.
        epochs: number of epochs.
        seconds: duration of the training run, in seconds.
        samples_per_second: median training throughput of the epochs, without the time for validation.
        training_samples: number of training images.
        validation_samples: number of validation images, on which loss and accuracy are recorded after each epoch.
        test_samples: number of test images, which are used only for the final test.
        torch_imported: True if PyTorch was imported in this process (the demo itself does not need it).
        files: files that were written.
    """

    test_accuracy: float
    exported_accuracy: float
    largest_difference: float
    test_loss: float
    parameters: int
    epochs: int
    seconds: float
    samples_per_second: float
    training_samples: int
    validation_samples: int
    test_samples: int
    torch_imported: bool
    files: tuple[Path, ...]


def load_digits_data() -> tuple[Array, Array, Array, Array]:
    """Loads scikit-learn's handwritten digits.

    Images are float32 [n, 1, 8, 8] with values from 0 to 1; labels are int64 [n]. The test set is always the same fifth
    of the 1797 images, stratified by digit.

    Returns:
        Training images, test images, training labels and test labels.

    Raises:
        OnnxTrainError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise _missing(error) from error
    digits = load_digits()
    images = (digits.images / digits.images.max()).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    # A fixed random state, so that the accuracies of different runs are for the same test images.
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=_TEST_SHARE, random_state=0, stratify=labels
    )
    return train_x, test_x, train_y, test_y


def _missing(error: ImportError) -> OnnxTrainError:
    return OnnxTrainError(
        f"The demo needs scikit-learn and matplotlib ({error}). Run: pip install 'onnxtrain[demo]'"
    )


def run_demo(output: Path, epochs: int = 15, *, seed: int = 0, verbose: bool = True) -> DemoResult:
    """Trains the digits network, writes the model and figures to `output`, and verifies the exported file.

    Args:
        output: directory to write to; created if missing.
        epochs: number of passes over the training images.
        seed: seed of the initial weights, shuffling and the validation split.
        verbose: True to show progress on standard error.

    Raises:
        OnnxTrainError: a package of the extra `demo` is missing, or training failed.
    """
    try:
        # Checked first, so that a missing package is reported before training.
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise _missing(error) from error
    if epochs < 1:
        raise InputError(f"epochs must be at least 1, received {epochs}.")
    train_x, test_x, train_y, test_y = load_digits_data()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Creating the directory '{output}' failed: {error}. Choose another one.") from error
    untrained, trained = output / "untrained.onnx", output / "digits.onnx"
    onnx.save(digits_network(seed), untrained)

    trainer = Trainer(
        untrained,
        loss="cross_entropy",
        optimizer="adamw",
        learning_rate=_LEARNING_RATE,
        scheduler="cosine",
        seed=seed,
    )
    begin = time.perf_counter()
    history = trainer.fit(
        train_x, train_y, epochs=epochs, batch_size=_BATCH_SIZE, validation=0.1, verbose=verbose
    )
    seconds = time.perf_counter() - begin
    if history.stopped == "interrupted":
        # The demo saves no run, so Ctrl-C ends the command as usual.
        raise KeyboardInterrupt
    trainer.export(trained)
    scores = trainer.evaluate(test_x, test_y)
    # The point of the demo: a stock session with the exported file must have the trainer's accuracy.
    logits = _run_exported(trained, test_x)
    # Drawn from the exported file's predictions rather than the trainer's.
    figures = _write_figures(output, history, logits.argmax(axis=1), test_y)
    # Rounded like the fraction that `Trainer.fit` holds out.
    validation = round(0.1 * len(train_x))
    return DemoResult(
        test_accuracy=scores["accuracy"],
        exported_accuracy=float((logits.argmax(axis=1) == test_y).mean()),
        largest_difference=float(np.abs(logits - trainer.predict(test_x)).max()),
        test_loss=scores["loss"],
        parameters=sum(p.data.size for _, p in trainer.parameters if p.requires_grad),
        epochs=len(history),
        seconds=seconds,
        samples_per_second=float(np.median(history.samples_per_second)),
        training_samples=len(train_x) - validation,
        validation_samples=validation,
        test_samples=len(test_x),
        torch_imported="torch" in sys.modules,
        files=(untrained, trained, *figures),
    )


def _run_exported(path: Path, images: Array) -> Array:
    """Computes logits for images by running an exported model in a plain ONNX Runtime session, without onnxtrain."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["logits"], {"image": images})[0])


def _write_figures(output: Path, history: History, predicted: Array, labels: Array) -> tuple[Path, Path]:
    matrix = np.zeros((10, 10), np.int64)
    np.add.at(matrix, (labels, predicted), 1)
    curve, confusion = output / "loss_curve.png", output / "confusion_matrix.png"
    plot_history(history, curve)
    plot_confusion(matrix, [str(digit) for digit in range(10)], confusion)
    return curve, confusion
