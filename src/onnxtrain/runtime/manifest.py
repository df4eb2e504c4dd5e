"""Parses manifests, which list the inputs and outputs of a run's models (`docs/reference/file-formats.md`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from onnxtrain.errors import ModelLoadError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.dtypes import DType
from onnxtrain.runtime.json_text import list_of_texts, parse_json, sizes
from onnxtrain.runtime.manifest_entries import (
    HOST_VALUES,
    ClassLabels,
    DataFile,
    Dim,
    HostInput,
    InputSpec,
    LabelSequences,
    LossMean,
    Manifest,
    OptimizerSpec,
    ParameterSpec,
    Signature,
    StatisticSpec,
)

__all__ = [
    "ADAPTERS_KEY",
    "FORMAT",
    "HOST_VALUES",
    "METADATA_KEY",
    "SPARSE_VERSION",
    "VERSION",
    "ClassLabels",
    "DataFile",
    "Dim",
    "HostInput",
    "InputSpec",
    "LabelSequences",
    "LossMean",
    "Manifest",
    "OptimizerSpec",
    "ParameterSpec",
    "Signature",
    "StatisticSpec",
    "fingerprint",
    "parse_manifest",
]

METADATA_KEY = "onnxtrain.manifest"
ADAPTERS_KEY = "onnxtrain.lora"
"""Key of the description of LoRA adapters in the metadata of a model and in the properties of a checkpoint."""
_MOST_CLASSES = 10**7
FORMAT = "onnxtrain"
VERSION = 1
SPARSE_VERSION = 2
"""Version of manifests with sparse gradients. Hosts that only support version 1 must reject them, instead of ignoring
the row indices."""


def fingerprint(parameters: Iterable[Signature], statistics: Iterable[Signature] = ()) -> str:
    """Returns a hash of the names, dtypes and shapes of a model's parameters, to check that a checkpoint belongs to it.

    The hash is the hexadecimal SHA-256 of a JSON object, encoded as UTF-8 without spaces, such as
    `{"parameters":[["w","float32",[2,3]]],"statistics":[]}`. Both lists are sorted by name, so the order
    of the tensors does not matter.

    >>> fingerprint([("w", "float32", (2, 3))])[:8]
    'f6e700ff'
    """
    # Imported here, because a device that loads a model and no checkpoint does not need it.
    import hashlib

    groups = {"parameters": parameters, "statistics": statistics}
    listed = {
        key: sorted((name, dtype, [int(d) for d in shape]) for name, dtype, shape in group)
        for key, group in groups.items()
    }
    text = json.dumps(listed, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _dtype(name: object) -> DType:
    if not isinstance(name, str) or name not in dtypes.BY_NAME:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(dtypes.BY_NAME)}")
    return dtypes.BY_NAME[name]


def _text(entry: Mapping[str, Any], key: str) -> str:
    if not isinstance(entry[key], str):
        raise ValueError(f"{key} {entry[key]!r} is not a name")
    return str(entry[key])


def _optional(kind: type, value: Any, what: str) -> Any:
    """Checks that `value` is None or exactly of type `kind`, and returns it.

    Args:
        kind: the type, e.g. int. Instances of subclasses, such as True for int, are rejected.
        value: the parsed JSON value.
        what: beginning of the error message, e.g. "ignore_index".

    Raises:
        ValueError: `value` has a different type.
    """
    # Exactly, because True is an integer for isinstance.
    if value is not None and type(value) is not kind:
        raise ValueError(f"{what} {value!r} is not of type {kind.__name__}")
    return value


def _count(value: Any) -> int | None:
    """Checks a number of classes (None if unknown), and returns it. Raises ValueError if the number is out of range."""
    count: int | None = _optional(int, value, "the number of classes")
    # Weights and names of classes take memory for each class.
    if count is not None and not 0 <= count <= _MOST_CLASSES:
        raise ValueError(f"the number of classes is {count}, but at most {_MOST_CLASSES} are supported")
    return count


def _dims(shape: object) -> tuple[Dim, ...] | None:
    if shape is None:
        return None
    if not isinstance(shape, list) or not all(d is None or type(d) in (int, str) for d in shape):
        raise ValueError(f"shape {shape!r} is not a list of sizes and names")
    return tuple(shape)


def _input(entry: Mapping[str, Any]) -> InputSpec:
    """Parses the manifest entry for one user input or target."""
    # Keys read by `get` are optional; the contract defines their defaults.
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
            _count(labels.get("count")),
            _optional(int, labels.get("ignore_index"), "ignore_index"),
            _optional(int, labels.get("axis"), "the axis of the classes") or 1,
            _dims(labels.get("scores")),
            _optional(int, labels.get("shift"), "the shift of the labels") or 0,
        ),
        sample_weight=weighs,
        groups=_groups(entry.get("groups")),
        sequences=_sequences(entry.get("sequences")),
    )


def _sequences(entry: Mapping[str, Any] | None) -> LabelSequences | None:
    """Parses the description of sequences of labels; None for a target without."""
    if entry is None:
        return None
    blank = _optional(int, entry["blank"], "the blank")
    if blank is None or blank < 0:
        raise ValueError(f"the blank is {blank}")
    return LabelSequences(_text(entry, "lengths"), blank, _count(entry.get("count")))


def _groups(value: Any) -> int | str | None:
    """Checks the number of rows per sample. Raises ValueError unless it is None, a positive integer or a name."""
    if value is not None and not (type(value) is int and value > 0) and not (type(value) is str and value):
        raise ValueError(f"the number of rows per sample is {value!r}")
    return value


def _loss_mean(entry: Mapping[str, Any] | None, arguments: Iterable[InputSpec]) -> LossMean | None:
    """Parses the manifest entry of a mean loss's denominator; returns None for a sum, which has no denominator.

    Args:
        entry: the entry; None if the loss is not a mean.
        arguments: inputs and targets of the training model.
    """
    if entry is None:
        return None
    # Names are checked here, because `LossMean.count` looks them up during training.
    labels, weight = _optional(str, entry.get("labels"), "labels"), entry.get("weight")
    if labels is not None and labels not in {spec.name for spec in arguments}:
        raise ValueError(f"the labels {labels!r} over which a loss is averaged are not an input")
    samples = _optional(str, entry.get("sample_weight"), "sample_weight")
    if samples is not None and samples not in {spec.name for spec in arguments if spec.sample_weight}:
        raise ValueError(f"the weights {samples!r} of a loss are not a sample-weight input")
    return LossMean(
        labels,
        _optional(int, entry.get("ignore_index"), "ignore_index"),
        None if weight is None else tuple(map(float, weight)),
        samples,
        _optional(int, entry.get("shift"), "the shift of the labels") or 0,
    )


def _parameter(entry: Mapping[str, Any]) -> ParameterSpec:
    """Parses the manifest entry for one parameter."""
    name, trainable = _text(entry, "name"), bool(entry["trainable"])
    gradient = _text(entry, "gradient") if trainable else None
    indices = _text(entry, "gradient_indices") if trainable and "gradient_indices" in entry else None
    shape = sizes(entry["shape"], f"'{name}'")
    # A sparse gradient consists of rows.
    if indices is not None and not shape:
        raise ValueError(f"'{name}' has no rows")
    return ParameterSpec(name, _dtype(entry["dtype"]), shape, trainable, gradient, indices)


def _statistic(entry: Mapping[str, Any]) -> StatisticSpec:
    name = _text(entry, "name")
    return StatisticSpec(
        name, _dtype(entry["dtype"]), sizes(entry["shape"], f"'{name}'"), _text(entry, "output")
    )


def _host_input(entry: Mapping[str, Any]) -> HostInput:
    """Parses the manifest entry for an input that the host sets to the seed, step or run number."""
    name, holds = _text(entry, "name"), tuple(list_of_texts(entry["holds"], "the numbers of a host input"))
    unknown = sorted({*holds} - {*HOST_VALUES})
    if unknown or entry["dtype"] != "int64" or entry["shape"] != [len(holds)]:
        raise ValueError(
            f"the input '{name}' is {entry['dtype']} of shape {entry['shape']} and holds {list(holds)}; it "
            f"must be an int64 vector of {', '.join(HOST_VALUES)}"
        )
    return HostInput(name, holds)


def _optimizer(entry: Mapping[str, Any]) -> OptimizerSpec:
    """Parses the manifest entry for the optimizer model."""
    # Optional: by default, moments start at 0.
    moments = tuple(list_of_texts(entry["moments"], "the moments"))
    values = tuple(map(float, entry.get("initial_values", [0.0] * len(moments))))
    if len(values) != len(moments):
        raise ValueError(f"{len(values)} initial values for {len(moments)} moments")
    settings = entry.get("settings", {})
    # They are printed: identifiers contain no control characters, and values are printed with repr.
    if not isinstance(settings, dict) or not all(name.isidentifier() for name in settings):
        raise ValueError(f"the settings of the optimizer are {settings!r}")
    return OptimizerSpec(
        _text(entry, "type"), moments, values, _text(entry, "learning_rate"), _text(entry, "step"), settings
    )


def _data_file(name: str, entry: Mapping[str, Any]) -> DataFile:
    """Parses the manifest entry for a file with shared weights."""
    size, digest = entry["bytes"], entry["sha256"]
    if type(size) is not int or size < 0 or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"the data file '{name}' has {size!r} bytes and the SHA-256 {digest!r}")
    return DataFile(name, size, digest)


def parse_manifest(text: str | bytes, source: str) -> Manifest:
    """Parses a manifest, and checks its entries.

    Args:
        text: the manifest as JSON, a string or UTF-8 bytes.
        source: role and path of the file for error messages, e.g. "training model 'run/training_model.onnx'".

    Raises:
        ModelLoadError: the text is not a manifest, an entry is missing or invalid, or the manifest's version is newer
            than `SPARSE_VERSION`, the newest supported version.
    """
    try:
        raw = parse_json(text)
        if raw["format"] != FORMAT or not isinstance(raw["version"], int):
            raise ValueError(f"format {raw['format']!r}, version {raw['version']!r}")
        if raw["version"] > SPARSE_VERSION:
            raise ModelLoadError(
                f"Loading {source}: its manifest has version {raw['version']}, but this onnxtrain reads "
                f"versions up to {SPARSE_VERSION}. Upgrade onnxtrain on this device."
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
            # null is a sum; without the entry, the loss is a mean over samples.
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
            draws=bool(raw.get("draws", True)),
            trainer=bool(raw.get("trainer")),
            data_files=tuple(_data_file(*item) for item in raw.get("data_files", {}).items()),
        )
        names = [s.name for group in (inputs, targets) for s in group] + [p.name for p in manifest.parameters]
        names += [spec.name for group in (manifest.statistics, manifest.host_inputs) for spec in group]
        list_of_texts(names, "what the model takes")
        # The manifest in an optimizer model built with onnxblock has no inputs, targets and outputs.
        if not manifest.outputs and (inputs or targets):
            raise ValueError("there is no output")
        return manifest
    # If values have other types, each line above may raise one of these.
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # A ModelLoadError is a ValueError with its own message.
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(
            f"Loading {source}: its metadata property '{METADATA_KEY}' is not a usable manifest "
            f"({type(error).__name__}: {error}). Generate the artifacts again."
        ) from error
