"""Trains on, evaluates and predicts folders of images from the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from onnxtrain.cli._data import Arrays
from onnxtrain.cli._options import ImageOptions, PreparationOptions
from onnxtrain.cli._predict_model import file_calibration
from onnxtrain.errors import InputError, ModelError
from onnxtrain.images import ImageFolder
from onnxtrain.images._metadata import ImageMetadata
from onnxtrain.images._model_files import find_image_metadata
from onnxtrain.images._pipeline import make_pipeline
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.atomic import replace_file
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.runtime.session import run_on_arrays
from onnxtrain.tables import class_names
from onnxtrain.trainer import Trainer
from onnxtrain.trainer._fit.calibration import calibrated_outputs
from onnxtrain.trainer._fit.datasets import prediction_source
from onnxtrain.trainer._metrics.probabilities import probabilities_of
from onnxtrain.trainer.data import BoundImages, Layout, Options, Pass, fill, open_source
from onnxtrain.trainer.data._images import ImageSource

_FIGURES = (".png", ".pdf", ".svg")


class ImagePredictions(NamedTuple):
    """Predictions for the readable images of a folder.

    Attributes:
        outputs: outputs of the model by name, [images, ...].
        paths: path of each image, strings [images].
    """

    outputs: Arrays
    paths: np.ndarray[Any, Any]


def chosen_images(options: ImageOptions, folder: ImageFolder) -> ImageFolder:
    """Returns a folder with the settings of the options.

    Raises:
        InputError: a value is not a number, or is out of range.
    """
    return folder.configured(
        **_preparation(options),
        flip=options.flip,
        crop=_numbers("--crop", options.crop),
        workers=options.image_workers,
    )


def prepared_images(options: PreparationOptions, path: Path) -> ImageFolder:
    """Returns the images in a folder, prepared as the options of `evaluate MODEL` or `predict MODEL` say.

    Raises:
        InputError: the folder contains no images, or a value is not a number or out of range.
    """
    return ImageFolder(path).configured(**_preparation(options))


def _preparation(options: PreparationOptions) -> dict[str, Any]:
    return {
        "size": _sides("--image-size", options.image_size),
        "mean": _numbers("--mean", options.mean),
        "std": _numbers("--std", options.std),
        "resize": _sides("--resize", options.resize),
        "interpolation": options.interpolation,
    }


def require_folder(options: PreparationOptions, path: Path) -> None:
    """Raises InputError if options for images are given, but the data is no folder; `path` is that of the data."""
    if given := options.given():
        raise InputError(f"{', '.join(given)} are for folders of images; '{path}' is not a folder.")


def _numbers(option: str, text: str | None) -> Any:
    """Parses one number or several, separated by commas; returns None if the option is not given."""
    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"{option} is '{text}'; pass a number, or numbers separated by commas, such as 0.5,0.5,0.5."
        ) from None
    return values[0] if len(values) == 1 else tuple(values)


def _sides(option: str, text: str | None) -> Any:
    """Parses a number of pixels, or a height and a width; returns None if the option is not given."""
    if text is None:
        return None
    parts = text.replace("x", ",").split(",")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(
            f"{option} is '{text}'; pass a number of pixels such as 224, or a height and a width: 224,320."
        )
    values = [int(part) for part in parts]
    return values[0] if len(values) == 1 else tuple(values)


def run_image_predictions(trainer: Trainer, folder: ImageFolder, batch_size: int | None) -> ImagePredictions:
    """Computes the outputs of a run for the images in a folder; unreadable files are left out, with a warning."""
    state = trainer._state
    source = prediction_source(state, folder, Options(batch_size), skips=True)
    with trainer.averaged():
        outputs = calibrated_outputs(state, state.run.predict(source.read(Pass())))
    return ImagePredictions(outputs, _paths(source))


class ImageOutputs(NamedTuple):
    """Outputs of a model file for the readable images of a folder.

    Attributes:
        outputs: outputs of the model by name, [images, ...].
        source: the images, of which `source.kept` has been read.
        metadata: what the model says about its images; None if it says nothing.
    """

    outputs: Arrays
    source: ImageSource
    metadata: ImageMetadata | None


def run_on_images(
    session: ort.InferenceSession, path: Path, folder: ImageFolder, batch_size: int | None
) -> ImageOutputs:
    """Computes the outputs of a model file for the images in a folder; unreadable files are left out, with a warning.

    Args:
        session: session of the model.
        path: path of the model.
        folder: the images.
        batch_size: samples per batch; None for the model's fixed batch size, or 32 if it is dynamic.

    Raises:
        InputError: the model does not take one image per sample, or its preprocessing is unknown.
    """
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type not in dtypes.BY_ORT:
        raise InputError(
            f"The model '{path}' has the inputs {', '.join(value.name for value in inputs)}; a folder of images needs "
            "one input of numbers."
        )
    shape = tuple(size if isinstance(size, int) else None for size in inputs[0].shape)
    spec = InputSpec(inputs[0].name, dtypes.BY_ORT[inputs[0].type], shape)
    metadata = find_image_metadata(session.get_modelmeta().custom_metadata_map, path)
    pipeline = make_pipeline(spec, folder.passed, None if metadata is None else metadata.preprocessing)
    images = BoundImages(folder=folder, pipeline=pipeline, labels=None, skips=True)
    weight = InputSpec("weight", dtypes.BY_NAME["float32"], (None,))
    source = open_source(Layout((spec,), (), weight, predicting=True), images, options=Options(batch_size))
    names = [value.name for value in session.get_outputs()]
    parts: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in names}
    for (batch,) in source.read(Pass()):
        count = len(batch)
        if shape[0] is not None and count < shape[0]:
            batch = fill(batch, shape[0] - count)
        for name, value in zip(names, run_on_arrays(session, names, {spec.name: batch}), strict=True):
            if np.ndim(value) == 0 or len(value) != len(batch):
                raise InputError(
                    f"Predicting: the output '{name}' of '{path}' does not have one value per sample."
                )
            parts[name].append(np.asarray(value)[:count])
    assert isinstance(source, ImageSource)
    return ImageOutputs({name: np.concatenate(values) for name, values in parts.items()}, source, metadata)


def model_image_predictions(
    session: ort.InferenceSession, path: Path, folder: ImageFolder, batch_size: int | None
) -> tuple[ImagePredictions, list[str] | None]:
    """Computes the outputs of a model file for the images in a folder, and class probabilities if it says how.

    Args:
        session: session of the model.
        path: path of the model.
        folder: the images.
        batch_size: samples per batch; None for the model's fixed batch size, or 32 if it is dynamic.

    Returns:
        The predictions, and the names of the classes, which are None if they are unknown.

    Raises:
        InputError: the model does not take one image per sample, or its preprocessing is unknown.
    """
    outputs, source, metadata = run_on_images(session, path, folder, batch_size)
    found = ImagePredictions(outputs, _paths(source))
    scores = next(iter(outputs.values()))
    if metadata is None or metadata.activation is None or len(outputs) != 1 or scores.ndim != 2:
        return found, None
    probability = probabilities_of(metadata.activation, scores)
    classes = class_names(metadata.classes, max(scores.shape[1], 2)) or []
    single = scores.shape[1] == 1
    calibration = file_calibration(session.get_modelmeta().custom_metadata_map, path)
    chosen = None if calibration is None else calibration.decided(scores)
    if chosen is None:
        chosen = (scores[:, 0] > 0).astype(int) if single else scores.argmax(axis=1)
    outputs["class"] = np.array(classes)[chosen]
    if probability is not None:
        outputs["probability"] = probability.astype(scores.dtype)
    return found, list(classes)


def table_of(predictions: ImagePredictions) -> tuple[Arrays, Arrays]:
    """Returns the columns of a table of predictions: the paths; then class and probability, or the outputs."""
    outputs = predictions.outputs
    if "class" in outputs and "probability" in outputs:
        outputs = {name: outputs[name] for name in ("class", "probability")}
    return {"path": predictions.paths}, outputs


def save_mistakes(
    trainer: Trainer, x: Any, y: Any, names: Sequence[str] | None, path: Path, size: int | None
) -> None:
    """Plots the worst mistakes of a run to a file.

    Args:
        trainer: trainer of the run.
        x: the inputs, or a folder of images.
        y: the targets; None for a folder.
        names: names of the classes; None for their indices.
        path: file to write.
        size: samples per batch; None for the default.

    Raises:
        InputError: the suffix of the file is unknown, or the data is not images with one class each.
        ModelError: the file cannot be written.
    """
    figure = trainer.plot_mistakes(x, y, classes=names, batch_size=size)
    try:
        with replace_file(path) as file:
            figure.savefig(file, format=path.suffix[1:].lower())
    except OSError as error:
        raise ModelError(f"Writing the plot '{path}' failed: {error}.") from error


def check_figure(path: Path | None) -> None:
    """Raises InputError if a plot would have an unknown format."""
    if path is not None and path.suffix.lower() not in _FIGURES:
        raise InputError(f"--mistakes is '{os.fspath(path)}'; choose a {', '.join(_FIGURES)} file.")


def _paths(source: Any) -> np.ndarray[Any, Any]:
    assert isinstance(source, ImageSource)
    folder = source.images.folder
    return np.array([folder.path(int(index)) for index in source.kept], dtype=object)
