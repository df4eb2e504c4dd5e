"""Creates random inputs for a model and runs `_dry_run` on them in a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain._words import argument, words
from onnxtrain.errors import InputError, OnnxTrainError
from onnxtrain.functional.random_inputs import index_bound
from onnxtrain.planning import _dry_run
from onnxtrain.runtime.manifest import InputSpec, Manifest

# Texts with which Python, C++ and ONNX Runtime report insufficient memory.
_OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "Failed to allocate memory", "Unable to allocate")
_PACKAGE = Path(__file__).parents[2]


class Measured(NamedTuple):
    """Result of a dry run.

    Attributes:
        peak: peak memory of the process in bytes; None if the process exceeded its limit or ran out of memory.
        seconds: median step time; None if `peak` is None.
    """

    peak: int | None
    seconds: float | None


def run_steps(directory: Path, steps: int, limit: int, threads: int | None) -> Measured:
    """Runs a few training steps in a separate process, and measures their memory and time.

    Args:
        directory: directory with the artifacts and `inputs.npz`.
        steps: number of training steps.
        limit: memory limit of the process in bytes; if the process exceeds the limit, it is stopped.
        threads: number of threads per op; None for ONNX Runtime's default.

    Raises:
        OnnxTrainError: the steps failed for a reason other than memory.
    """
    # Run by path: `-m` would import `onnxtrain.planning`, and with it everything that builds graphs.
    command = [sys.executable, "-P", _dry_run.__file__, *map(str, (directory, steps, limit, threads or 0))]
    # The child finds the same package as this process, even if a notebook has added it to sys.path.
    path = os.pathsep.join([str(_PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    # Linux kills a process if the machine runs out of memory.
    killed = os.name == "posix" and done.returncode == -signal.SIGKILL
    if (
        done.returncode == _dry_run.STOPPED
        or killed
        or (done.returncode and any(text in done.stderr for text in _OUT_OF_MEMORY))
    ):
        return Measured(None, None)
    if done.returncode:
        # The last line of a traceback is the error; without a traceback, only the exit code is known.
        problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OnnxTrainError(f"planning: a training step with random inputs failed: {problem}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def write_inputs(
    path: Path, model: ir.Model, manifest: Manifest, batch_size: int, dims: Mapping[str, int]
) -> None:
    """Writes random inputs and targets for a training step, in the order of the arguments of `onnxtrain.api.Module`.

    Floats are between 0 and 1. Class labels and integer inputs that index an axis, e.g. token ids, are valid; other
    integers are 1.

    Args:
        path: the `.npz` file to write.
        model: model in canonical form, used to find the integer inputs that are indices and the sizes of the axes that
            they index.
        manifest: manifest of the artifacts, which describes the inputs and targets.
        batch_size: size of a symbolic first axis whose name is not in `dims`.
        dims: sizes of symbolic axes, by name.

    Raises:
        InputError: an input or target has an unknown rank, or an unknown size in an axis other than the first.
    """
    rng = np.random.default_rng(0)
    bounds = {str(value.name): index_bound(value) for value in model.graph.inputs}
    arrays: list[np.ndarray] = []
    for spec in manifest.arguments:
        shape, dtype = _shape(spec, batch_size, dims), np.dtype(spec.dtype.storage)
        values: np.ndarray
        if spec.class_labels is not None:
            values = rng.integers(0, spec.class_labels.count or 2, shape)
        elif spec.dtype.name == "bfloat16":
            # numpy has no bfloat16; these are the bits of 0.5.
            values = np.full(shape, 0x3F00)
        elif dtype.kind == "f":
            # Positive, because some targets must be: probabilities, counts.
            values = rng.uniform(0, 1, shape)
        else:
            # Integers that don't index anything are masks and positions: ones mask nothing.
            bound = bounds.get(spec.name)
            values = np.ones(shape) if bound is None else rng.integers(0, bound, shape)
        arrays.append(np.asarray(values, dtype))
    # Arrays are saved by position: an input may be called `file` or `allow_pickle`, like arguments of `savez`.
    np.savez(path, *arrays)


def check_sizes(manifest: Manifest, batch_size: int | None, dims: Mapping[str, int]) -> None:
    """Raises InputError if the sizes of symbolic dimensions are incomplete or do not match the model.

    Args:
        manifest: manifest of the artifacts, which describes the inputs and targets.
        batch_size: batch size that the user passed; None for the default. It must equal a fixed batch size.
        dims: sizes by dimension name; all of these dimensions must occur in the model.
    """
    fixed = next((spec for spec in manifest.inputs if spec.shape and isinstance(spec.shape[0], int)), None)
    if fixed is not None and batch_size is not None and fixed.shape and fixed.shape[0] != batch_size:
        raise InputError(
            f"planning: {argument('batch_size')} is {batch_size}, but the model has a fixed batch size of "
            f"{fixed.shape[0]} for '{fixed.name}'; leave it out, or {words().dynamic_batch('plan_training')}"
        )
    symbols = {
        dim: spec.name for spec in manifest.arguments for dim in spec.shape or () if isinstance(dim, str)
    }
    if unknown := sorted(set(dims) - set(symbols)):
        raise InputError(
            f"planning: no input or target has a symbolic dimension {', '.join(map(repr, unknown))}; they have "
            f"{', '.join(map(repr, symbols)) or 'none'}"
        )
    # Unlike the batch size, which has a usual value, a guess would give a meaningless memory figure.
    for spec in manifest.arguments:
        for dim in (spec.shape or ())[1:]:
            if isinstance(dim, str) and dim not in dims:
                raise InputError(
                    f"planning: the size of {dim!r}, a dimension of '{spec.name}', is needed, because memory depends "
                    f"on it; give it in {argument('dims')}, e.g. {dim}=128"
                )


def _shape(spec: InputSpec, batch_size: int, dims: Mapping[str, int]) -> list[int]:
    """Returns the shape of an input or target, with sizes filled in for symbolic axes.

    Args:
        spec: the input or target.
        batch_size: size of a symbolic first axis whose name is not in `dims`.
        dims: sizes of symbolic axes, by name.

    Raises:
        InputError: the rank or a size is unknown.
    """
    if spec.shape is None:
        raise InputError(f"planning: the model does not declare the rank of '{spec.name}'")
    sizes = []
    for axis, dim in enumerate(spec.shape):
        size = dims.get(dim) if isinstance(dim, str) else dim
        if size is None and axis == 0:
            size = batch_size
        if size is None:
            raise InputError(
                f"planning: axis {axis} of '{spec.name}' has neither a size nor a name in the model"
            )
        sizes.append(size)
    return sizes
