"""Runs `_dry_run` in a process of its own, and makes the arrays that it trains on."""

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

# Texts by which Python, C++ and ONNX Runtime say that memory is short.
_OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "Failed to allocate memory", "Unable to allocate")
_PACKAGE = Path(__file__).parents[2]


class Measured(NamedTuple):
    """Result of a dry run.

    Attributes:
        peak: largest memory of the process in bytes; None if the process was stopped.
        seconds: median time of a step; None if the process was stopped.
    """

    peak: int | None
    seconds: float | None


def run_steps(directory: Path, steps: int, limit: int, threads: int | None) -> Measured:
    """Trains from the artifacts and the `inputs.npz` of a directory, in a process of its own.

    Args:
        directory: directory of the artifacts.
        steps: number of training steps.
        limit: stop when the process has used more than this memory, in bytes.
        threads: threads per operation; None for ONNX Runtime's default.

    Raises:
        OnnxTrainError: the steps failed for another reason than memory.
    """
    # By its path, not by `-m`, which would import `onnxtrain.planning` and with it all that builds graphs.
    command = [sys.executable, "-P", _dry_run.__file__, *map(str, (directory, steps, limit, threads or 0))]
    # The child finds the same package as this process, also if a notebook has put it on sys.path.
    path = os.pathsep.join([str(_PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    # Linux kills a process when the machine has no memory left.
    killed = os.name == "posix" and done.returncode == -signal.SIGKILL
    if (
        done.returncode == _dry_run.STOPPED
        or killed
        or (done.returncode and any(text in done.stderr for text in _OUT_OF_MEMORY))
    ):
        return Measured(None, None)
    if done.returncode:
        # The last line of a traceback is the error; without one the exit code is all that is known.
        problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OnnxTrainError(f"planning: a training step with random inputs failed: {problem}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def write_inputs(
    path: Path, model: ir.Model, manifest: Manifest, batch_size: int, dims: Mapping[str, int]
) -> None:
    """Writes random arrays for one step, in the order in which a module takes them.

    Args:
        path: the `.npz` file to write.
        model: the canonical model, whose nodes tell what integers stand for.
        manifest: manifest of the artifacts, with the inputs and targets.
        batch_size: size of symbolic first axes.
        dims: sizes of the other symbolic axes, by name.
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
            # Positive, as some targets have to be: probabilities, counts.
            values = rng.uniform(0, 1, shape)
        else:
            # Integers that index nothing are masks and positions: with ones nothing is masked.
            bound = bounds.get(spec.name)
            values = np.ones(shape) if bound is None else rng.integers(0, bound, shape)
        arrays.append(np.asarray(values, dtype))
    # An input may be called `file` or `allow_pickle`, as arguments of `savez` are: arrays are named by their places.
    np.savez(path, *arrays)


def check_sizes(manifest: Manifest, batch_size: int | None, dims: Mapping[str, int]) -> None:
    """Raises InputError if a size is missing, contradicts the file, or is of a dimension that nothing has."""
    fixed = next((spec for spec in manifest.inputs if spec.shape and isinstance(spec.shape[0], int)), None)
    if fixed is not None and batch_size is not None and fixed.shape and fixed.shape[0] != batch_size:
        raise InputError(
            f"planning: {argument('batch_size')} is {batch_size}, but the file has fixed the batch of '{fixed.name}' "
            f"to {fixed.shape[0]}; leave it out, or {words().dynamic_batch('plan_training')}"
        )
    symbols = {
        dim: spec.name for spec in manifest.arguments for dim in spec.shape or () if isinstance(dim, str)
    }
    if unknown := sorted(set(dims) - set(symbols)):
        raise InputError(
            f"planning: no input or target has a symbolic dimension {', '.join(map(repr, unknown))}; they have "
            f"{', '.join(map(repr, symbols)) or 'none'}"
        )
    # Unlike the batch, which has a usual size, a guess would give a memory that holds for no training of the user's.
    for spec in manifest.arguments:
        for dim in (spec.shape or ())[1:]:
            if isinstance(dim, str) and dim not in dims:
                raise InputError(
                    f"planning: the size of {dim!r}, a dimension of '{spec.name}', is needed, as memory depends on "
                    f"it; give it in {argument('dims')}, e.g. {dim}=128"
                )


def _shape(spec: InputSpec, batch_size: int, dims: Mapping[str, int]) -> list[int]:
    """Returns the sizes of an input or target."""
    if spec.shape is None:
        raise InputError(f"planning: the number of axes of '{spec.name}' is not in the file")
    sizes = []
    for axis, dim in enumerate(spec.shape):
        size = dims.get(dim) if isinstance(dim, str) else dim
        if size is None and axis == 0:
            size = batch_size
        if size is None:
            raise InputError(
                f"planning: axis {axis} of '{spec.name}' has neither a size nor a name in the file"
            )
        sizes.append(size)
    return sizes
