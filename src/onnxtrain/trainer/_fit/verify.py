"""Compares the outputs of an exported model with those of the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from onnxtrain.errors import InputError, ModelError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.session import open_session
from onnxtrain.trainer._fit.state import TrainingState

TOLERANCE = 1e-3
"""Largest difference of outputs that is rounding, as a fraction of their largest magnitude."""


def verify_export(
    state: TrainingState, path: Path, arrays: Sequence[Array], feeds: Mapping[str, Array] | None = None
) -> dict[str, float]:
    """Runs an exported model and the trainer's on the same batch, and compares their outputs.

    Args:
        state: the trainer's state.
        path: the exported model.
        arrays: inputs of the trainer's model, in its order.
        feeds: inputs of the exported model by name, if it has others, e.g. the columns of a table.

    Returns:
        Largest absolute difference of each output that both have.

    Raises:
        InputError: the exported model takes inputs that the batch lacks, or has none of the trainer's outputs.
        ModelError: the outputs differ by more than rounding, or the model cannot be run.
    """
    run = state.run
    filled, count = run._filled(arrays)
    with state.averaged():
        expected = run.predict([filled])
    session = open_session(path, "exported model", run.device, run.options)
    if feeds is None:
        feeds = {spec.name: array for spec, array in zip(run.manifest.row_inputs, filled, strict=True)}
    names = [value.name for value in session.get_inputs()]
    if missing := [name for name in names if name not in feeds]:
        raise InputError(
            f"Verifying '{path}': it takes the inputs {', '.join(missing)}, which the data lacks. Compare its outputs "
            "with those of trainer.predict yourself."
        )
    outputs = [value.name for value in session.get_outputs() if value.name in expected]
    if not outputs:
        raise InputError(
            f"Verifying '{path}': it has none of the outputs {', '.join(expected)} of the trainer."
        )
    try:
        results = session.run(outputs, {name: feeds[name] for name in names})
    except Exception as error:
        raise ModelError(f"Verifying '{path}': running it failed: {error}") from error
    differences: dict[str, float] = {}
    for name, result in zip(outputs, results, strict=True):
        wanted = expected[name][:count]
        difference, largest = _difference(np.asarray(result)[:count], wanted)
        differences[name] = difference
        # NaN compares false, so that it fails.
        if not difference <= TOLERANCE * max(1.0, largest):
            raise ModelError(
                f"Verifying '{path}': its output '{name}' differs from the trainer's by up to {difference:.3g}, where "
                f"the largest value is {largest:.3g}. It is not the trained model, or ONNX Runtime computes it wrongly."
            )
    return differences


def _difference(result: Array, wanted: Array) -> tuple[float, float]:
    """Returns the largest absolute difference of two arrays, and the largest magnitude of the second one.

    The difference is infinite if the shapes differ, or one of the two is NaN where the other is not.

    >>> _difference(np.array([1.0, np.nan]), np.array([1.5, np.nan]))
    (0.5, 1.5)
    """
    if result.shape != wanted.shape:
        return float("inf"), 0.0
    if result.dtype.kind not in "fiub":
        return (0.0 if np.array_equal(result, wanted) else float("inf")), 0.0
    a, b = result.astype(np.float64), wanted.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if not np.array_equal(np.isfinite(a) | same, np.isfinite(b) | same) or not (np.isfinite(a) | same).all():
        return float("inf"), float(np.nanmax(np.abs(b), initial=0.0))
    with np.errstate(invalid="ignore"):
        errors = np.where(same, 0.0, np.abs(a - b))
    finite = np.abs(b[np.isfinite(b)])
    return float(errors.max(initial=0.0)), float(finite.max(initial=0.0))
