"""Makes the batch size of a model dynamic, and checks the result by running both models."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxtrain.errors import ModelError
from onnxtrain.passes import (
    DynamicBatchPass,
    ModelSource,
    TrainingModePass,
    apply_workarounds,
    as_given,
    canonicalize,
    fixed_batch,
    free_batch,
    load_model,
    same_kind,
    save_model,
)
from onnxtrain.runtime.device import parse_device
from onnxtrain.runtime.session import open_session, run_on_arrays

Arrays = dict[str, np.ndarray[Any, Any]]

_TOLERANCE = 1e-3
"""Maximum relative difference of equal results; kernels sum in different orders for different batch sizes."""
# Size of symbolic dimensions other than the batch, for random samples.
_OTHER = 6


@same_kind
def make_batch_dynamic(
    model: ModelSource, *, name: str = "batch", inputs: Mapping[str, npt.ArrayLike] | None = None
) -> onnx.ModelProto | ir.Model:
    """Returns a copy of a model that accepts any batch size, not only the batch size with which it was exported.

    `torch.onnx.export(model, (torch.randn(1, 3, 32, 32),), path)` fixes the batch at 1. Axis 0 of all inputs becomes
    symbolic, and constants that contain the batch size (targets of Reshape, initial states, class tokens) are
    rewritten. Then both models run on more samples than the fixed size, and must give the same results for each sample.
    Models that mix samples raise an error.

    Args:
        model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; not modified.
        name: name of the symbolic dimension, e.g. "batch".
        inputs: samples for the comparison, e.g. {"x": array}. Default: random samples; integers are 0 or 1.

    Returns:
        The model in canonical form (opset 21 or newer): an `onnx_ir.Model` if `model` is one, else a `ModelProto`,
        which `onnx.save` accepts. If the batch is already symbolic, the model is only canonicalized.

    Raises:
        ModelError: the model cannot be rewritten, or the new model gives different results; the message names the node
            or output.

    Example:
        >>> import onnx
        >>> fixed = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   net (float[1, 2, 3] x) => (float[1, 6] y) <int64[2] to = {1, 6}> { y = Reshape(x, to) }''')
        >>> dynamic = make_batch_dynamic(fixed)
        >>> [dim.dim_param or dim.dim_value for dim in dynamic.graph.output[0].type.tensor_type.shape.dim]
        ['batch', 6]
    """
    loaded = load_model(model)
    batch = fixed_batch(loaded)
    # None means that the batch size is already symbolic.
    if batch is None:
        return as_given(canonicalize(loaded), model)
    if batch == 0:
        raise ModelError(
            "Making the batch dynamic: the model was exported with a batch of 0 samples. "
            "Export it with at least one."
        )
    # A copy, because the fixed model is needed for the comparison.
    dynamic = loaded.clone()
    free_batch(dynamic, batch, name)
    dynamic = canonicalize(dynamic)
    DynamicBatchPass(batch)(dynamic)
    for before, after in zip(loaded.graph.outputs, dynamic.graph.outputs, strict=True):
        if before.shape and before.shape[0] == batch and after.shape and not isinstance(after.shape[0], int):
            after.shape = ir.Shape([name, *after.shape[1:]])
    _compare(loaded, dynamic, batch, inputs)
    return as_given(dynamic, model)


def _compare(
    fixed: ir.Model, dynamic: ir.Model, batch: int, inputs: Mapping[str, npt.ArrayLike] | None
) -> None:
    """Checks that the dynamic model computes the same results as the fixed one.

    Args:
        fixed: the original model.
        dynamic: the model with a dynamic batch size.
        batch: batch size of the original model.
        inputs: the user's samples by input name; None for random samples.

    Raises:
        ModelError: results differ, no output has the samples along axis 0, or a model does not run.
    """
    # Two batches and one more sample: several batches detect mixed samples, an odd number a hard-coded size.
    feeds = _samples(fixed, 2 * batch + 1, inputs)
    total = len(next(iter(feeds.values())))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        sessions = [_session(model, Path(folder) / f"{i}.onnx") for i, model in enumerate((fixed, dynamic))]
    names = [output.name for output in sessions[0].get_outputs()]
    chunks = []
    for start in range(0, total, batch):
        part = {key: _filled(value[start : start + batch], batch) for key, value in feeds.items()}
        chunks.append(_run(sessions[0], part, "as it was exported"))
    together = _run(sessions[1], feeds, f"with a batch of {total}")
    # With the fixed batch size, all outputs can be compared, including those without a batch axis.
    first = _run(
        sessions[1], {key: value[:batch] for key, value in feeds.items()}, f"with a batch of {batch}"
    )
    compared = False
    for index, name in enumerate(names):
        parts = [chunk[index] for chunk in chunks]
        if batch <= total:
            _require_equal(name, parts[0], first[index])
        # Only outputs with batch axis 0 can be compared sample by sample.
        if parts[0].ndim and len(parts[0]) == batch:
            _require_equal(name, np.concatenate(parts)[:total], together[index])
            compared = True
    if not compared:
        raise ModelError(
            f"Making the batch dynamic: no output ({', '.join(names)}) has the samples along axis 0, so "
            "the result cannot be checked against the model. Export the model with a dynamic batch axis."
        )


def _samples(model: ir.Model, count: int, user_samples: Mapping[str, npt.ArrayLike] | None) -> Arrays:
    """Returns samples by input name: the user's samples, or `count` random samples.

    Raises:
        ModelError: an input has no samples and no shape, or the samples are not along axis 0 of all inputs.
    """
    rng = np.random.default_rng(0)
    feeds: Arrays = {}
    sizes: dict[str, int] = {}
    for value in model.graph.inputs:
        # Files of IR version 3 list initializers among the inputs.
        if value.name in model.graph.initializers:
            continue
        name = str(value.name)
        if user_samples is not None:
            if name not in user_samples:
                raise ModelError(
                    f"Making the batch dynamic: inputs lacks {name!r}; pass samples for all inputs."
                )
            feeds[name] = np.asarray(user_samples[name])
            continue
        if value.shape is None or value.dtype is None:
            raise ModelError(
                f"Making the batch dynamic: the input {name!r} has no shape; pass inputs={{...}}."
            )
        tail = [d if isinstance(d, int) else sizes.setdefault(str(d.value), _OTHER) for d in value.shape[1:]]
        shape = (count, *tail) if len(value.shape) else ()
        dtype = value.dtype.numpy()
        feeds[name] = (
            rng.standard_normal(shape).astype(dtype)
            if value.dtype.is_floating_point()
            else rng.integers(0, 2, shape).astype(dtype)
        )
    if not feeds or len({len(array) if array.ndim else 0 for array in feeds.values()}) != 1:
        raise ModelError(
            "Making the batch dynamic: the inputs do not all have the samples along axis 0. Export the model with a "
            "dynamic batch axis."
        )
    return feeds


def _session(model: ir.Model, path: Path) -> Any:
    """Opens a CPU session for a copy of the model in which BatchNormalization and Dropout are in inference mode.

    Args:
        model: the model; not modified.
        path: file to which the copy is saved.
    """
    # In training mode, BatchNormalization mixes samples by design, and runs with Dropout differ.
    quiet = canonicalize(model)
    TrainingModePass(batch_norm="inference", dropout="inference")(quiet)
    save_model(apply_workarounds(quiet), path)
    return open_session(path, "model", parse_device("cpu"), None)


def _run(session: Any, feeds: Arrays, how: str) -> list[np.ndarray[Any, Any]]:
    """Runs a session on the entries of `feeds` that are its inputs.

    Raises:
        ModelError: the run fails; the message says `how` the model was run, e.g. "with a batch of 3".
    """
    names = {value.name for value in session.get_inputs()}
    try:
        given = {name: array for name, array in feeds.items() if name in names}
        return run_on_arrays(session, [value.name for value in session.get_outputs()], given)
    except Exception as error:
        # onnxruntime's exceptions have no common base class but Exception.
        raise ModelError(
            f"Making the batch dynamic: the model does not run {how}: {error}. Export it with a dynamic batch axis, or "
            "pass samples that suit it as inputs={...}."
        ) from error


def _filled(array: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """Extends a batch to `size` samples by repeating the last sample."""
    return np.concatenate([array, np.repeat(array[-1:], size - len(array), axis=0)])


def _require_equal(name: str, expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> None:
    """Raises ModelError unless two results for the output `name` are equal up to rounding."""
    expected64, actual64 = expected.astype(np.float64), actual.astype(np.float64)
    # Infinite scores of masked positions must not determine the scale.
    scale = max(1e-6, float(np.abs(expected64[np.isfinite(expected64)]).max(initial=0)))
    if expected.shape != actual.shape or not np.allclose(
        expected64, actual64, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True
    ):
        raise ModelError(
            "Making the batch dynamic: with more samples per call, the model computes a different output "
            f"{name!r} (shape {list(actual.shape)} instead of {list(expected.shape)}, or different "
            "values): the model mixes its samples, or hard-codes the batch size. Export it with a dynamic "
            "batch axis."
        )
