"""Opens users' data: checks it, splits off validation data, and adds a sample weight input to the models if needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from onnxtrain._words import argument, words
from onnxtrain.errors import InputError
from onnxtrain.images import ImageFolder
from onnxtrain.trainer._fit.images import are_images, bind_images, bound_images
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer._fit.texts import text_settings
from onnxtrain.trainer._run.run import Run
from onnxtrain.trainer.data import (
    ClassWeightedSource,
    ClassWeights,
    Layout,
    Options,
    Pass,
    Source,
    TransformFunction,
    chosen_weights,
    open_source,
    split,
)
from onnxtrain.trainer.data._indexed import IndexedSource
from onnxtrain.trainer.data._texts import as_pairs, open_texts

Validation = Any
"""`(inputs, targets)`, `(inputs, targets, sample_weight)`, a fraction, or data that :meth:`Trainer.fit` accepts."""


# Random numbers with which a transform is tried, to see whether it depends on them.
_TRIED = 8


class Data(NamedTuple):
    """Data arguments of :meth:`Trainer.fit`.

    Attributes:
        inputs, targets, sample_weight: samples, their targets and their weights.
        batch_size: samples per batch; None for the default.
        validation: validation data, or the fraction of the samples to split off; None for no validation.
        transform: function that augments training batches; None for no augmentation.
        validation_transform: function that converts validation batches; None to leave them unchanged.
        drop_last: True to drop an incomplete last batch.
        limit: maximum number of batches per epoch; None for no limit.
        class_weight: class weights, or "balanced"; None for equal weights.
        stratify: True to split off the same fraction of each class.
    """

    inputs: Any
    targets: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    validation: Validation = None
    transform: TransformFunction | None = None
    validation_transform: TransformFunction | None = None
    drop_last: bool = False
    limit: int | None = None
    class_weight: ClassWeights = None
    stratify: bool = False


def fit_datasets(state: TrainingState, data: Data) -> tuple[Source, Source | None]:
    """Opens and checks the data of a fit.

    Returns:
        The training source and the validation source. The latter is None if there is no validation data.
    """
    options = Options(data.batch_size, True, data.drop_last, data.limit)
    source = open_dataset(state, data.inputs, data.targets, data.sample_weight, options, data.transform)
    validation = data.validation
    if data.stratify and not isinstance(validation, float):
        raise InputError(
            f"{argument('stratify', True)} splits off a fraction of each class, but {argument('validation')} is "
            f"{'not given' if validation is None else 'not a fraction'}. Pass a fraction, such as "
            f"{argument('validation', 0.1)}, or leave {argument('stratify')} out."
        )
    if validation is None and data.validation_transform is not None:
        raise InputError("validation_transform needs validation data; pass validation, too.")
    held_out = None
    if validation is not None:
        try:
            source, held_out = _with_validation(state, source, data, data.validation_transform)
        except InputError:
            if data.validation_transform is not None or not converts(source):
                raise
            # Only such a transform makes the data fit, and it does not augment.
            source, held_out = _with_validation(state, source, data, data.transform)
    if held_out is not None:
        _require_loss_of_incomplete(state.run, held_out)
    if data.class_weight is not None:
        # After the split: balanced weights are computed from the training samples only.
        source = ClassWeightedSource(source, chosen_weights(data.class_weight, source))
    return source, held_out


def _with_validation(
    state: TrainingState, source: Source, data: Data, transform: TransformFunction | None
) -> tuple[Source, Source]:
    """Opens the validation data of a fit. Returns the training source without it, and the validation source.

    Args:
        state: the trainer's state.
        source: the training data.
        data: data arguments of the fit, with validation data.
        transform: function that converts validation batches; None to leave them unchanged.
    """
    validation = data.validation
    if isinstance(validation, float):
        return split(source, validation, state.position.seed, stratify=data.stratify, transform=transform)
    try:
        images = bound_images(source)
        classes = () if images is None else images.classes
        return source, _validation_source(state, validation, data.batch_size, transform, classes)
    except InputError as error:
        alone = data.transform is not None and transform is None
        remark = words().untransformed("validation_transform") if alone else ""
        raise InputError(f"Validation data: {error}{remark}") from error


def converts(source: Source) -> bool:
    """True if the transform of a source only converts its data, e.g. scales uint8 images, and does not augment it.

    Such a transform also suits validation data that the model does not accept otherwise. It gives the same result for
    different random numbers. The first batch is transformed several times, as augmentation may leave a batch unchanged.
    """
    if not isinstance(source, IndexedSource) or source.transform is None:
        return False
    try:
        passes = [source.read(Pass(seed, training=True)) for seed in range(_TRIED)]
        first, *others = ([array.copy() for array in next(batches)] for batches in passes)
    # The function may need targets, which predictions have not.
    except Exception:
        return False
    return all(all(map(np.array_equal, first, other)) for other in others)


def _validation_source(
    state: TrainingState,
    validation: Any,
    batch_size: int | None,
    transform: TransformFunction | None,
    classes: tuple[str, ...] = (),
) -> Source:
    # `image_arguments` has made one of a path, if the training data is a folder, too.
    if isinstance(validation, ImageFolder):
        return open_dataset(state, validation, None, None, Options(batch_size), transform, classes)
    # A tuple is (inputs, targets), a list of tuples or dicts is a list of batches. A list of two arrays is ambiguous,
    # and taken as [inputs, targets].
    pair = isinstance(validation, tuple) or (isinstance(validation, list) and len(validation) == 2)
    if isinstance(validation, list) and all(isinstance(entry, tuple | dict) for entry in validation):
        pair = False
    if pair and len(validation) not in (2, 3):
        raise InputError(
            "validation must be (inputs, targets), (inputs, targets, sample_weight), a fraction or data "
            f"that includes its targets, received {type(validation).__name__} of {len(validation)}."
        )
    # A string would be read as a stream of characters; an integer is probably a fraction mistaken for a count.
    if isinstance(validation, str | int) and not (
        isinstance(validation, str) and state.run.manifest.groups is not None
    ):
        raise InputError(
            f"validation must be (inputs, targets) or a fraction, received {type(validation).__name__}."
        )
    inputs, targets, weights = [*validation, None][:3] if pair else (validation, None, None)
    return open_dataset(state, inputs, targets, weights, Options(batch_size), transform)


def _require_loss_of_incomplete(run: Run, held_out: Source) -> None:
    """Raises InputError if a fixed-batch model cannot compute the loss of the incomplete last validation batch.

    Called before the fit, because the error would otherwise occur after the first epoch.
    """
    arrays = held_out.last() if run.batch_size is not None else None
    if arrays is not None and (run.weighted or not held_out.weighted):
        try:
            next(run.evaluate([arrays]))
        except InputError as error:
            raise InputError(f"Validation data: {error}") from error


def open_dataset(
    state: TrainingState,
    inputs: Any,
    targets: Any,
    weights: Any,
    options: Options,
    transform: TransformFunction | None = None,
    classes: tuple[str, ...] = (),
) -> Source:
    """Opens data as a source of batches, which are checked against the model's inputs and targets.

    `classes` are the names of the classes that the training images of the same fit define.
    """
    layout, position = Layout.of(state.run.manifest), state.position
    pairs = None if state.run.manifest.groups is None else as_pairs(inputs, targets, weights)
    if pairs is not None:
        settings = text_settings(state)
        return open_texts(layout, pairs, None if settings is None else settings.tokenizer, options, transform)
    if are_images(inputs):
        _require_alone(targets, weights)
        inputs = bind_images(state, layout, inputs, training=options.training, classes=classes)
    if targets is not None and not layout.targets:
        raise InputError("The model computes its loss from its inputs alone; leave the targets out.")
    start = position.fit_start if position.unfinished else position.epoch
    at = Pass(position.seed, position.epoch, start) if options.training else Pass()
    return open_source(layout, inputs, targets, weights, options, transform, at)


def prediction_source(
    state: TrainingState,
    inputs: Any,
    options: Options,
    transform: TransformFunction | None = None,
    *,
    skips: bool = False,
) -> Source:
    """Opens data for prediction, which needs no targets.

    Args:
        state: the trainer's state.
        inputs: the data.
        options: options for reading.
        transform: function that converts the batches; None to leave them unchanged.
        skips: True to leave out images that cannot be read; False to raise an error.
    """
    layout = Layout.of(state.run.manifest, predicting=True)
    if are_images(inputs, predicting=True):
        inputs = bind_images(state, layout, inputs, skips=skips)
    return _opened(
        state, transform, lambda chosen: open_source(layout, inputs, options=options, transform=chosen)
    )


def _require_alone(targets: Any, weights: Any) -> None:
    """Raises InputError if targets or weights are passed in addition to a folder of images."""
    for name, value in (("targets", targets), (argument("sample_weight"), weights)):
        if value is not None:
            raise InputError(
                f"{name} are passed in addition to a folder of images, whose classes are its subfolders. Leave "
                "them out."
            )


def enable_sample_weights(state: TrainingState, *sources: Source | None, for_fit: bool = False) -> None:
    """If a source has sample weights, rebuilds the models with an input for sample weights.

    Once the models have this input, sources without sample weights provide weights of 1.

    Args:
        state: the trainer's state.
        *sources: data sources; None entries are skipped.
        for_fit: True if the sources are the data of a fit that is about to start.

    Raises:
        InputError: the loss does not support sample weights.
        TrainingStateError: a fit without sample weights is running, so the models cannot be rebuilt.
    """
    opened = [source for source in sources if source is not None]
    with state.lock:
        if not state.run.weighted and any(source.weighted for source in opened):
            # The current fit reads batches without weights, which the rebuilt models would reject.
            if not for_fit:
                state.guard.require_no_fit("Using sample weights for the first time")
            state.run.enable_sample_weights()
        # Models that take weights always require them: data without weights gets weights of 1.
        if state.run.weighted:
            # Sources opened before the rebuild do not know the weights' dtype, which is float64 for float64 logits.
            weight = Layout.of(state.run.manifest).weight
            for source in opened:
                source.layout = source.layout.with_weights(weight)


def weighted_dataset(
    state: TrainingState,
    inputs: Any,
    targets: Any,
    weights: Any,
    options: Options,
    transform: TransformFunction | None = None,
) -> Source:
    """Opens data; if it has sample weights, also rebuilds the models with an input for them."""
    source = _opened(
        state, transform, lambda chosen: open_dataset(state, inputs, targets, weights, options, chosen)
    )
    enable_sample_weights(state, source)
    return source


def _opened(
    state: TrainingState,
    transform: TransformFunction | None,
    open_with: Callable[[TransformFunction | None], Source],
) -> Source:
    """Opens data; if it does not fit the model, converts it with the transform of the last fit if that only converts.

    Args:
        state: the trainer's state.
        transform: transform that the user passed for this data; None for none.
        open_with: function that opens the data with a transform.

    Raises:
        InputError: the data does not match the model. If the last fit augmented its data, the message says that this
            data is not transformed.
    """
    try:
        return open_with(transform)
    except InputError as error:
        plan = state.position.plan
        if transform is not None or plan is None or not plan.transform:
            raise
        if state.transform is not None:
            with contextlib.suppress(InputError):
                source = open_with(state.transform)
                if converts(source):
                    return source
        raise InputError(f"{error}{words().untransformed('transform')}") from error
