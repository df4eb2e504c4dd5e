"""Does a checkpoint belong to a model? Fits the store of the one to the manifest of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxtrain.errors import CheckpointError
from onnxtrain.runtime.manifest import Manifest, ParameterSpec, StatisticSpec
from onnxtrain.runtime.store import Buffer, Store

_SHOWN = 5


def _differences(
    kind: str, expected: Sequence[ParameterSpec | StatisticSpec], actual: Mapping[str, Buffer]
) -> list[str]:
    found = []
    for spec in expected:
        buffer = actual.get(spec.name)
        if buffer is None:
            found.append(f"{kind} '{spec.name}' is missing from the checkpoint")
        elif (buffer.dtype, buffer.shape) != (spec.dtype, spec.shape):
            found.append(
                f"{kind} '{spec.name}' is {spec.dtype.name}{list(spec.shape)} in the model and "
                f"{buffer.dtype.name}{list(buffer.shape)} in the checkpoint"
            )
    names = {spec.name for spec in expected}
    found += [f"{kind} '{name}' is not in the model" for name in actual if name not in names]
    return found


def _arrange(group: dict[str, Buffer], expected: Sequence[ParameterSpec | StatisticSpec]) -> None:
    """Puts the entries in the manifest's order, in place: views of the group stay valid."""
    ordered = {spec.name: group[spec.name] for spec in expected}
    group.clear()
    group.update(ordered)


def fit_store(store: Store, manifest: Manifest, source: str) -> None:
    """Brings `store` into the order of `manifest` and takes from it which parameters are trainable.

    Names, dtypes and shapes are compared themselves, not only by fingerprint, so that the message can say
    what differs; a checkpoint without a fingerprint, such as onnxruntime-training's, is checked just as well.
    There, BatchNorm statistics are frozen parameters; they become statistics here.

    Raises:
        CheckpointError: The checkpoint is another model's; the first differences are named. `store` is
            unchanged.
    """
    names = {spec.name for spec in manifest.statistics}
    moved = {name: b for name, b in store.parameters.items() if name in names}
    parameters = {name: b for name, b in store.parameters.items() if name not in moved}
    statistics = {**store.statistics, **moved}
    if not store.shapes_known:
        for spec in manifest.parameters:
            if spec.name in parameters:
                parameters[spec.name] = Buffer.zeros(spec.dtype, spec.shape, defined=False)
    differences = _differences("parameter", manifest.parameters, parameters)
    differences += _differences("statistic", manifest.statistics, statistics)
    if differences:
        shown = "; ".join(differences[:_SHOWN])
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise CheckpointError(
            f"The checkpoint does not belong to {source}: {shown}{more}. Use the checkpoint that was "
            "generated with this model."
        )
    store.parameters.update(parameters)
    for name in moved:
        store.statistics[name] = store.parameters.pop(name)
    store.shapes_known = True
    _arrange(store.parameters, manifest.parameters)
    _arrange(store.statistics, manifest.statistics)
    store.trainable = {spec.name for spec in manifest.trainable}
