"""Describes the arrays of a batch, and extracts them from the data that users or loaders pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.inputs import check_sequences
from onnxtrain.runtime.manifest import InputSpec, Manifest
from onnxtrain.trainer.data._convert import (
    arrange,
    cast,
    check_form,
    check_lengths,
    check_values,
    names_of,
    to_array,
)
from onnxtrain.trainer.data._frames import column_names, is_frame, is_series, without

WEIGHT = "sample_weight"
"""Name of the sample weights in dict batches and in frames."""


class Raw(NamedTuple):
    """Unconverted inputs, targets and weights of a batch or a whole dataset, with one entry per input or target."""

    inputs: list[Any]
    targets: list[Any]
    weights: Any = None


@dataclass(frozen=True)
class Layout:
    """Describes the arrays of a batch: inputs, targets and sample weights, in this order.

    Attributes:
        inputs: specifications of the model's inputs.
        targets: specifications of the loss's targets.
        weight: specification of the sample weights.
        weighted: True if the last array of a batch contains the sample weights (ones, if the data has no weights).
        predicting: True to ignore targets and weights passed with the inputs.
        unused: names of the ignored targets and weights.
    """

    inputs: tuple[InputSpec, ...]
    targets: tuple[InputSpec, ...]
    weight: InputSpec
    weighted: bool = False
    predicting: bool = False
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, manifest: Manifest, *, predicting: bool = False) -> Layout:
        """Returns the layout of batches for the models of a training run.

        Args:
            manifest: describes the inputs and targets of the models.
            predicting: True for prediction, which needs only the inputs: targets and weights in the data are ignored.
        """
        weight = manifest.sample_weight
        targets = tuple(spec for spec in manifest.targets if not spec.sample_weight)
        weighted = weight is not None
        if weight is None:
            # The weights share the first dimension of the targets, so that a wrong number of weights is detected.
            first = (targets or manifest.inputs)[0].shape if manifest.inputs or targets else None
            weight = InputSpec(WEIGHT, dtypes.BY_NAME["float32"], (first[0] if first else None,))
        if predicting:
            unused = (*(spec.name for spec in targets), WEIGHT)
            return cls(manifest.row_inputs, (), weight, predicting=True, unused=unused)
        return cls(manifest.inputs, targets, weight, weighted)

    @property
    def specs(self) -> tuple[InputSpec, ...]:
        """Specifications of the arrays of a batch, in the model's order."""
        return (*self.inputs, *self.targets, *([self.weight] if self.weighted else []))

    def with_weights(self, weight: InputSpec | None = None) -> Layout:
        """Returns a copy of the layout with sample weights.

        Args:
            weight: specification of the model's weight input. Default: :attr:`weight`.
        """
        return dataclasses.replace(self, weighted=True, weight=weight or self.weight)

    def whole(self, inputs: Any, targets: Any, weights: Any) -> Raw:
        """Extracts inputs, targets and weights from a whole dataset: arrays, a dict or a frame."""
        if is_frame(inputs) and not self.predicting:
            inputs, targets, weights = self._of_frame(inputs, targets, weights)
        elif is_frame(inputs):
            inputs = without(inputs, self.unused)
        elif isinstance(inputs, Mapping) and self.predicting:
            inputs = {name: entry for name, entry in inputs.items() if name not in self.unused}
        elif (
            targets is None
            and self.targets
            and isinstance(inputs, Mapping)
            and all(spec.name in inputs for spec in self.targets)
        ):
            raw = self._of_names(inputs)
            return raw if weights is None else raw._replace(weights=weights)
        if targets is None and self.targets:
            raise InputError(f"The model needs targets ({names_of(self.targets)}), received None.")
        entries = [] if targets is None else arrange("target", self.targets, targets)
        return Raw(arrange("input", self.inputs, inputs), entries, weights)

    def _of_frame(self, frame: Any, targets: Any, weights: Any) -> tuple[Any, Any, Any]:
        """Splits a frame into inputs, targets and weights.

        Targets are the columns named in `targets` or, if it is None, the columns named like the model's targets.
        """
        names = column_names(frame)
        # Otherwise this column would be taken for an input.
        if weights is None and targets is None and WEIGHT in names:
            weights = WEIGHT
        if isinstance(weights, str):
            (column,), frame = self._taken(frame, names, [weights]), without(frame, [weights])
            weights, names = column, column_names(frame)
        if targets is None and self.targets:
            wanted = [spec.name for spec in self.targets]
        elif isinstance(targets, str):
            wanted = [targets]
        elif isinstance(targets, list | tuple) and targets and all(isinstance(name, str) for name in targets):
            wanted = list(targets)
        else:
            return frame, targets, weights
        columns = self._taken(frame, names, wanted)
        # Several names for one target are its columns, in the order of the frame.
        if len(wanted) != len(self.targets):
            table = frame[[name for name in frame.columns if str(name) in wanted]]
            return without(frame, wanted), table, weights
        by_name = {spec.name: column for spec, column in zip(self.targets, columns, strict=True)}
        return without(frame, wanted), by_name, weights

    def _taken(self, frame: Any, names: Sequence[str], wanted: Sequence[str]) -> list[Any]:
        missing = [name for name in wanted if name not in names]
        if missing:
            raise InputError(
                f"The model needs targets ({names_of(self.targets)}): the frame has no column {', '.join(missing)}; it "
                f"has {', '.join(names[:20])}. Pass them as the second argument: a column's name, a Series or an array."
            )
        return [frame[frame.columns[names.index(name)]] for name in wanted]

    def batch(self, batch: Any) -> Raw:
        """Extracts inputs, targets and weights from a loader's batch.

        A batch can be a dict or frame with the names of inputs and targets, a tuple (inputs, targets) or (inputs,
        targets, weights), a flat tuple of all inputs and targets, or only the inputs if the model needs no targets.

        Raises:
            InputError: the batch has none of these forms.
        """
        if isinstance(batch, Mapping):
            return self._of_names(batch)
        if is_frame(batch):
            return self.whole(batch, None, None)
        if not isinstance(batch, list | tuple):
            return self._without_targets(batch)
        parts = list(batch)
        flat = not any(isinstance(part, list | tuple | Mapping) or is_frame(part) for part in parts)
        count = len(self.inputs) + len(self.targets)
        if flat and len(self.inputs) > 1 and self.predicting and len(parts) >= len(self.inputs):
            return Raw(parts[: len(self.inputs)], [])
        # Two flat entries are (inputs, targets); more are recognized by their number.
        if flat and count > 2 and len(parts) in (count, count + 1):
            weights = parts[count] if len(parts) > count else None
            return Raw(parts[: len(self.inputs)], parts[len(self.inputs) : count], weights)
        if not 1 <= len(parts) <= 3:
            raise InputError(
                f"a batch should be (inputs, targets), (inputs, targets, sample_weight) or a dict by name; received a "
                f"{type(batch).__name__} of {len(parts)}."
            )
        if len(parts) == 1 and not self.targets:
            return self._without_targets(parts[0])
        if self.predicting:
            return Raw(arrange("input", self.inputs, parts[0], loose=True), [])
        inputs, targets, weights = [*parts, None, None][:3]
        if targets is not None and not self.targets:
            raise InputError(
                "the model computes its loss from its inputs alone; leave the targets out of the batch."
            )
        raw = self.whole(inputs, targets, weights)
        return raw if weights is None or isinstance(weights, str) else raw._replace(weights=weights)

    def _without_targets(self, inputs: Any) -> Raw:
        if self.targets:
            raise InputError(
                f"a batch should be (inputs, targets) or a dict by name, as the model needs targets "
                f"({names_of(self.targets)}); received {type(inputs).__name__}."
            )
        return Raw(arrange("input", self.inputs, inputs, loose=True), [])

    def _of_names(self, batch: Mapping[str, Any]) -> Raw:
        wanted = [spec.name for spec in (*self.inputs, *self.targets)]
        missing = [name for name in wanted if name not in batch]
        if missing:
            raise InputError(
                f"the model takes {', '.join(wanted)}, but the batch has {', '.join(map(str, batch))} "
                f"(missing: {', '.join(missing)}). Rename them."
            )
        # The models renamed their weight input if another value had this name.
        weights = batch.get(self.weight.name, batch.get(WEIGHT))
        entries = [batch[name] for name in wanted]
        return Raw(
            entries[: len(self.inputs)], entries[len(self.inputs) :], None if self.predicting else weights
        )

    def arrays(self, raw: Raw) -> Raw:
        """Converts each entry to a numpy array; does not check dtypes, shapes or values."""
        return Raw(
            [to_array("input", spec, entry) for spec, entry in zip(self.inputs, raw.inputs, strict=True)],
            [to_array("target", spec, entry) for spec, entry in zip(self.targets, raw.targets, strict=True)],
            None if raw.weights is None else to_array("weights", self.weight, raw.weights),
        )

    def flat(self, raw: Raw) -> list[Array]:
        """Returns the arrays as a flat list in the model's order, including weights (default: ones) if `weighted`."""
        arrays = [*raw.inputs, *raw.targets]
        if self.weighted:
            missing = raw.weights is None
            arrays.append(np.ones(len(arrays[0]), self.weight.dtype.held) if missing else raw.weights)
        return arrays

    def check(self, arrays: Sequence[Array], *, values: bool = True) -> None:
        """Raises InputError if arrays do not match the specifications in dtype, shape or values.

        Args:
            arrays: arrays in the model's order, with any number of samples.
            values: False to check only dtypes, shapes and sample weights.
        """
        words = ["input"] * len(self.inputs) + ["target"] * len(self.targets)
        for word, spec, array in zip(words, self.specs, arrays, strict=False):
            check_form(word, spec, array)
        check_lengths(self.specs, arrays)
        if values:
            for word, spec, array in zip(words, self.specs, arrays, strict=False):
                check_values(word, spec, array)
            check_sequences(self.specs, arrays)
        if self.weighted:
            _check_weights(self.weight, arrays[-1])

    def cast(self, arrays: Sequence[Array]) -> list[Array]:
        """Casts checked arrays to the model's dtypes."""
        return [cast(spec, array) for spec, array in zip(self.specs, arrays, strict=True)]

    def convert(self, raw: Raw) -> list[Array]:
        """Converts a batch to checked arrays in the model's dtypes.

        Raises:
            InputError: the batch does not match the model.
        """
        # The models were built from the first batch, without weights.
        if raw.weights is not None and not self.weighted:
            raise InputError(
                "it has sample weights, but the first batch had none; pass weights with all batches or "
                "with none."
            )
        arrays = self.flat(self.arrays(raw))
        self.check(arrays)
        return self.cast(arrays)


def _check_weights(spec: InputSpec, weights: Array) -> None:
    """Raises InputError for weights that are negative, not finite or not numbers."""
    if is_series(weights) or weights.dtype.kind not in "iufb":
        raise InputError(f"The sample weights should be numbers, received dtype {weights.dtype}.")
    with np.errstate(invalid="ignore"):
        good = np.isfinite(weights) & (weights >= 0)
    if not good.all():
        sample = int(np.flatnonzero(~good)[0])
        raise InputError(
            f"The sample weights should be finite and non-negative, received {weights[sample]} for sample "
            f"{sample}."
        )
    if float(np.abs(weights).max()) > float(np.finfo(spec.dtype.held).max):
        raise InputError(f"The sample weights contain values too large for {spec.dtype.name}.")
