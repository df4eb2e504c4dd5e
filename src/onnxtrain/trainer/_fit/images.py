"""Prepares folders of images for a trainer's model: preprocessing, class indices, and what the run stores of both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from onnxtrain._words import argument, words
from onnxtrain.errors import InputError
from onnxtrain.images import ImageFolder, Preprocessing
from onnxtrain.images._metadata import PROPERTY, ImageMetadata
from onnxtrain.images._model_files import find_image_metadata
from onnxtrain.images._pipeline import Pipeline, make_pipeline
from onnxtrain.losses import loss_class
from onnxtrain.passes import ModelSource, load_model
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.selection import some_names
from onnxtrain.surgery._add_classes import ADDED
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer.data import BoundImages, ClassWeightedSource, ImageSource, Layout, Source

ImageOrigin: TypeAlias = Path | Mapping[str, str] | None
"""Path or metadata of a model, in which its preprocessing is looked for; None for a resumed run."""


def image_origin(model: ModelSource) -> ImageOrigin:
    """Returns where to look for the preprocessing of a trainer's model, without keeping the model itself."""
    if isinstance(model, onnx.ModelProto):
        return {entry.key: entry.value for entry in model.metadata_props}
    return dict(model.metadata_props) if isinstance(model, ir.Model) else Path(model)


def are_images(data: Any, *, predicting: bool = False) -> bool:
    """True for a folder of images, an `ImageFolder` or a path, and when predicting, for a list of paths."""
    if predicting and isinstance(data, list | tuple):
        return bool(data) and all(isinstance(entry, str | os.PathLike) for entry in data)
    return isinstance(data, ImageFolder | str | os.PathLike)


def image_arguments(inputs: Any, validation: Any, *, reads_texts: bool) -> tuple[Any, Any]:
    """Returns the data arguments of a fit, with folders as `ImageFolder`, and the validation split of a folder.

    Args:
        inputs: training data of any kind; returned unchanged if it is no folder.
        validation: validation data of any kind.
        reads_texts: True if the model is trained on texts, so that a path is that of a file with texts.
    """
    # A path of a file is that of texts.
    if not are_images(inputs) or (reads_texts and not isinstance(inputs, ImageFolder)):
        return inputs, validation
    folder = inputs if isinstance(inputs, ImageFolder) else ImageFolder(inputs)
    if validation is None:
        validation = folder.validation
    elif are_images(validation):
        other = validation if isinstance(validation, ImageFolder) else ImageFolder(validation)
        validation = other.with_settings_of(folder)
    return folder, validation


def bind_images(
    state: TrainingState,
    layout: Layout,
    data: Any,
    *,
    training: bool = False,
    classes: tuple[str, ...] = (),
    skips: bool = False,
) -> BoundImages:
    """Prepares images for the trainer's model.

    Args:
        state: the trainer's state.
        layout: names, dtypes and shapes of a batch's arrays.
        data: an `ImageFolder`, the path of a folder, or a list of paths of files.
        training: True for training data, whose subfolders define the classes of the run.
        classes: names of the classes that the training data of the same fit defines.
        skips: True to leave out unreadable files in a prediction.

    Raises:
        InputError: the images or their classes do not fit the model, or its preprocessing is unknown.
        CheckpointError: the run's description of its images is damaged.
    """
    folder = data if isinstance(data, ImageFolder) else ImageFolder(data)
    if not training:
        folder.require_no_splits()
    run = _saved(state)
    known = run or _of_model(state)
    pipeline = make_pipeline(
        layout.inputs[0],
        folder.passed,
        None if known is None else known.preprocessing,
        flip=folder.flip and training,
        crop=folder.crop if training else None,
    )
    # The classes of a new run are those of its training data, whatever the model was trained on before.
    names = classes or (() if known is None or (training and run is None) else known.classes)
    if layout.predicting or not layout.targets:
        return BoundImages(folder=folder, pipeline=pipeline, labels=None, classes=names, skips=skips)
    if not names and known is not None and _has_added_classes(state):
        # The scores of the old classes stay where they are.
        names = (*known.classes, *(name for name in folder.classes if name not in known.classes))
    labels = folder.labels_for(names)
    names = names or tuple(folder.classes)
    _require_count(layout.targets[0], folder, names)
    if training:
        folder.require_full_classes()
    return BoundImages(folder=folder, pipeline=pipeline, labels=labels, classes=names)


def _has_added_classes(state: TrainingState) -> bool:
    """True if the last layer of the run's model has a second part from :func:`onnxtrain.add_classes`."""
    return any(spec.name.startswith(f"{ADDED}.") for spec in state.run.manifest.parameters)


def _saved(state: TrainingState) -> ImageMetadata | None:
    """Returns what the run stores about its images; None if it was not trained on images."""
    properties = state.run.state.properties
    if PROPERTY not in properties:
        return None
    return ImageMetadata.from_json(str(properties[PROPERTY]), str(state.directory))


def _of_model(state: TrainingState) -> ImageMetadata | None:
    """Returns what the trainer's model says about its images; None if it says nothing."""
    origin = state.image_origin
    if isinstance(origin, Path):
        # A model that has been moved in the meantime has nothing beside it.
        return find_image_metadata(load_model(origin).metadata_props, origin) if origin.exists() else None
    return None if origin is None else find_image_metadata(origin, None)


def _require_count(target: InputSpec, folder: ImageFolder, classes: tuple[str, ...]) -> None:
    """Raises InputError if the model has another number of classes than the data."""
    if target.class_labels is not None:
        count = target.class_labels.count
    else:
        width = target.shape[1] if target.shape is not None and len(target.shape) == 2 else None
        count = width if isinstance(width, int) and width > 1 else None
    if count is not None and count != len(classes):
        raise InputError(
            f"The folder '{folder.root}' has {len(classes)} classes ({some_names(classes)}), but the model predicts "
            f"{count}. {words().new_head(len(classes))}."
        )


def bound_images(source: Source | None) -> BoundImages | None:
    """Returns the images of a source; None if it reads other data."""
    if isinstance(source, ClassWeightedSource):
        source = source.wrapped
    return source.images if isinstance(source, ImageSource) else None


def remember_images(state: TrainingState, images: BoundImages | None) -> None:
    """Stores preprocessing and classes in the run, from which evaluation, prediction and export read them."""
    if images is not None:
        state.run.state.properties[PROPERTY] = ImageMetadata(
            preprocessing=images.pipeline.preprocessing,
            classes=images.classes,
            activation=loss_class(state.settings.loss).activation,
        ).to_json()


def image_metadata(state: TrainingState) -> dict[str, str]:
    """Returns the entries that an exported model's metadata gets; {} for a run that was not trained on images."""
    metadata = _saved(state)
    return {} if metadata is None else {PROPERTY: metadata.to_json()}


def exported_pipeline(state: TrainingState) -> Pipeline:
    """Returns the pipeline of a run's images, for a model that contains the preprocessing.

    Raises:
        InputError: the run was not trained on images.
    """
    metadata = _saved(state)
    if metadata is None:
        raise InputError(
            "Exporting with the preprocessing: the run was not trained on a folder of images, so it does not know how "
            f"images become inputs. Leave {argument('include_preprocessing', True)} out."
        )
    return make_pipeline(state.run.manifest.inputs[0], Preprocessing(), metadata.preprocessing)


def raw_image_metadata(state: TrainingState) -> dict[str, str]:
    """Returns the metadata entries of a model that normalizes the pixels itself."""
    metadata = _saved(state)
    if metadata is None:
        return {}
    known = metadata.preprocessing
    raw = Preprocessing(size=known.size, resize=known.resize, interpolation=known.interpolation)
    return {PROPERTY: replace(metadata, preprocessing=raw).to_json()}


def image_classes(state: TrainingState) -> list[str] | None:
    """Returns the names of the classes of a run on images; None for other runs."""
    metadata = _saved(state)
    return None if metadata is None or not metadata.classes else list(metadata.classes)
