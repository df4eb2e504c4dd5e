"""Defines `Optimizer`, which updates the parameters of a module by running the optimizer model."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from onnxtrain.errors import CheckpointError, InputError, ModelLoadError, TrainingStateError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.binding import Binding
from onnxtrain.runtime.dtypes import DType
from onnxtrain.runtime.lock import StateLock
from onnxtrain.runtime.manifest import Manifest, OptimizerSpec
from onnxtrain.runtime.module import Module
from onnxtrain.runtime.not_copyable import NotCopyable
from onnxtrain.runtime.session import ModelSource, describe, open_training_session, require_values
from onnxtrain.runtime.store import Buffer, OptimizerProgress, Store

_DEFAULT_LEARNING_RATE = 1e-3
_LARGEST_RATE = float(np.finfo(np.float32).max)

# Element type and shape of a parameter's moment.
_Moment = tuple[DType, tuple[int, ...]]


def check_learning_rate(value: float) -> float:
    """Checks a learning rate, and returns it as a float.

    Raises:
        InputError: the value is not a number, or is NaN, negative or too large for float32.
    """
    # The optimizer model takes a float32.
    if not isinstance(value, numbers.Real) or not 0 <= value <= _LARGEST_RATE:
        raise InputError(
            f"The learning rate must be a number from 0 to {_LARGEST_RATE:.4g}, received {value!r}."
        )
    return float(value)


class Optimizer(NotCopyable):
    """Updates the parameters of a module from their gradients by running the optimizer model.

    Moments, step count and learning rate are part of the module's checkpoint state. If the checkpoint contains them,
    training continues exactly where it stopped. Otherwise the moments start at their initial values (0 for most
    optimizers) and the learning rate at 1e-3.

    Args:
        optimizer_uri: path of the optimizer model, or the bytes of the file.
        module: the module whose parameters are updated.

    Raises:
        ModelLoadError: the model is missing, corrupt, not an optimizer model, or belongs to a different run.
        CheckpointError: the checkpoint contains the state of a different optimizer.
    """

    def __init__(self, optimizer_uri: ModelSource, module: Module) -> None:
        self._store = module._store
        device = module._device
        session, manifest = open_training_session(
            optimizer_uri, "optimizer model", device, module._session_options
        )
        source = describe(optimizer_uri, "optimizer model")
        spec = _require_same_run(manifest, module.manifest, source)
        names = [p.name for p in manifest.trainable]
        session_inputs = {i.name: i for i in session.get_inputs()}
        # Not every parameter has every moment, because parameter groups may have different optimizers. A moment of no
        # parameter is expected for all, so that `require_values` reports it.
        having = {m: [p for p in names if f"{p}_{m}" in session_inputs] for m in spec.moments}
        moments = [(m, p) for m, some in having.items() for p in some or names]
        sparse = [p.name for p in manifest.sparse]
        gradients = [f"{p}_grad" for p in names] + [f"{p}_grad_indices" for p in sparse]
        inputs = {spec.learning_rate, spec.step, *names, *gradients}
        require_values(
            session,
            source,
            inputs | {f"{p}_{m}" for m, p in moments},
            {f"{p}_updated" for p in names} | {f"{p}_{m}_updated" for m, p in moments},
        )
        # Including moments, whose types are looked up in `dtypes.BY_ORT` below.
        unknown = sorted({i.type for i in session_inputs.values()} - dtypes.BY_ORT.keys())
        if unknown:
            raise ModelLoadError(
                f"Loading {source}: it has the inputs {', '.join(unknown)}, which no optimizer has. The "
                "file is corrupt; generate the artifacts again."
            )
        with self._store.lock:
            _prepare_moments(self._store, spec, _wanted(session_inputs, moments, self._store, source), source)
            if self._store.optimizer is None:
                self._store.optimizer = OptimizerProgress(0, _DEFAULT_LEARNING_RATE, _DEFAULT_LEARNING_RATE)
            self._progress = self._store.optimizer
        self._rate = Buffer.zeros(dtypes.BY_NAME["float32"], (), device)
        self._step = Buffer.zeros(dtypes.BY_NAME["int64"], (), device)
        state = {p: self._store.parameters[p] for p in names}
        state |= {f"{p}_{m}": self._store.moments[m][p] for m, p in moments}
        self._row_gradients = [self._store.row_gradients[p] for p in sparse]
        # Outputs are bound to the memory of their inputs, so there is no second copy of weights and moments. In this
        # graph, no node reads an old value after the new one is complete. By input name; a part of the optimizer binds
        # some of them.
        self.bound_inputs = {
            spec.learning_rate: self._rate,
            spec.step: self._step,
            **state,
            **{f"{p}_grad": self._store.gradients[p] for p in names if p not in sparse},
        }
        self._binding = Binding(
            session,
            device,
            arguments=[name for p in sparse for name in (f"{p}_grad", f"{p}_grad_indices")],
            inputs=self.bound_inputs,
            outputs={f"{name}_updated": buffer for name, buffer in state.items()},
            doing="The optimizer step",
        )

    @property
    def lock(self) -> StateLock:
        """The lock of the module's state; see `Module.lock`."""
        return self._store.lock

    @property
    def step_count(self) -> int:
        """Number of steps taken, including those before training was resumed from a checkpoint."""
        return self._progress.step

    def step(self) -> None:
        """Updates the parameters from the current gradients, which are not modified.

        Raises:
            TrainingStateError: no training step has computed gradients yet, or they belong to another thread.
            CheckpointError: parameters of a nominal checkpoint have no data yet.
        """
        store, progress = self._store, self._progress
        with store.lock:
            if not store.gradients_valid:
                raise TrainingStateError(
                    "Optimizer.step(): there are no gradients yet. Call the module in training mode first: "
                    "module.train(); module(*inputs, *targets)."
                )
            store.require_defined("Optimizer.step()")
            store.gradient_owner.check_use("Optimizer.step()")
            self._rate.set(progress.learning_rate)
            self._step.set(progress.step + 1)
            self._update()
            # After the run, because a failed step does not count.
            progress.step += 1
            store.runs = 0
            store.gradient_owner.used()

    def _update(self) -> None:
        """Runs the optimizer model on the learning rate and step number that :meth:`step` has written to its inputs."""
        self._binding.run([value for g in self._row_gradients for value in (g.rows, g.indices)])

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate for the following steps.

        Raises:
            InputError: the rate is not a number, or is NaN, infinite, negative or too large for float32.
        """
        self._progress.learning_rate = check_learning_rate(learning_rate)

    def get_learning_rate(self) -> float:
        """Returns the learning rate of the next step."""
        return self._progress.learning_rate

    def set_initial_learning_rate(self, learning_rate: float) -> None:
        """Records a schedule's initial learning rate, which is saved in checkpoints."""
        self._progress.initial_learning_rate = check_learning_rate(learning_rate)


def _require_same_run(manifest: Manifest, expected: Manifest, source: str) -> OptimizerSpec:
    """Checks that an optimizer model belongs to a training model, and returns the optimizer from its manifest.

    Args:
        manifest: manifest of the optimizer model.
        expected: manifest of the training model.
        source: the optimizer model, for error messages.

    Raises:
        ModelLoadError: the models belong to different runs, or the manifest describes no optimizer.
    """
    # The manifests as a whole may differ: an optimizer model built with onnxblock only knows the parameters.
    ours, theirs = (
        {p.name: (p.dtype, p.shape, p.gradient_indices is None) for p in m.trainable}
        for m in (expected, manifest)
    )
    if manifest.fingerprint != expected.fingerprint or ours != theirs:
        different = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
        raise ModelLoadError(
            f"Loading {source}: it does not belong to the module's training model. These parameters are "
            "trained or sparse in only one of the two, or differ in dtype or shape: "
            f"{', '.join(different[:5]) or 'frozen parameters'}. Use the optimizer model that was "
            "generated with the training model."
        )
    if manifest.optimizer is None:
        raise ModelLoadError(
            f"Loading {source}: its manifest describes no optimizer. Pass the path of "
            "optimizer_model.onnx, not of another model of the run."
        )
    return manifest.optimizer


def _wanted(
    inputs: Mapping[str, Any], moments: Iterable[tuple[str, str]], store: Store, source: str
) -> dict[str, dict[str, _Moment]]:
    """Reads the dtypes and shapes of the moments from the inputs of the optimizer model.

    Args:
        inputs: the model's inputs by name.
        moments: (moment, parameter) pairs, e.g. ("momentum0", "fc.weight").
        store: the store with the parameters.
        source: the optimizer model, for error messages.

    Returns:
        The dtype and shape for each moment and parameter, e.g. {"momentum0": {"fc.weight": (float32, (3, 4))}}.

    Raises:
        ModelLoadError: a moment has an unknown size, or more elements than its parameter.
    """
    # Moments may be smaller than their parameters: Adafactor has one element per row and per column. None is larger, so
    # a damaged model cannot request more memory than the parameters have.
    wanted: dict[str, dict[str, _Moment]] = {}
    for moment, name in moments:
        value, room = inputs[f"{name}_{moment}"], math.prod(store.parameters[name].shape)
        shape = tuple(value.shape)
        if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) > max(1, room):
            raise ModelLoadError(
                f"Loading {source}: its input '{value.name}' has shape {list(shape)}, which does not match "
                f"the parameter '{name}' of shape {list(store.parameters[name].shape)}. Generate the "
                "artifacts again."
            )
        wanted.setdefault(moment, {})[name] = dtypes.BY_ORT[value.type], shape
    return wanted


def _prepare_moments(
    store: Store, spec: OptimizerSpec, wanted: dict[str, dict[str, _Moment]], source: str
) -> None:
    """Initializes the moments of `store`, or checks those that were loaded from a checkpoint.

    Args:
        store: the store; modified in place.
        spec: the optimizer.
        wanted: the dtype and shape for each moment and parameter, e.g. {"momentum0": {"fc.weight": (float32, (3, 4))}}.
        source: the optimizer model, for error messages.

    Raises:
        CheckpointError: the checkpoint contains the state of a different optimizer.
    """
    # A checkpoint saved without optimizer state has no progress.
    if store.optimizer is None:
        initial = dict(zip(spec.moments, spec.initial_values, strict=True))
        store.moments = {
            moment: {
                name: Buffer.filled(initial[moment], dtype, shape, store.device)
                for name, (dtype, shape) in group.items()
            }
            for moment, group in wanted.items()
        }
        return
    held = {m: {n: (b.dtype, b.shape) for n, b in group.items()} for m, group in store.moments.items()}
    if held != wanted:
        counts = {moment: len(group) for moment, group in held.items()} or "no moments"
        raise CheckpointError(
            f"The checkpoint's optimizer state does not fit {source}: it has {counts}, the optimizer "
            f"({spec.type}) needs { {m: len(group) for m, group in wanted.items()} } (tensors per moment). "
            "To start with new optimizer state, save the checkpoint without optimizer state and load "
            "that."
        )
