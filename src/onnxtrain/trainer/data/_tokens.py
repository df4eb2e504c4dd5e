"""Pads token sequences of unequal length, and makes masks, positions and labels for language models.

A sample is a sequence of token ids, or a dict with one: `{"input_ids": [5, 17, 2], "labels": [-100, 17, 2]}`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.runtime.store import require_unmasked
from onnxtrain.trainer.data._frames import column_names, is_frame, is_series
from onnxtrain.trainer.data._layout import WEIGHT, Layout

# Names of language models' inputs in transformers and onnxruntime-genai.
_TOKENS, _MASK, _POSITIONS, _TYPES = "input_ids", "attention_mask", "position_ids", "token_type_ids"


class Columns:
    """Samples stored as columns; each sample is a dict with one entry per column.

    Args:
        columns: one entry per sample, by name, e.g. {"input_ids": [[5, 17, 2], [8, 2]]}.

    Raises:
        InputError: the columns have different lengths.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise InputError(
                f"The inputs and targets have different numbers of samples ({listed}); they must be equal."
            )
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self._columns.items()}


@dataclass(frozen=True)
class Padding:
    """Combines samples into batches, and pads their token sequences to a common length.

    Sequences are padded at the end: tokens, masks and other inputs with 0, labels with the ignored label. The attention
    mask and the positions are created if they are missing. If the loss predicts the next token, the tokens replace
    missing labels.

    Attributes:
        layout: arguments of the model.
        tokens: description of the token input, [batch, sequence].
        length: length of padded sequences, in tokens; None to pad to the longest sequence in each batch.
    """

    layout: Layout
    tokens: InputSpec
    length: int | None = None

    @classmethod
    def of(cls, layout: Layout) -> Padding | None:
        """Returns the padding for a model with a token input [batch, sequence]; None for other models."""
        matrices = [spec for spec in layout.inputs if _is_matrix(spec) and spec.dtype.storage.kind in "iu"]
        named = [spec for spec in matrices if spec.name == _TOKENS]
        # Integers with a fixed number of columns may be features of a table.
        others = [
            spec
            for spec in matrices
            if spec.name not in (_MASK, _POSITIONS, _TYPES) and not isinstance(_columns_of(spec), int)
        ]
        found = named or (others if len(others) == 1 else [])
        if not found:
            return None
        fixed = _columns_of(found[0])
        return cls(layout, found[0], fixed if isinstance(fixed, int) else None)

    def fits(self, sample: Any) -> bool:
        """True if a sample contains a single token sequence; False for a batch of sequences or other data."""
        tokens = self._entries(sample).get(self.tokens.name)
        return _is_sequence(tokens)

    def columns(self, inputs: Any, targets: Any, weights: Any) -> Columns | None:
        """Arranges a whole dataset as columns. Returns None if nothing needs padding, or a name is unknown."""
        columns = self._by_name(inputs)
        tokens = columns.get(self.tokens.name)
        if tokens is None or len(tokens) == 0 or not _is_sequence(tokens[0]):
            return None
        known = {*self._names, WEIGHT, *self.layout.unused}
        # A misspelled name must not be ignored, because tokens would replace the missing labels; it is rejected later.
        if isinstance(inputs, Mapping) and not known.issuperset(inputs):
            return None
        if isinstance(targets, Mapping):
            columns |= targets
        elif targets is not None and self.layout.targets:
            columns[self.layout.targets[0].name] = targets
        given = {name: column for name, column in columns.items() if name in {*self._names, WEIGHT}}
        ragged = not _is_array(tokens) and len({len(entry) for entry in tokens}) > 1
        # Complete arrays are read by `ArraySource`, which checks them once and slices batches without copying.
        if not ragged and given.keys() >= set(self._names):
            return None
        return Columns(given | ({} if weights is None else {WEIGHT: weights}))

    def to_longest(self, samples: Any) -> Padding:
        """Returns a copy that pads all batches to one length: that of the longest sequence in the dataset.

        Returns this object if :attr:`length` is already set.

        Args:
            samples: the dataset, with `__len__` and `__getitem__`.
        """
        lengths = (len(self._entries(samples[index])[self.tokens.name]) for index in range(len(samples)))
        return self if self.length is not None else dataclasses.replace(self, length=max(lengths))

    def batch(self, samples: Sequence[Any], indices: Sequence[int] = ()) -> dict[str, Array]:
        """Combines samples into arrays by name.

        Args:
            samples: the samples of the batch.
            indices: their indices in the dataset, for error messages; empty to count from 0.

        Raises:
            InputError: a sample lacks an entry, has too many tokens, or would need padding that is not masked.
        """
        rows = [self._entries(sample) for sample in samples]
        numbers = list(indices) or list(range(len(rows)))
        for number, row in zip(numbers, rows, strict=True):
            for name, entry in row.items():
                require_unmasked(f"sample {number}, '{name}'", entry)
            self._complete(row, number)
        lengths = [len(row[self.tokens.name]) for row in rows]
        length = self.length or max(lengths)
        if max(lengths) > length:
            longest = numbers[int(np.argmax(lengths))]
            raise InputError(
                f"sample {longest} has {max(lengths)} tokens, but the model takes at most {length}; "
                "truncate it."
            )
        self._require_padding_has_no_effect(lengths, length)
        arrays = {}
        for spec in (*self.layout.inputs, *self.layout.targets):
            entries = [np.asarray(row[spec.name]) for row in rows]
            # Other entries have no token axis, e.g. the label of a whole text.
            if entries[0].ndim == 1 and _is_matrix(spec) and self._runs_along(spec):
                arrays[spec.name] = self._padded(spec, entries, numbers, lengths, length)
            else:
                arrays[spec.name] = np.stack(entries)
        if WEIGHT in rows[0]:
            arrays[WEIGHT] = np.asarray([row[WEIGHT] for row in rows])
        return arrays

    @property
    def _names(self) -> list[str]:
        """Names of the inputs and targets."""
        return [spec.name for spec in (*self.layout.inputs, *self.layout.targets)]

    def _by_name(self, inputs: Any) -> dict[str, Any]:
        """Returns the columns of the inputs by name.

        Args:
            inputs: a frame, a mapping, a list of mappings, or only the token sequences.
        """
        if is_frame(inputs):
            names = column_names(inputs)
            return {name: _listed(inputs[name]) for name in {*self._names, WEIGHT} if name in names}
        if isinstance(inputs, Mapping):
            return {name: _listed(column) for name, column in inputs.items()}
        entries = _listed(inputs)
        samples = isinstance(entries, list | tuple) and bool(entries) and isinstance(entries[0], Mapping)
        if samples:
            names = [name for name in entries[0] if all(name in entry for entry in entries)]
            return {name: [entry[name] for entry in entries] for name in names}
        return {self.tokens.name: entries} if isinstance(entries, list | tuple) or _is_array(entries) else {}

    def _entries(self, sample: Any) -> dict[str, Any]:
        """Returns the entries of a sample by input or target name, and its weight, if any, under the key `WEIGHT`.

        Args:
            sample: the inputs, or a tuple (inputs, target) or (inputs, target, weight). The inputs are a mapping or
                only the token sequence.
        """
        inputs, target, weight = sample, None, None
        # A tuple of numbers is a token sequence.
        if isinstance(sample, tuple) and 1 < len(sample) <= 3 and not np.isscalar(sample[0]):
            inputs, target, weight = (*sample, None)[:3]
        entries = dict(inputs) if isinstance(inputs, Mapping) else {self.tokens.name: inputs}
        if target is not None and self.layout.targets:
            entries |= target if isinstance(target, Mapping) else {self.layout.targets[0].name: target}
        return entries | ({} if weight is None else {WEIGHT: weight})

    def _complete(self, row: dict[str, Any], number: int) -> None:
        """Adds missing entries to a sample: mask, positions and, if the loss predicts the next token, labels.

        Args:
            row: the sample, by input or target name; modified.
            number: index of the sample, for error messages.

        Raises:
            InputError: the sample has no token sequence, or lacks an input or target that cannot be created.
        """
        tokens = np.asarray(row.get(self.tokens.name, ()))
        if tokens.ndim != 1 or tokens.size == 0:
            raise InputError(
                f"sample {number} has no sequence of tokens '{self.tokens.name}'; remove the sample."
            )
        row[self.tokens.name] = tokens
        made = {_MASK: np.ones(tokens.size, np.int64), _POSITIONS: np.arange(tokens.size)}
        for spec in self.layout.targets:
            # Labels of other losses, such as word tags, cannot be derived from the tokens.
            if spec.class_labels is not None and spec.class_labels.shift:
                made[spec.name] = tokens
        for name in self._names:
            if name not in row and name in made:
                row[name] = made[name]
            if name not in row:
                raise InputError(
                    f"sample {number} has no '{name}'; the model's inputs are {', '.join(self._names)}."
                )

    def _require_padding_has_no_effect(self, lengths: Sequence[int], length: int) -> None:
        """Raises InputError if tokens would attend to padding: without a mask, only causal models can be padded.

        Args:
            lengths: number of tokens of each sequence.
            length: length after padding.
        """
        causal = any(
            spec.class_labels is not None and spec.class_labels.shift for spec in self.layout.targets
        )
        masked = any(spec.name == _MASK for spec in self.layout.inputs)
        if min(lengths) < length and not (masked or causal or self.layout.predicting):
            raise InputError(
                f"the sequences have {min(lengths)} to {length} tokens, but the model has no input "
                f"'{_MASK}' to mask padding. Pass sequences of one length, or export the model with this "
                "input."
            )

    def _runs_along(self, spec: InputSpec) -> bool:
        """True if the second axis of an input or target is the token axis."""
        return spec.name in (_MASK, _POSITIONS, _TYPES) or _columns_of(spec) in (
            None,
            _columns_of(self.tokens),
        )

    def _padded(
        self, spec: InputSpec, entries: list[Array], numbers: list[int], lengths: list[int], length: int
    ) -> Array:
        """Pads one sequence per sample to a common length, and stacks them.

        Args:
            spec: the input or target that is padded.
            entries: one sequence per sample.
            numbers: index of each sample, for error messages.
            lengths: number of tokens of each sample.
            length: length after padding.

        Raises:
            InputError: the labels need padding, but the loss ignores no label; or a sequence does not have one entry
                per token.
        """
        labels = spec.class_labels
        # The model would be trained on any other label.
        if labels is not None and labels.ignore_index is None and min(lengths) < length:
            raise InputError(
                f"padding the labels '{spec.name}' needs a label to ignore: set ignore_index of the loss."
            )
        fill = 0 if labels is None else labels.ignore_index
        # Integers stay integers, so that the layout can check dtype and values.
        result = np.full((len(entries), length), 0 if fill is None else fill, np.result_type(*entries))
        # Positions continue in the padding, because every position must be valid in a cosine cache.
        if spec.name == _POSITIONS:
            result[:] = np.arange(length)
        for row, (entry, number, count) in enumerate(zip(entries, numbers, lengths, strict=True)):
            if len(entry) != count:
                raise InputError(
                    f"sample {number} has {count} tokens '{self.tokens.name}' and {len(entry)} entries of "
                    f"'{spec.name}'; there must be one per token."
                )
            result[row, :count] = entry
        return result


def _is_matrix(spec: InputSpec) -> bool:
    return spec.shape is not None and len(spec.shape) == 2


def _columns_of(spec: InputSpec) -> int | str | None:
    """Returns the size of a specification's second axis, e.g. 512 or "sequence_length"; None if unknown."""
    return spec.shape[1] if spec.shape is not None else None


def _is_array(value: object) -> bool:
    """True for a numeric array, from NumPy or another library."""
    return hasattr(value, "__array__") and getattr(value, "dtype", None) != np.dtype(object)


def _is_sequence(value: Any) -> bool:
    """True for a sequence of integers, including an empty one."""
    if value is None or isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        return False
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return False
    return array.ndim == 1 and (array.dtype.kind in "iu" or array.size == 0)


def _listed(column: Any) -> Any:
    """Converts a frame's column or an array of objects to a list; returns other columns unchanged."""
    if is_series(column) or (isinstance(column, np.ndarray) and column.dtype == object):
        entries: Iterable[Any] = column
        return list(entries)
    return column
