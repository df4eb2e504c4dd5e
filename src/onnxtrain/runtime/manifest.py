"""The manifest: what a training run's models expect and return (`docs/contracts.md`, "The manifest")."""

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
FORMAT = "onnxtrain"
VERSION = 1
SPARSE_VERSION = 2
"""Of manifests with sparse gradients, which hosts that read version 1 would not understand."""

Dim = int | str | None
Signature = tuple[str, str, Sequence[int]]
"""Name, dtype name and shape of one tensor."""


def fingerprint(parameters: Iterable[Signature], statistics: Iterable[Signature] = ()) -> str:
    """Returns the SHA-256 (hexadecimal) over names, dtypes and shapes of parameters and statistics.

    It does not depend on their order: the digest is taken over the UTF-8 text of a JSON object with the keys
    `parameters` and `statistics`, each a list of `[name, dtype, shape]` sorted by name, without spaces.

    >>> fingerprint([("w", "float32", (2, 3))])[:8]
    'f6e700ff'
    """
    import hashlib  # kept out of the time that a device takes to start

    groups = {"parameters": parameters, "statistics": statistics}
    listed = {
        key: sorted((name, dtype, [int(d) for d in shape]) for name, dtype, shape in group)
        for key, group in groups.items()
    }
    text = json.dumps(listed, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ClassLabels:
    """Allowed values of an integer class target: `0 .. count-1` (any count if None) or `ignore_index`.

    Attributes:
        axis: of the scores, which holds the classes.
        scores: dimensions of the scores where they have more than two.
    """

    count: int | None
    ignore_index: int | None
    axis: int = 1
    scores: tuple[Dim, ...] | None = None


@dataclass(frozen=True)
class LossMean:
    """What the loss of a batch is the mean over: its samples, or the labels that count in `labels`.

    Attributes:
        labels: name of the input or target with the labels; None for a mean over samples.
        ignore_index: label that does not count.
        weight: what a label of each class counts; None for 1.
        sample_weight: name of the input with the weights of the samples, by which all of this is multiplied; None
            for 1.
    """

    labels: str | None = None
    ignore_index: int | None = None
    weight: tuple[float, ...] | None = None
    sample_weight: str | None = None

    def count(self, specs: Sequence[InputSpec], arrays: Sequence[Array]) -> float:
        """Returns what the loss of a batch counts in a mean over batches; 0 where the batch has no loss."""
        if self.labels is None and self.sample_weight is None:
            return float(len(arrays[0]))
        if self.sample_weight is not None:
            named = {spec.name: array for spec, array in zip(specs, arrays, strict=True)}
            return self._weighted(named, named[self.sample_weight])
        labels = next(a for spec, a in zip(specs, arrays, strict=True) if spec.name == self.labels)
        if self.weight is None:
            return float(
                labels.size if self.ignore_index is None else np.count_nonzero(labels != self.ignore_index)
            )
        if self.ignore_index is not None:
            labels = labels[labels != self.ignore_index]
        return float(np.asarray(self.weight)[labels].sum())

    def _weighted(self, named: Mapping[str, Array], weights: Array) -> float:
        if self.labels is None or (self.ignore_index is None and self.weight is None):
            return float(weights.sum(dtype=np.float64))
        labels = named[self.labels]
        counted = np.ones(labels.shape, bool) if self.ignore_index is None else labels != self.ignore_index
        of_class = np.ones(1) if self.weight is None else np.asarray(self.weight)
        index = np.where(counted, labels, 0) if self.weight is not None else np.zeros(labels.shape, int)
        counts = np.where(counted, of_class[index], 0.0).reshape(len(labels), -1).sum(axis=1)
        return float(counts @ weights.astype(np.float64))


@dataclass(frozen=True)
class InputSpec:
    """A user input or a target of the training model; a str dimension is symbolic, None is unknown."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...] | None
    class_labels: ClassLabels | None = None
    sample_weight: bool = False
    """Whether it holds a weight for each sample."""


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter; `gradient` names the output with its gradient, None when it is frozen.

    Where `gradient_indices` names an output too, the gradient is sparse: the rows that were read, and their numbers.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    trainable: bool
    gradient: str | None
    gradient_indices: str | None = None


@dataclass(frozen=True)
class StatisticSpec:
    """A BatchNorm running statistic; `output` names the output with its updated value."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    output: str


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer model: names of its moments, what they start from, and names of its scalar inputs."""

    type: str
    moments: tuple[str, ...]
    initial_values: tuple[float, ...]
    learning_rate: str
    step: str


@dataclass(frozen=True)
class Manifest:
    """A parsed manifest; `loss_mean` is None when the loss is a sum.

    `inference_outputs` are those of the inference model, none where there is no such model.
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

    @property
    def arguments(self) -> tuple[InputSpec, ...]:
        """What `Module.__call__` takes: user inputs, then targets."""
        return self.inputs + self.targets

    @property
    def sample_weight(self) -> InputSpec | None:
        """The target that holds a weight for each sample, if there is one."""
        return next((spec for spec in self.targets if spec.sample_weight), None)

    @property
    def trainable(self) -> tuple[ParameterSpec, ...]:
        """The trainable parameters in graph order."""
        return tuple(p for p in self.parameters if p.trainable)

    @property
    def sparse(self) -> tuple[ParameterSpec, ...]:
        """Those of them whose gradient is sparse."""
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
    """Returns `value` if it is None or of exactly this kind."""
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
        ),
        sample_weight=weighs,
    )


def _loss_mean(entry: Mapping[str, Any] | None, arguments: Iterable[InputSpec]) -> LossMean | None:
    if entry is None:
        return None
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
    )


def _parameter(entry: Mapping[str, Any]) -> ParameterSpec:
    name, trainable = _text(entry, "name"), bool(entry["trainable"])
    gradient = _text(entry, "gradient") if trainable else None
    indices = _text(entry, "gradient_indices") if trainable and "gradient_indices" in entry else None
    shape = sizes(entry["shape"], f"'{name}'")
    if indices is not None and not shape:
        raise ValueError(f"'{name}' has no rows")
    return ParameterSpec(name, _dtype(entry["dtype"]), shape, trainable, gradient, indices)


def _statistic(entry: Mapping[str, Any]) -> StatisticSpec:
    name = _text(entry, "name")
    return StatisticSpec(
        name, _dtype(entry["dtype"]), sizes(entry["shape"], f"'{name}'"), _text(entry, "output")
    )


def _optimizer(entry: Mapping[str, Any]) -> OptimizerSpec:
    moments = tuple(list_of_texts(entry["moments"], "the moments"))
    values = tuple(map(float, entry.get("initial_values", [0.0] * len(moments))))
    if len(values) != len(moments):
        raise ValueError(f"{len(values)} initial values for {len(moments)} moments")
    return OptimizerSpec(
        _text(entry, "type"), moments, values, _text(entry, "learning_rate"), _text(entry, "step")
    )


def parse_manifest(text: str | bytes, source: str) -> Manifest:
    """Returns the manifest written in `text`, or its bytes in UTF-8; `source` names where it came from, for messages.

    Raises:
        ModelLoadError: Not a manifest, incomplete, or of a newer version.
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
            loss_mean=_loss_mean(raw.get("loss_mean", {}), inputs + targets),
            inference_outputs=tuple(
                list_of_texts(
                    (raw.get("inference") or {"outputs": []})["outputs"], "the inference model's outputs"
                )
            ),
        )
        names = [s.name for group in (inputs, targets) for s in group] + [p.name for p in manifest.parameters]
        list_of_texts(names + [spec.name for spec in manifest.statistics], "what the model takes")
        if not manifest.outputs and (inputs or targets):  # an optimizer of onnxblock has none of all these
            raise ValueError("there is no output")
        return manifest
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(
            f"Loading {source}: its metadata property '{METADATA_KEY}' is not a usable manifest "
            f"({type(error).__name__}: {error}). Generate the artifacts again."
        ) from error
