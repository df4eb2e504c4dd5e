"""Checks that a checkpoint belongs to a model, and sorts its tensors in the order of the model's manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.runtime.manifest import Manifest, ParameterSpec, StatisticSpec
from onnxtrain.runtime.store import Buffer, Store

# Maximum number of differences in an error message.
_SHOWN = 5


def describe_mismatch(tensor: ParameterSpec | StatisticSpec | Buffer, place: str, buffer: Buffer) -> str:
    """Describes how the dtype or shape of a tensor differs from its counterpart in the checkpoint; "" if equal.

    Args:
        tensor: the tensor.
        place: where `tensor` is from, for error messages, e.g. "the model".
        buffer: its counterpart in the checkpoint.
    """
    if (tensor.dtype, tensor.shape) == (buffer.dtype, buffer.shape):
        return ""
    return (
        f"is {tensor.dtype.name}{list(tensor.shape)} in {place} and {buffer.dtype.name}{list(buffer.shape)} in "
        "the checkpoint"
    )


def join_differences(differences: Sequence[str]) -> str:
    """Joins differences for an error message: lists the first five, then says how many more there are."""
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return "; ".join(differences[:_SHOWN]) + more


def _differences(
    kind: str, expected: Sequence[ParameterSpec | StatisticSpec], actual: Mapping[str, Buffer]
) -> list[str]:
    """Describes each tensor of a checkpoint that is missing or extra, or has the wrong dtype or shape.

    Args:
        kind: kind of the tensors in the descriptions, e.g. "parameter".
        expected: the manifest's entries.
        actual: the checkpoint's tensors by name.
    """
    differences = []
    for spec in expected:
        buffer = actual.get(spec.name)
        if buffer is None:
            differences.append(f"{kind} '{spec.name}' is missing from the checkpoint")
        elif mismatch := describe_mismatch(spec, "the model", buffer):
            differences.append(f"{kind} '{spec.name}' {mismatch}")
    names = {spec.name for spec in expected}
    differences += [f"{kind} '{name}' is not in the model" for name in actual if name not in names]
    return differences


def _arrange(group: dict[str, Buffer], expected: Sequence[ParameterSpec | StatisticSpec]) -> None:
    """Sorts the dict `group` in place, in the order of the manifest's entries `expected`."""
    # In place, because `Parameters` of the state refer to this dict.
    ordered = {spec.name: group[spec.name] for spec in expected}
    group.clear()
    group.update(ordered)


def check_adapters(in_model: object, in_checkpoint: object, source: str) -> None:
    """Raises CheckpointError if a checkpoint's LoRA adapters were trained with different base weights or scaling.

    The shapes may match nonetheless, but the results would be wrong.

    Args:
        in_model: JSON description of the adapters in the training model's metadata; None if it has no adapters.
        in_checkpoint: JSON description of the adapters in the checkpoint; None if it has none.
        source: the training model, for error messages.
    """
    if not isinstance(in_model, str) or not isinstance(in_checkpoint, str):
        return
    # Other programs may store something else under this name.
    try:
        model, checkpoint = (_base_and_scaling(text) for text in (in_model, in_checkpoint))
    except (ValueError, TypeError, KeyError, AttributeError):
        return
    kinds = ("on other base weights than", "with another scaling (lora_alpha / r) than")
    for what, theirs, ours in zip(kinds, checkpoint, model, strict=True):
        if theirs != ours:
            raise CheckpointError(
                f"The checkpoint does not belong to {source}: its adapters were trained {what} those of "
                "this model. Use the checkpoint that was generated with this model, or transfer the "
                "adapters with save_adapter and load_adapter."
            )


def _base_and_scaling(text: str) -> tuple[object, object]:
    """Parses a JSON description of LoRA adapters.

    Returns:
        The fingerprint of the base model, and the settings that determine the adapters' scaling.
    """
    description = parse_json(text)
    config = description["config"]
    return description["base"], {key: config[key] for key in ("lora_alpha", "use_rslora", "alpha_pattern")}


def fit_store(store: Store, manifest: Manifest, source: str) -> None:
    """Checks that a checkpoint matches a training model, and prepares `store` for training it.

    Reorders the tensors to match the manifest, and sets `store.trainable` to the names of its trainable parameters. In
    a checkpoint of onnxruntime-training, BatchNorm statistics are stored as frozen parameters: moves them to
    `store.statistics`. Nominal checkpoints contain only names: adds dtypes and shapes.

    Args:
        store: content of a checkpoint; modified in place.
        manifest: manifest of the training model.
        source: the training model, for error messages, e.g. "training model 'run/training_model.onnx'".

    Raises:
        CheckpointError: the checkpoint is from a different model; the message lists the first differences. `store` is
            not modified.
    """
    # Names, dtypes and shapes are compared, not only fingerprints, so that the message can tell what differs. A
    # checkpoint of onnxruntime-training has no fingerprint. Its BatchNorm statistics are frozen parameters, which
    # become statistics.
    names = {spec.name for spec in manifest.statistics}
    moved = {name: b for name, b in store.parameters.items() if name in names}
    parameters = {name: b for name, b in store.parameters.items() if name not in moved}
    statistics = {**store.statistics, **moved}
    # Nominal checkpoints of onnxruntime-training contain only names; dtypes and shapes come from the model.
    if not store.shapes_known:
        for spec in manifest.parameters:
            if spec.name in parameters:
                parameters[spec.name] = Buffer.zeros(spec.dtype, spec.shape, defined=False)
    differences = _differences("parameter", manifest.parameters, parameters)
    differences += _differences("statistic", manifest.statistics, statistics)
    if differences:
        raise CheckpointError(
            f"The checkpoint does not belong to {source}: {join_differences(differences)}. Use the checkpoint that was "
            "generated with this model."
        )
    # All checks precede the first modification, so that a rejected store is unchanged.
    store.parameters.update(parameters)
    for name in moved:
        store.statistics[name] = store.parameters.pop(name)
    store.shapes_known = True
    _arrange(store.parameters, manifest.parameters)
    _arrange(store.statistics, manifest.statistics)
    store.trainable = {spec.name for spec in manifest.trainable}
