"""Reads pairs of texts: tokenizes the texts of each batch, and pads them to the longest one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain._words import argument, words
from onnxtrain.errors import InputError
from onnxtrain.losses._embeddings import WITH_NEGATIVES
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.texts import TextPairs, TextTokenizer
from onnxtrain.texts._pairs import TextRow
from onnxtrain.texts._tokenizer import INPUTS
from onnxtrain.trainer.data._convert import names_of
from onnxtrain.trainer.data._frames import column_names, is_frame, is_series
from onnxtrain.trainer.data._layout import WEIGHT, Layout
from onnxtrain.trainer.data._samples import SampleSource
from onnxtrain.trainer.data._source import Options
from onnxtrain.trainer.data._tokens import Padding


def groups_of(layout: Layout) -> int | str | None:
    """Returns the number of texts per sample of a layout, a name for any number, or None for other models."""
    return next((spec.groups for spec in layout.targets if spec.groups is not None), None)


def as_pairs(inputs: Any, targets: Any = None, weights: Any = None) -> TextPairs | None:
    """Returns data as pairs of texts; None if it does not consist of texts, e.g. for arrays of token ids.

    Args:
        inputs: :class:`TextPairs`; the path of a file; a frame or dict of columns; a list of tuples or dicts; a list of
            anchors; or a dataset whose samples are dicts of texts.
        targets: the positives if `inputs` are anchors, otherwise the scores; None if the data includes them.
        weights: sample weights; None if the data includes them.

    Raises:
        InputError: the data contains texts, but not as pairs.
    """
    if isinstance(inputs, TextPairs):
        pairs = inputs
    elif isinstance(inputs, str | os.PathLike):
        pairs = TextPairs.read(inputs)
    elif _is_texts(inputs) and _is_texts(targets):
        anchors, positives = list(inputs), list(targets)
        if len(anchors) != len(positives):
            raise InputError(
                f"There are {len(anchors)} anchors and {len(positives)} positives; pass one for each."
            )
        pairs, targets = TextPairs(list(zip(anchors, positives, strict=True))), None
    elif _is_texts(inputs):
        raise InputError(
            "The data is a list of texts, but the loss compares pairs: pass fit(anchors, positives), or a list of "
            "tuples."
        )
    elif (columns := _columns(inputs)) is not None:
        pairs = TextPairs.of_columns(columns)
    elif isinstance(inputs, list | tuple) and inputs and _holds_texts(inputs[0]):
        pairs = TextPairs.of_rows(inputs)
    else:
        return None
    if targets is None and weights is None:
        return pairs
    return TextPairs(
        pairs.texts,
        pairs.scores if targets is None else np.asarray(targets).tolist(),
        pairs.weights if weights is None else np.asarray(weights).tolist(),
        source=pairs.source,
    )


def is_texts(value: Any) -> bool:
    """True for a list, array or Series of texts."""
    return _is_texts(value)


def _is_texts(value: Any) -> bool:
    listed = isinstance(value, list | tuple | np.ndarray) or is_series(value)
    return listed and len(value) > 0 and all(isinstance(text, str) for text in value)


def _holds_texts(row: Any) -> bool:
    entries = row.values() if isinstance(row, Mapping) else row if isinstance(row, tuple | list) else ()
    return any(isinstance(entry, str) for entry in entries)


def _columns(inputs: Any) -> dict[str, list[Any]] | None:
    """Returns the columns of a frame, dict or dataset with texts; None for other data."""
    if is_frame(inputs):
        columns = {
            name: list(inputs[key]) for name, key in zip(column_names(inputs), inputs.columns, strict=True)
        }
    elif isinstance(inputs, Mapping):
        if not any(_is_texts(column) for column in inputs.values()):
            return None
        columns = {str(name): list(column) for name, column in inputs.items()}
    # A dataset of Hugging Face.
    elif hasattr(inputs, "column_names") and isinstance(inputs.column_names, list):
        columns = {name: list(inputs[name]) for name in inputs.column_names}
    else:
        return None
    return columns if any(isinstance(column[0], str) for column in columns.values() if column) else None


@dataclass(frozen=True)
class TextBatches(Padding):
    """Combines samples of texts into arrays [pairs, texts, tokens]; takes the place of :class:`Padding`.

    Attributes:
        tokenizer: tokenizer of the model.
    """

    tokenizer: TextTokenizer | None = None

    def to_longest(self, samples: Any) -> Padding:
        """Returns this object: each batch is padded to its own longest text."""
        return self

    def batch(self, samples: Sequence[TextRow], indices: Sequence[int] = ()) -> dict[str, Array]:
        """Tokenizes and pads the texts of a batch.

        Args:
            samples: the samples.
            indices: not used; texts are named in messages by their beginning.

        Raises:
            InputError: a text has no tokens, or the model cannot mask the padding.
        """
        assert self.tokenizer is not None
        texts = [text for row in samples for text in row.texts]
        width = len(samples[0].texts)
        names = [spec.name for spec in self.layout.inputs]
        arrays = self.tokenizer.arrays(texts, names, self.length)
        batch: dict[str, Array] = {
            name: array.reshape(len(samples), width, -1) for name, array in arrays.items()
        }
        target = self.layout.targets[0]
        if target.dtype.storage.kind in "iu":
            # Equal texts of a batch get equal numbers.
            numbers: dict[str, int] = {}
            ids = [numbers.setdefault(text, len(numbers)) for text in texts]
            batch[target.name] = np.array(ids, np.int64).reshape(len(samples), width)
        else:
            batch[target.name] = np.array([row.score for row in samples], target.dtype.held)
        if samples[0].weight is not None:
            batch[WEIGHT] = np.array([row.weight for row in samples])
        return batch


def open_texts(
    layout: Layout, pairs: TextPairs, tokenizer: TextTokenizer | None, options: Options, transform: Any = None
) -> SampleSource:
    """Opens pairs of texts as a source of batches.

    Args:
        layout: names, dtypes and shapes of a batch's arrays.
        pairs: the samples.
        tokenizer: tokenizer of the model.
        options: batch size and other options for reading.
        transform: must be None, because transforms augment arrays.

    Raises:
        InputError: the pairs do not match the loss, or the model has inputs other than those of tokenizers.
    """
    if transform is not None:
        raise InputError("A transform augments arrays, but the data is texts; leave it out.")
    tokenizer = require_tokenizer(tokenizer)
    check_text_inputs(layout.inputs)
    check_pairs(pairs, groups_of(layout), scored=layout.targets[0].dtype.storage.kind == "f")
    length = layout.inputs[0].shape[2] if layout.inputs[0].shape else None
    padding = TextBatches(layout, layout.inputs[0], length if isinstance(length, int) else None, tokenizer)
    return SampleSource.open(layout, pairs, options, None, padding)


def check_pairs(pairs: TextPairs, groups: int | str | None, *, scored: bool) -> None:
    """Raises InputError if pairs do not match a loss.

    Args:
        pairs: the samples.
        groups: number of texts per sample that the loss compares; a name or None for any number.
        scored: True if the loss compares the texts with scores.
    """
    if isinstance(groups, int) and pairs.width != groups:
        raise InputError(
            f"Reading texts from {pairs.source}: samples have {pairs.width} texts, but the loss compares {groups}. "
            f"Choose the columns ({argument('columns')}) or another loss."
        )
    if groups == WITH_NEGATIVES and pairs.width < 3:
        raise InputError(
            f"Reading texts from {pairs.source}: samples have no negatives, but with "
            f"{words().loss_setting('InfoNCELoss', 'in_batch_negatives', False)} the loss compares each positive with "
            "those of its sample only. Mine some with onnxtrain.texts.mine_hard_negatives, or leave the setting out."
        )
    if scored and pairs.scores is None:
        raise InputError(
            f"Reading texts from {pairs.source}: it has no scores, which the loss needs. Name their column 'score', or "
            "pass tuples (text, text, score)."
        )


def check_text_inputs(inputs: Sequence[InputSpec]) -> None:
    """Raises InputError if a model has inputs that a tokenizer does not provide."""
    unknown = [spec for spec in inputs if spec.name not in INPUTS]
    if unknown or not any(spec.name == "input_ids" for spec in inputs):
        raise InputError(
            f"The model takes {names_of(inputs)}, but texts provide only {', '.join(INPUTS)}. Rename its inputs, or "
            "pass arrays instead of texts."
        )


def require_tokenizer(tokenizer: TextTokenizer | None) -> TextTokenizer:
    """Returns the tokenizer; raises InputError if there is none."""
    if tokenizer is None:
        raise InputError(
            "The data is texts, but there is no tokenizer.json beside the model. Put it there, or pass "
            f"{argument('tokenizer', 'tokenizer.json')}."
        )
    return tokenizer
