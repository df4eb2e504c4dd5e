"""Chooses the batch size, and handles models that were exported with a fixed batch size."""

from __future__ import annotations

from collections.abc import Sequence

from onnxtrain._printable import get_logger
from onnxtrain._words import argument, words
from onnxtrain.errors import InputError
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.trainer._checks import check_integer
from onnxtrain.trainer.data._convert import names_of

_log = get_logger()


def dynamic_remedy() -> str:
    """Returns advice on making the batch size of a model dynamic, for messages about fixed batch sizes."""
    return f"Export it with a dynamic batch axis, or {words().dynamic_batch()}."


def static_batch(specs: Sequence[InputSpec]) -> int | None:
    """Returns the fixed batch size of the model; None if it accepts any batch size.

    Raises:
        InputError: inputs and targets differ in their first dimension, or it is 0.
    """
    # A dimension that is not an integer is symbolic.
    sizes = {spec.shape[0] for spec in specs if spec.shape and isinstance(spec.shape[0], int)}
    if len(sizes) > 1:
        raise InputError(
            f"The inputs and targets have different sizes along axis 0 ({sorted(sizes)}), which should be "
            f"the batch axis: {names_of(specs)}. Train such a model through onnxtrain.api.Module."
        )
    size = sizes.pop() if sizes else None
    if size == 0:
        raise InputError(
            f"The model was exported with a batch of 0 samples: {names_of(specs)}. {dynamic_remedy()}"
        )
    return size


def check_batch_size(specs: Sequence[InputSpec], asked: int | None) -> tuple[int, bool]:
    """Returns the batch size to use, and True if it is the only one that the model accepts.

    Args:
        specs: inputs and targets of the model.
        asked: batch size that the user passed; None for the model's fixed batch size, or else 32.

    Raises:
        InputError: the model has a fixed batch size that differs from `asked`.
    """
    if asked is not None:
        asked = check_integer(argument("batch_size"), asked)
    fixed = static_batch(specs)
    if fixed is None:
        return asked or 32, False
    if asked is not None and asked != fixed:
        raise InputError(
            f"{argument('batch_size')} is {asked}, but the model was exported with a fixed batch of {fixed}. "
            f"{dynamic_remedy()} Or leave {argument('batch_size')} out."
        )
    return fixed, True


def warn_of_fixed_batch(size: int | None, samples: int | None) -> None:
    """Warns if a fixed batch size makes each step see a single sample, or drops samples from each epoch."""
    if size == 1 and samples != 1:
        _log.warning(
            "The model was exported with a batch of 1: each optimizer step sees a single sample. %s Or "
            "pass %s.",
            dynamic_remedy(),
            argument("accumulate", 32),
        )
    if size is not None and samples is not None and samples % size:
        _log.warning(
            "%d of %d samples are left out of each epoch: the model takes exactly %d at a time. %s",
            samples % size,
            samples,
            size,
            dynamic_remedy(),
        )
