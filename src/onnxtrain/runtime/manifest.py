"""Reads manifests: the inputs and outputs of the models of a run (`docs/contracts.md`, "The manifest")."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxtrain.errors import ModelLoadError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.dtypes import Array, DType
from onnxtrain.runtime.json_text import list_of_texts, parse_json, sizes

METADATA_KEY = "onnxtrain.manifest"
ADAPTERS_KEY = "onnxtrain.lora"
"""Key of the description of LoRA adapters in the metadata of a model, and in the properties of a checkpoint."""
FORMAT = "onnxtrain"
VERSION = 1
SPARSE_VERSION = 2
"""Version of manifests with sparse gradients: hosts that know version 1 only would ignore the rows, and refuse it."""

Dim = int | str | None
"""Size of an axis: a number, a symbolic size such as "batch", or None if it is unknown."""
Signature = tuple[str, str, Sequence[int]]
"""Name, dtype and shape of one tensor, e.g. ("fc.weight", "float32", (2, 3))."""


def fingerprint(parameters: Iterable[Signature], statistics: Iterable[Signature] = ()) -> str:
    """Computes the SHA-256 (hexadecimal) of names, dtypes and shapes of parameters and statistics, in any order.

    The digest is over the UTF-8 text of a JSON object without spaces. Its keys `parameters` and `statistics` hold
    lists of `[name, dtype, shape]`, sorted by name.

    >>> fingerprint([("w", "float32", (2, 3))])[:8]
    'f6e700ff'
    """
    # Imported here: a device that loads a model and no checkpoint starts without it.
    import hashlib

    groups = {"parameters": parameters, "statistics": statistics}
    listed = {
        key: sorted((name, dtype, [int(d) for d in shape]) for name, dtype, shape in group)
        for key, group in groups.items()
    }
    text = json.dumps(listed, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ClassLabels:
    """Allowed values of an integer target that holds class labels.

    Attributes:
        count: number of classes, so that labels are 0 .. count - 1; None if it is unknown.
        ignore_index: label whose elements do not count, e.g. -100; None if all count.
        axis: axis of the scores along which the classes lie, e.g. -1 for [batch, sequence, vocabulary].
        scores: sizes of the scores if they have more than two axes, e.g. ("batch", "seq", 512). Only such scores leave
            a choice of axes.
        shift: the scores at position t of axis 1 belong to the label at t + shift; 1 where the next token is predicted.
    """

    count: int | None
    ignore_index: int | None
    axis: int = 1
    scores: tuple[Dim, ...] | None = None
    shift: int = 0


@dataclass(frozen=True)
class LossMean:
    """The denominator of the loss, which is a mean over the samples of a batch or over the labels in them.

    The losses of several batches are combined by it: each batch counts with its :meth:`count`.

    Attributes:
        labels: name of the input or target with the labels, e.g. "labels"; None for a mean over samples.
        ignore_index: label that does not count, e.g. -100; None if all labels count.
        weight: weight per class, e.g. (1.0, 0.5); None if each label counts 1.
        sample_weight: name of the input with a weight per sample, by which the counts are multiplied; None if each
            sample counts 1.
        shift: number of labels at the start of each sequence that do not count, as no scores belong to them, e.g. 1.
    """

    labels: str | None = None
    ignore_index: int | None = None
    weight: tuple[float, ...] | None = None
    sample_weight: str | None = None
    shift: int = 0

    def count(self, specs: Sequence[InputSpec], arrays: Sequence[Array]) -> float:
        """Computes the weight of a batch's loss in a mean over batches.

        Args:
            specs: inputs and targets of the training model.
            arrays: one array of the batch per input and target.

        Returns:
            The number of samples or labels, or the sum of their weights; 0 if no element of the batch counts.
        """
        if self.labels is None and self.sample_weight is None:
            return float(len(arrays[0]))
        if self.sample_weight is not None:
            named = {spec.name: array for spec, array in zip(specs, arrays, strict=True)}
            return self._weighted(named, named[self.sample_weight])
        labels = next(a for spec, a in zip(specs, arrays, strict=True) if spec.name == self.labels)
        labels = labels[:, self.shift :] if self.shift else labels
        if self.weight is None:
            return float(
                labels.size if self.ignore_index is None else np.count_nonzero(labels != self.ignore_index)
            )
        # First, because the label to ignore may be no index of the weights.
        if self.ignore_index is not None:
            labels = labels[labels != self.ignore_index]
        return float(np.asarray(self.weight)[labels].sum())

    def _weighted(self, named: Mapping[str, Array], weights: Array) -> float:
        """Sums the weights of the samples, each times the number or weights of its labels that count."""
        # In float64: a sum of many float32 weights would lose digits.
        if self.labels is None or (self.ignore_index is None and self.weight is None):
            # The loss is then the weighted mean of the losses of the samples.
            return float(weights.sum(dtype=np.float64))
        labels = named[self.labels]
        labels = labels[:, self.shift :] if self.shift else labels
        counted = np.ones(labels.shape, bool) if self.ignore_index is None else labels != self.ignore_index
        of_class = np.ones(1) if self.weight is None else np.asarray(self.weight)
        # An ignored label, e.g. -100, is no index: it reads the weight of class 0, and the line below sets it to 0.
        index = np.where(counted, labels, 0) if self.weight is not None else np.zeros(labels.shape, int)
        counts = np.where(counted, of_class[index], 0.0).reshape(len(labels), -1).sum(axis=1)
        return float(counts @ weights.astype(np.float64))


@dataclass(frozen=True)
class InputSpec:
    """A user input or a target of the training model.

    Attributes:
        name: name of the graph input, e.g. "x".
        dtype: element type.
        shape: sizes, e.g. ("batch", 4); None if the rank is unknown.
        class_labels: allowed labels if it is a target of class labels, else None.
        sample_weight: True if it holds a weight for each sample.
    """

    name: str
    dtype: DType
    shape: tuple[Dim, ...] | None
    class_labels: ClassLabels | None = None
    sample_weight: bool = False


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter of the training model.

    Attributes:
        name: name of the graph input, e.g. "fc.weight".
        dtype: element type.
        shape: sizes, e.g. (3, 4).
        trainable: False if the parameter is frozen.
        gradient: name of the output with the gradient, e.g. "fc.weight_grad"; None if the parameter is frozen.
        gradient_indices: name of the output with the numbers of the rows that were read, if the gradient is sparse;
            None if the gradient has the shape of the parameter.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    trainable: bool
    gradient: str | None
    gradient_indices: str | None = None


@dataclass(frozen=True)
class StatisticSpec:
    """A running statistic of a BatchNorm layer.

    Attributes:
        name: name of the graph input, e.g. "bn.running_mean".
        dtype: element type.
        shape: sizes, e.g. (16,).
        output: name of the output with the updated value, e.g. "bn.running_mean_updated".
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    output: str


HOST_VALUES = ("seed", "step", "run")
"""Numbers that a host feeds beside data and parameters: the seed that the user gives, 0 by default; the number of
optimizer steps taken so far, which checkpoints keep; and the number of runs of the training model since the last of
these steps."""


@dataclass(frozen=True)
class HostInput:
    """An input of the training model that holds numbers which the host knows, e.g. to draw masks of Dropout from.

    Attributes:
        name: name of the graph input, e.g. "onnxtrain.random".
        holds: per element of the input, int64 [n], one of :data:`HOST_VALUES`, e.g. ("seed", "step", "run").
    """

    name: str
    holds: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer model of a run.

    Attributes:
        type: name of the optimizer, e.g. "AdamW".
        moments: names of its states, e.g. ("momentum0", "momentum1").
        initial_values: per moment, the value from which each element starts, e.g. (0.0, 0.0).
        learning_rate: name of the input with the learning rate, e.g. "learning_rate".
        step: name of the input with the number of the step, from 1, e.g. "step".
    """

    type: str
    moments: tuple[str, ...]
    initial_values: tuple[float, ...]
    learning_rate: str
    step: str


@dataclass(frozen=True)
class Manifest:
    """A parsed manifest.

    Attributes:
        fingerprint: digest of parameters and statistics, see :func:`fingerprint`.
        inputs: user inputs, in order.
        targets: targets, in order, e.g. those named "labels" and "sample_weight".
        outputs: names of the outputs of the training and eval models, the loss first, e.g. ("loss", "logits").
        parameters: all parameters, in graph order.
        statistics: running statistics of BatchNorm layers.
        optimizer: the optimizer, None if the run has no optimizer model.
        loss_mean: the denominator of the loss; None if the loss is a sum.
        inference_outputs: names of the outputs of the inference model; empty if the run has none.
        inference_inputs: names of its user inputs. A language model that generates text has those of `inputs` and its
            cache of keys and values, e.g. "past_key_values.0.key".
        profile: "default", or "portable" for models that run in every build of ONNX Runtime.
        host_inputs: further inputs of the training model, which the runtime fills; empty for most models.
    """

    fingerprint: str
    inputs: tuple[InputSpec, ...]
    targets: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    parameters: tuple[ParameterSpec, ...]
    statistics: tuple[StatisticSpec, ...]
    optimizer: OptimizerSpec | None
    loss_mean: LossMean | None = LossMean()
    inference_outputs: tuple[str, ...] = ()
    inference_inputs: tuple[str, ...] = ()
    profile: str = "default"
    host_inputs: tuple[HostInput, ...] = ()

    @property
    def arguments(self) -> tuple[InputSpec, ...]:
        """Arguments of `Module.__call__`: user inputs, then targets."""
        return self.inputs + self.targets

    @property
    def sample_weight(self) -> InputSpec | None:
        """The target that holds a weight for each sample, or None."""
        return next((spec for spec in self.targets if spec.sample_weight), None)

    @property
    def trainable(self) -> tuple[ParameterSpec, ...]:
        """The trainable parameters in graph order."""
        return tuple(p for p in self.parameters if p.trainable)

    @property
    def sparse(self) -> tuple[ParameterSpec, ...]:
        """The trainable parameters whose gradient is sparse, in graph order."""
        return tuple(p for p in self.trainable if p.gradient_indices is not None)


def _dtype(name: object) -> DType:
    if not isinstance(name, str) or name not in dtypes.BY_NAME:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(dtypes.BY_NAME)}")
    return dtypes.BY_NAME[name]


def _text(entry: Mapping[str, Any], key: str) -> str:
    if not isinstance(entry[key], str):
        raise ValueError(f"{key} {entry[key]!r} is no name")
    return str(entry[key])


def _optional(kind: type, value: Any, what: str) -> Any:
    """Checks that `value` is None or of exactly the type `kind`, and returns it; ValueError if it is not."""
    # Exactly, because True is an integer for isinstance.
    if value is not None and type(value) is not kind:
        raise ValueError(f"{what} {value!r} is no {kind.__name__}")
    return value


def _dims(shape: object) -> tuple[Dim, ...] | None:
    if shape is None:
        return None
    if not isinstance(shape, list) or not all(d is None or type(d) in (int, str) for d in shape):
        raise ValueError(f"shape {shape!r} is no list of sizes and names")
    return tuple(shape)


def _input(entry: Mapping[str, Any]) -> InputSpec:
    """Reads an input or target from its entry in the manifest."""
    # Entries that older manifests lack are read by `get`, and have the value that the old format stood for.
    labels, weighs = entry.get("class_labels"), bool(entry.get("sample_weight"))
    if weighs and (entry["dtype"] not in ("float32", "float64") or len(entry["shape"]) != 1):
        raise ValueError(
            f"the sample weights '{entry['name']}' are {entry['dtype']} of shape {entry['shape']}"
        )
    return InputSpec(
        name=_text(entry, "name"),
        dtype=_dtype(entry["dtype"]),
        shape=_dims(entry.get("shape")),
        class_labels=None
        if labels is None
        else ClassLabels(
            _optional(int, labels.get("count"), "the number of classes"),
            _optional(int, labels.get("ignore_index"), "ignore_index"),
            _optional(int, labels.get("axis"), "the axis of the classes") or 1,
            _dims(labels.get("scores")),
            _optional(int, labels.get("shift"), "the shift of the labels") or 0,
        ),
        sample_weight=weighs,
    )


def _loss_mean(entry: Mapping[str, Any] | None, arguments: Iterable[InputSpec]) -> LossMean | None:
    """Reads the denominator of the loss; None if the loss is a sum."""
    if entry is None:
        return None
    # Names are checked here, as `LossMean.count` looks them up in the middle of a fit.
    labels, weight = _optional(str, entry.get("labels"), "labels"), entry.get("weight")
    if labels is not None and labels not in {spec.name for spec in arguments}:
        raise ValueError(f"the labels {labels!r} that a loss is the mean over are no input")
    samples = _optional(str, entry.get("sample_weight"), "sample_weight")
    if samples is not None and samples not in {spec.name for spec in arguments if spec.sample_weight}:
        raise ValueError(f"the weights {samples!r} of a loss are no input of sample weights")
    return LossMean(
        labels,
        _optional(int, entry.get("ignore_index"), "ignore_index"),
        None if weight is None else tuple(map(float, weight)),
        samples,
        _optional(int, entry.get("shift"), "the shift of the labels") or 0,
    )


def _parameter(entry: Mapping[str, Any]) -> ParameterSpec:
    """Reads a parameter from its entry in the manifest."""
    name, trainable = _text(entry, "name"), bool(entry["trainable"])
    gradient = _text(entry, "gradient") if trainable else None
    indices = _text(entry, "gradient_indices") if trainable and "gradient_indices" in entry else None
    shape = sizes(entry["shape"], f"'{name}'")
    # A sparse gradient is rows of a table.
    if indices is not None and not shape:
        raise ValueError(f"'{name}' has no rows")
    return ParameterSpec(name, _dtype(entry["dtype"]), shape, trainable, gradient, indices)


def _statistic(entry: Mapping[str, Any]) -> StatisticSpec:
    name = _text(entry, "name")
    return StatisticSpec(
        name, _dtype(entry["dtype"]), sizes(entry["shape"], f"'{name}'"), _text(entry, "output")
    )


def _host_input(entry: Mapping[str, Any]) -> HostInput:
    """Reads an input that the host fills from its entry in the manifest."""
    name, holds = _text(entry, "name"), tuple(list_of_texts(entry["holds"], "the numbers of a host input"))
    unknown = sorted({*holds} - {*HOST_VALUES})
    if unknown or entry["dtype"] != "int64" or entry["shape"] != [len(holds)]:
        raise ValueError(
            f"the input '{name}' is {entry['dtype']} of shape {entry['shape']} and holds {list(holds)}; known are "
            f"int64 vectors of {', '.join(HOST_VALUES)}"
        )
    return HostInput(name, holds)


def _optimizer(entry: Mapping[str, Any]) -> OptimizerSpec:
    """Reads the optimizer from its entry in the manifest."""
    # Older manifests have no initial values: their moments start from 0.
    moments = tuple(list_of_texts(entry["moments"], "the moments"))
    values = tuple(map(float, entry.get("initial_values", [0.0] * len(moments))))
    if len(values) != len(moments):
        raise ValueError(f"{len(values)} initial values for {len(moments)} moments")
    return OptimizerSpec(
        _text(entry, "type"), moments, values, _text(entry, "learning_rate"), _text(entry, "step")
    )


def parse_manifest(text: str | bytes, source: str) -> Manifest:
    """Parses a manifest.

    Args:
        text: the manifest as a JSON text, or the bytes of the text in UTF-8.
        source: name of the file in messages, e.g. "training model 'run/training_model.onnx'".

    Raises:
        ModelLoadError: the text is no manifest, incomplete, or of a newer version.
    """
    try:
        raw = parse_json(text)
        if raw["format"] != FORMAT or not isinstance(raw["version"], int):
            raise ValueError(f"format {raw['format']!r}, version {raw['version']!r}")
        if raw["version"] > SPARSE_VERSION:
            raise ModelLoadError(
                f"Loading {source}: its manifest has version {raw['version']}, this onnxtrain reads up to "
                f"{SPARSE_VERSION}. Upgrade onnxtrain on this device."
            )
        inputs, targets = tuple(map(_input, raw["inputs"])), tuple(map(_input, raw["targets"]))
        parameters, statistics = map(_parameter, raw["parameters"]), map(_statistic, raw["statistics"])
        manifest = Manifest(
            fingerprint=_text(raw, "fingerprint"),
            inputs=inputs,
            targets=targets,
            outputs=tuple(list_of_texts(raw["outputs"], "outputs")),
            parameters=tuple(parameters),
            statistics=tuple(statistics),
            optimizer=None if raw["optimizer"] is None else _optimizer(raw["optimizer"]),
            # null is a sum; an older manifest without the entry has a mean over samples.
            loss_mean=_loss_mean(raw.get("loss_mean", {}), inputs + targets),
            inference_outputs=tuple(
                list_of_texts(
                    (raw.get("inference") or {"outputs": []})["outputs"], "the inference model's outputs"
                )
            ),
            inference_inputs=tuple(
                list_of_texts(
                    (raw.get("inference") or {"inputs": []})["inputs"], "the inference model's inputs"
                )
            ),
            profile=_text(raw, "profile") if "profile" in raw else "default",
            host_inputs=tuple(map(_host_input, raw.get("host_inputs", ()))),
        )
        names = [s.name for group in (inputs, targets) for s in group] + [p.name for p in manifest.parameters]
        names += [spec.name for group in (manifest.statistics, manifest.host_inputs) for spec in group]
        list_of_texts(names, "what the model takes")
        # The manifest in an optimizer model that onnxblock has built has no inputs, targets and outputs.
        if not manifest.outputs and (inputs or targets):
            raise ValueError("there is no output")
        return manifest
    # Of a JSON text with values of other types, each line above can raise one of these.
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # A ModelLoadError is a ValueError, and says enough.
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(
            f"Loading {source}: its metadata property '{METADATA_KEY}' is not a usable manifest "
            f"({type(error).__name__}: {error}). Generate the artifacts again."
        ) from error
