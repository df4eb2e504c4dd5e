"""Creates the loss from `--loss` and `--loss-option`, and one-hot encodes targets for class probabilities."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import numpy as np

from onnxtrain.cli._options import ModelOptions
from onnxtrain.cli._python_loss import python_loss
from onnxtrain.cli._settings import Owner, names_python, parse_settings
from onnxtrain.errors import InputError
from onnxtrain.losses import CrossEntropyLoss, Loss, ModelLoss, TorchLoss, loss_class, make_loss
from onnxtrain.runtime.dtypes import BY_NAME
from onnxtrain.runtime.manifest import ClassLabels, InputSpec
from onnxtrain.trainer import Trainer


def loss_settings(loss: Loss) -> Owner:
    """Returns the settings of a loss and their values, in the form that :func:`parse_settings` expects."""
    hints = get_type_hints(type(loss))
    settings = {entry.name: getattr(loss, entry.name) for entry in fields(loss)}
    optional = {name for name in settings if types.NoneType in get_args(hints[name])}
    return Owner("--loss-option", "the loss", settings, frozenset(optional))


def chosen_loss(options: ModelOptions, *, mixed: bool = False) -> Loss | None:
    """Creates the loss from `--loss` and `--loss-option`; returns None if `--loss` is not given.

    Args:
        options: options with `loss` and `loss_option`.
        mixed: True if training mixes samples (mixup, CutMix), so that cross-entropy's targets are class probabilities.

    Raises:
        GraphBuildError: there is no loss of that name, or a value is out of range.
        InputError: the loss has no such setting, a value has the wrong type, or `--loss` is missing or does not support
            mixed targets.
    """
    if options.loss is None:
        if options.loss_option:
            raise InputError("--loss-option is given without --loss.")
        if mixed:
            raise InputError("--mixup and --cutmix mix the targets of a loss; choose one with --loss.")
        return None
    loss = make_chosen_loss(options.loss, options.loss_option)
    if not mixed:
        return loss
    if isinstance(loss, CrossEntropyLoss):
        return replace(loss, probabilities=True)
    # The targets of other classification losses are class indices, which cannot be averaged.
    if loss.activation in ("softmax", "softmax_last", "exp"):
        raise InputError(
            f"--mixup and --cutmix need targets that can be averaged, but {options.loss} compares class "
            "indices. Choose cross_entropy."
        )
    return loss


def make_chosen_loss(name: str, settings: Sequence[str] | None) -> Loss:
    """Creates the loss `name` with the values of `--loss-option`; raises the errors of :func:`chosen_loss`."""
    source: Any = python_loss(name) if names_python(name) else name
    loss = make_loss(source)
    # `replace` keeps the defaults of the settings that were not given.
    owner = loss_settings(loss)._replace(name=name)
    parsed = parse_settings(owner, settings)
    # Functions and files are no settings, which `replace` would keep.
    if isinstance(loss, ModelLoss | TorchLoss) and not isinstance(source, Loss):
        return type(loss)(source, **parsed)
    return replace(loss, **parsed) if parsed else loss


def label_targets(trainer: Trainer) -> Sequence[InputSpec]:
    """Returns specifications of the targets that a run's data contains, which may differ from the model's targets.

    With `--mixup`, for example, the model's targets are class probabilities, but the data contains class labels.
    :func:`fit_targets` one-hot encodes these labels.
    """
    targets = trainer.manifest.targets
    if not targets or not _takes_probabilities(trainer):
        return targets
    spec = targets[0]
    assert spec.shape is not None
    # Axis 1 of the probabilities is the class axis, as in the logits.
    labels = ClassLabels(spec.shape[1] if isinstance(spec.shape[1], int) else None, None)
    shape = (spec.shape[0], *spec.shape[2:])
    return [InputSpec(spec.name, BY_NAME["int64"], shape, labels), *targets[1:]]


def _takes_probabilities(trainer: Trainer) -> bool:
    spec = trainer.manifest.targets[0]
    # The manifest tells class labels from other integers. The loss tells probabilities from other floats.
    has_classes = spec.shape is not None and len(spec.shape) > 1
    return has_classes and spec.class_labels is None and loss_class(trainer.loss_name).activation == "softmax"


def fit_targets(trainer: Trainer, y: Any) -> Any:
    """One-hot encodes class labels if the run's loss expects class probabilities; otherwise returns `y` unchanged.

    Args:
        trainer: trainer of the run.
        y: arrays by target name; None if there are no targets.

    Raises:
        InputError: a label is not a class index, or the number of classes is unknown.
    """
    specs = label_targets(trainer)
    if not isinstance(y, Mapping) or specs is trainer.manifest.targets:
        return y
    spec = specs[0]
    array = np.asarray(y[spec.name])
    # An .npz file may also hold probabilities, which need no encoding.
    if array.dtype.kind not in "iu" or spec.class_labels is None or array.ndim != len(spec.shape or ()):
        return y
    count = spec.class_labels.count
    if count is None:
        raise InputError("The model's number of classes is symbolic, so labels cannot be one-hot encoded.")
    if array.size and not 0 <= array.min() <= array.max() < count:
        raise InputError(
            f"Class labels: received {array.min()} to {array.max()}, but the model has the classes 0 to {count - 1}."
        )
    # Axis 1 of the logits is the class axis.
    one_hot = np.zeros((*array.shape, count), np.float32)
    np.put_along_axis(one_hot, array[..., None], 1, axis=-1)
    return {**y, spec.name: np.moveaxis(one_hot, -1, 1)}
