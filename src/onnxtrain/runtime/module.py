"""Defines `Module`, which runs training and evaluation steps on the parameters of a checkpoint state."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path

import numpy as np
import onnxruntime as ort

from onnxtrain.errors import DivergenceError, InputError, ModelLoadError, TrainingStateError
from onnxtrain.runtime import dtypes
from onnxtrain.runtime.binding import Binding
from onnxtrain.runtime.device import parse_device
from onnxtrain.runtime.dtypes import Array, add_inplace, widen
from onnxtrain.runtime.generator import seeded
from onnxtrain.runtime.inputs import ArgumentCheck, require_trainable
from onnxtrain.runtime.lock import StateLock
from onnxtrain.runtime.manifest import ADAPTERS_KEY, Manifest
from onnxtrain.runtime.matching import check_adapters, fit_store
from onnxtrain.runtime.not_copyable import NotCopyable
from onnxtrain.runtime.rows import RowGradient
from onnxtrain.runtime.session import ModelSource, describe, open_training_session, require_values
from onnxtrain.runtime.state import CheckpointState
from onnxtrain.runtime.store import Buffer, to_array, to_ortvalue


class Module(NotCopyable):
    """Runs the training model and the eval model on the parameters of a checkpoint state.

    Gradients **accumulate** over calls in training mode until :meth:`lazy_reset_grad`, which takes effect at the next
    call in training mode. The parameters exist once, in the state; all modules and optimizers made from the state share
    them.

    Threads may share a Module: their calls take turns. A thread that needs several calls without interruption, such as
    a training step, holds :attr:`lock`; see docs/reference/api.md.

    Args:
        train_model_uri: path of the training model, or the bytes of the file.
        state: state with the parameters of this model.
        eval_model_uri: path or bytes of the eval model, for :meth:`eval` and :meth:`export_model_for_inferencing`.
        device: "cpu", "cuda" or "cuda:<index>". On a GPU, `Parameter.data` is a copy, and accumulating gradients goes
            through host memory.
        session_options: options for all sessions. Default: log errors only.
        seed: seed of the random numbers that the training model draws, e.g. for Dropout masks; see :attr:`seed`.
        error_if_nonfinite: True to refuse training steps with NaN in an input, or with a loss that is NaN or infinite,
            with an error that leaves parameters, running statistics and accumulated gradients unchanged. If an input
            contains infinity, as additive masks do, the gradients must be finite too. False to compute with such
            numbers, for a loop that checks the loss itself.

    Raises:
        InputError: the seed is not a 64-bit integer, the device is unknown, or the installed onnxruntime does not
            support it.
        ModelLoadError: a model is missing, corrupt, not a training model, or the two models belong to different runs.
        CheckpointError: the state belongs to a different model.
    """

    def __init__(
        self,
        train_model_uri: ModelSource,
        state: CheckpointState,
        eval_model_uri: ModelSource | None = None,
        device: str = "cpu",
        session_options: ort.SessionOptions | None = None,
        *,
        seed: int = 0,
        error_if_nonfinite: bool = True,
    ) -> None:
        self.seed = seed
        self._error_if_nonfinite = error_if_nonfinite
        self._device = parse_device(device)
        if not isinstance(state, CheckpointState):
            raise TypeError(
                f"Module: state must be a CheckpointState, received {type(state).__name__}; use "
                "CheckpointState.load_checkpoint(path)."
            )
        self._training = True
        self._mode_set_by = threading.current_thread().name
        # Per thread, in `mode`: the value of `training` at its last call.
        self._modes = threading.local()
        self._session_options = session_options
        self._reset = True
        self._session, self._manifest = open_training_session(
            train_model_uri, "training model", self._device, session_options
        )
        source = describe(train_model_uri, "training model")
        drawn = {spec.name for spec in self._manifest.host_inputs}
        require_values(self._session, source, self._input_set() | drawn, self._output_set())
        # Read again by an export, perhaps with another working directory.
        if isinstance(eval_model_uri, str | os.PathLike):
            eval_model_uri = Path(eval_model_uri).absolute()
        self._eval_model = eval_model_uri
        self._eval_session = None if eval_model_uri is None else self._open_eval(eval_model_uri)
        self._check_arguments = ArgumentCheck(self._manifest.arguments)
        self._store = state._store
        self._sparse = self._manifest.sparse
        self._dense = [spec for spec in self._manifest.trainable if spec.gradient_indices is None]
        with self._store.lock:
            self._prepare_store(source)
        self._new_statistics = {
            s.name: Buffer.zeros(s.dtype, s.shape, self._device) for s in self._manifest.statistics
        }
        self._host_inputs = {
            spec.name: Buffer.zeros(dtypes.BY_NAME["int64"], (len(spec.holds),), self._device)
            for spec in self._manifest.host_inputs
        }

    def _prepare_store(self, source: str) -> None:
        """Checks and sorts the store's tensors, moves them to the device and creates gradient buffers.

        Args:
            source: the training model, for error messages.
        """
        described = self._session.get_modelmeta().custom_metadata_map.get(ADAPTERS_KEY)
        # Gradients that another Module of the same state has created are shared.
        fit_store(self._store, self._manifest, source)
        check_adapters(described, self._store.properties.get(ADAPTERS_KEY), source)
        self._store.move_to(self._device)
        for spec in self._dense:
            if spec.name not in self._store.gradients:
                self._store.gradients[spec.name] = Buffer.zeros(spec.dtype, spec.shape, self._device)
        for spec in self._sparse:
            if spec.name not in self._store.row_gradients:
                self._store.row_gradients[spec.name] = RowGradient(spec.dtype, spec.shape, self._device)

    @property
    def seed(self) -> int:
        """The seed of the random numbers that the training model draws, e.g. for Dropout masks.

        The numbers depend on the seed, the number of optimizer steps, and the number of runs since the last step. So a
        run resumed from a checkpoint with optimizer state draws the same numbers as an uninterrupted one. Models with
        `profile="portable"` draw the same numbers on all hosts. In the default profile, Dropout uses ONNX Runtime's
        generator, which the whole process shares; `onnxruntime.set_seed` seeds it before each run of the model.
        """
        return self._seed

    @seed.setter
    def seed(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
            raise InputError(f"The seed must be a 64-bit integer, received {value!r}.")
        self._seed = value

    @property
    def lock(self) -> StateLock:
        """The lock of the state: while a thread holds it (`with module.lock:`), no other thread uses the state.

        Methods that use the state acquire it. It is reentrant, and shared by all modules and optimizers that were made
        from the state.
        """
        return self._store.lock

    @property
    def training(self) -> bool:
        """True if calls are training steps, False if they are evaluation steps."""
        return self._training

    @training.setter
    def training(self, mode: bool) -> None:
        with self.lock:
            self._training = self._modes.mode = mode
            self._mode_set_by = threading.current_thread().name

    def _require_mode_unchanged(self) -> None:
        """Raises TrainingStateError if another thread has switched the mode since this thread's last call."""
        # All threads share the mode: without the error, a thread that evaluates would train because another thread
        # does.
        if getattr(self._modes, "mode", self._training) != self._training:
            mode = "training" if self._training else "evaluation"
            raise TrainingStateError(
                f"Thread '{self._mode_set_by}' has switched this Module to {mode} mode since thread "
                f"'{threading.current_thread().name}' last called it or set its mode. In both threads, "
                "hold the lock while setting the mode and calling the module: with module.lock: "
                "module.eval(); module(...)."
            )
        self._modes.mode = self._training

    def _input_set(self) -> set[str]:
        """Returns the names of all inputs of the training and eval models."""
        m = self._manifest
        return {spec.name for group in (m.arguments, m.parameters, m.statistics) for spec in group}

    def _output_set(self) -> set[str]:
        """Returns the names of all outputs of the training model."""
        m = self._manifest
        gradients = {spec.gradient for spec in m.trainable if spec.gradient}
        gradients |= {spec.gradient_indices for spec in m.sparse if spec.gradient_indices}
        return {*m.outputs, *gradients, *(s.output for s in m.statistics)}

    def _open_eval(self, model: ModelSource) -> ort.InferenceSession:
        """Opens a session of the eval model; raises ModelLoadError if it does not belong to the training model."""
        session, manifest = open_training_session(model, "eval model", self._device, self._session_options)
        source = describe(model, "eval model")
        # The fingerprint is not sufficient: the training model has the same parameters, but would evaluate with Dropout
        # and batch statistics. `require_values` rejects it, because its outputs include gradients.
        if (manifest.fingerprint, manifest.arguments) != (
            self._manifest.fingerprint,
            self._manifest.arguments,
        ):
            raise ModelLoadError(
                f"Loading {source}: it does not belong to the training model. Use the eval model of the "
                "same run."
            )
        require_values(session, source, self._input_set(), set(self._manifest.outputs))
        return session

    def _bound_inputs(self) -> dict[str, Buffer]:
        return {**self._store.parameters, **self._store.statistics}

    def _bind_training(self, gradients: dict[str, Buffer]) -> Binding:
        """Binds the inputs and outputs of the training session to the store's buffers and to gradient buffers.

        Args:
            gradients: buffers for the dense gradients, by parameter name.
        """
        outputs = {spec.gradient or "": gradients[spec.name] for spec in self._dense}
        # Not bound to the inputs' buffers: the graph may still read the old statistics after writing the new ones.
        outputs |= {spec.output: self._new_statistics[spec.name] for spec in self._manifest.statistics}
        # Rows are results, not buffers, because their number varies between steps.
        rows = [name or "" for spec in self._sparse for name in (spec.gradient, spec.gradient_indices)]
        return Binding(
            self._session,
            self._device,
            arguments=[spec.name for spec in self._manifest.arguments],
            results=[*self._manifest.outputs, *rows],
            loss=self._manifest.outputs[0],
            inputs={**self._bound_inputs(), **self._host_inputs},
            outputs=outputs,
            doing="The training step",
        )

    @cached_property
    def _scratch_gradients(self) -> dict[str, Buffer]:
        """Buffers for a step's gradients during accumulation, before they are added to the store's gradients."""
        # Created on first use: most users reset the gradients after each step, and need no second set.
        return {s.name: Buffer.zeros(s.dtype, s.shape, self._device) for s in self._dense}

    @cached_property
    def _overwriting_step(self) -> Binding:
        """Binding for training steps that overwrite the store's gradients."""
        return self._bind_training(self._store.gradients)

    @cached_property
    def _accumulating_step(self) -> Binding:
        """Binding for training steps that accumulate gradients: the model writes them to the scratch buffers."""
        return self._bind_training(self._scratch_gradients)

    @cached_property
    def _evaluation(self) -> Binding:
        """Binding for evaluation steps. Raises TrainingStateError if there is no eval model."""
        if self._eval_session is None:
            raise TrainingStateError(
                "This Module has no eval model, so it cannot evaluate. Pass it: Module(train_model, state, "
                "eval_model_uri='eval_model.onnx')."
            )
        return Binding(
            self._eval_session,
            self._device,
            arguments=[spec.name for spec in self._manifest.arguments],
            results=self._manifest.outputs,
            loss=self._manifest.outputs[0],
            inputs=self._bound_inputs(),
            outputs={},
            doing="The evaluation step",
        )

    def __call__(
        self, *user_inputs: Array | ort.OrtValue
    ) -> Array | tuple[Array, ...] | ort.OrtValue | tuple[ort.OrtValue, ...]:
        """Runs a training or an evaluation step, depending on :attr:`training`.

        Args:
            *user_inputs: user inputs, then targets, in the order of :meth:`input_names`: numpy arrays or OrtValues. A
                bfloat16 array may have the dtype of ml_dtypes, or contain raw bits (uint16) or float32, which is
                rounded.

        Returns:
            The outputs, in the order of :meth:`output_names`; a tuple if there are several. They are OrtValues if all
            inputs are OrtValues, else numpy arrays (float32 for bfloat16).

        Raises:
            InputError: number, dtype, shape or range of the inputs do not match the model. In training, a batch is
                empty, or an input contains NaN.
            DivergenceError: the loss of a training step is NaN or infinite, or an input contains infinity and makes a
                gradient NaN or infinite. See `error_if_nonfinite`.
            TrainingStateError: there is no eval model for an evaluation step, or the call would mix the steps of
                several threads.
            CheckpointError: parameters of a nominal checkpoint have no data yet.
        """
        with self.lock:
            self._require_mode_unchanged()
            # Before the inputs are checked: a missing eval model is reported first.
            binding = None if self._training else self._evaluation
            values = self._check_arguments(user_inputs)
            infinite = False
            if self._training and self._error_if_nonfinite:
                infinite = require_trainable(self._manifest.arguments, values)
            self._store.require_defined("Running a step")
            results = self._train(values, infinite) if binding is None else binding.run(values)
        if user_inputs and all(isinstance(value, ort.OrtValue) for value in user_inputs):
            held = tuple(map(to_ortvalue, results))
            return held[0] if len(held) == 1 else held
        arrays = tuple(map(to_array, results))
        return arrays[0] if len(arrays) == 1 else arrays

    def _train(self, values: Sequence[Array | ort.OrtValue], infinite: bool) -> list[Array | ort.OrtValue]:
        """Runs a training step on checked arguments, and returns the outputs without the gradients.

        Args:
            values: one array or OrtValue per argument.
            infinite: True if an argument contains infinity, so that the gradients must be checked.
        """
        store = self._store
        first = self._reset or not store.gradients_valid
        if first:
            if store.gradients_valid:
                store.gradient_owner.check_replace("A training step")
            # A run that fails leaves partial gradients, which no optimizer may use.
            store.gradients_valid = False
            results = self._run_training(self._overwriting_step, values)
            self._require_finite(results[0])
            if infinite:
                self._require_finite_gradients(store.gradients, results)
        else:
            store.gradient_owner.check_add("A training step")
            results = self._run_training(self._accumulating_step, values)
            self._require_finite(results[0])
            if infinite:
                self._require_finite_gradients(self._scratch_gradients, results)
            for name, term in self._scratch_gradients.items():
                total = store.gradients[name]
                # On the CPU, this is the memory of the gradient; elsewhere, it is a copy that must be written back.
                values_so_far = total.read()
                add_inplace(values_so_far, term.read(), total.dtype)
                if self._device.type != "cpu":
                    total.write(values_so_far)
        count = len(self._manifest.outputs)
        row_results = iter(results[count:])
        for spec in self._sparse:
            gradient = store.row_gradients[spec.name]
            (gradient.replace if first else gradient.add)(next(row_results), next(row_results))
        # As in PyTorch, statistics are updated by the training call, not by the optimizer step.
        for name, statistic in self._new_statistics.items():
            store.statistics[name].write(statistic.read())
        self._reset = False
        store.runs += 1
        store.gradients_valid = True
        (store.gradient_owner.replaced if first else store.gradient_owner.added)()
        return results[:count]

    def _require_finite(self, loss: Array | ort.OrtValue) -> None:
        """Raises DivergenceError if the loss of a training step is NaN or infinite, unless the caller checks it."""
        if self._error_if_nonfinite and not np.isfinite(number := to_array(loss)).all():
            raise DivergenceError(
                f"The training step: the loss is {number}, so the step is not counted; parameters, running "
                "statistics and accumulated gradients are unchanged. Lower the learning rate, scale the inputs, or "
                "load the last saved state; if all labels of the batch are ignored, leave the batch out."
            )

    def _require_finite_gradients(
        self, gradients: Mapping[str, Buffer], results: Sequence[Array | ort.OrtValue]
    ) -> None:
        """Raises DivergenceError if a gradient of a training step on infinite inputs is NaN or infinite.

        Args:
            gradients: the step's dense gradients, by parameter name.
            results: the step's results: the outputs, then rows and indices of each sparse gradient.
        """
        arrays = {spec.name: widen(gradients[spec.name].read(), spec.dtype) for spec in self._dense}
        rows = results[len(self._manifest.outputs) :: 2]
        arrays |= {spec.name: to_array(value) for spec, value in zip(self._sparse, rows, strict=True)}
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise DivergenceError(
                    f"The training step: an input contains infinity, and makes the gradient of '{name}' NaN or "
                    "infinite, so the step is not counted; parameters, running statistics and accumulated gradients "
                    "are unchanged. Leave out or fill the samples with infinity."
                )

    def _run_training(
        self, binding: Binding, values: Sequence[Array | ort.OrtValue]
    ) -> list[Array | ort.OrtValue]:
        """Runs the training model and returns its results.

        Random numbers depend on the seed, the number of optimizer steps, and the number of runs since the last step.

        Args:
            binding: binding of the session to the buffers for this run.
            values: one array or OrtValue per argument.
        """
        if not self._host_inputs and not self._manifest.draws:
            return binding.run(values)
        progress = self._store.optimizer
        numbers = {
            "seed": self._seed,
            "step": 0 if progress is None else progress.step,
            "run": self._store.runs,
        }
        for spec in self._manifest.host_inputs:
            self._host_inputs[spec.name].write(np.array([numbers[name] for name in spec.holds], np.int64))
        # Modules without Dropout neither wait for each other nor modify the process's generator.
        with seeded(**numbers) if self._manifest.draws else nullcontext():
            return binding.run(values)

    def train(self, mode: bool = True) -> Module:
        """Puts the module in training mode, or in evaluation mode if `mode` is False, and returns it."""
        self.training = mode
        return self

    def eval(self) -> Module:
        """Puts the module in evaluation mode and returns it."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Makes the next training step replace the gradients instead of adding to them.

        Raises:
            TrainingStateError: the gradients belong to another thread, which has not used them yet.
        """
        with self.lock:
            if self._store.gradients_valid:
                self._store.gradient_owner.reset("Module.lazy_reset_grad()")
            self._reset = True

    def input_names(self) -> list[str]:
        """Returns the names of the arguments of a call: user inputs, then targets, e.g. ["x", "labels"]."""
        return [spec.name for spec in self._manifest.arguments]

    def output_names(self) -> list[str]:
        """Returns the names of the outputs of a call: the loss, then additional outputs, e.g. ["loss", "logits"]."""
        return list(self._manifest.outputs)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the training model."""
        return self._manifest

    def _selected(self, trainable_only: bool) -> list[Buffer]:
        """Returns the buffers of the trainable parameters, or of all parameters, in graph order."""
        specs = self._manifest.trainable if trainable_only else self._manifest.parameters
        return [self._store.parameters[spec.name] for spec in specs]

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Returns the total number of elements of the trainable parameters, or of all if `trainable_only` is False."""
        return sum(buffer.size for buffer in self._selected(trainable_only))

    def _common_dtype(self, buffers: Sequence[Buffer]) -> np.dtype[np.generic]:
        """Returns the storage dtype of the buffers. Raises InputError if not all have the same dtype."""
        names = {buffer.dtype.name for buffer in buffers}
        if len(names) > 1:
            raise InputError(
                "A contiguous buffer needs parameters of one dtype; this selection has "
                f"{', '.join(sorted(names))}. Copy the parameters one at a time, through "
                "CheckpointState.parameters."
            )
        return buffers[0].dtype.storage if buffers else np.dtype(np.float32)

    def get_contiguous_parameters(self, trainable_only: bool = False) -> ort.OrtValue:
        """Copies the parameters to one flat buffer, in graph order.

        Args:
            trainable_only: True to copy only the trainable parameters.

        Returns:
            One-dimensional `OrtValue` on the CPU, with the parameters' dtype (usually float32; raw bits in uint16 for
            bfloat16).

        Raises:
            InputError: the parameters have different dtypes.
            CheckpointError: parameters of a nominal checkpoint have no data yet.
        """
        with self.lock:
            self._store.require_defined("Copying the parameters to a buffer")
            buffers = self._selected(trainable_only)
            # The empty array determines the dtype if no parameter is selected.
            flat = np.concatenate(
                [np.empty(0, self._common_dtype(buffers)), *(b.read().reshape(-1) for b in buffers)]
            )
        # ortvalue_from_numpy would share the memory of `flat`, which is freed while views of the value still exist.
        value = ort.OrtValue.ortvalue_from_shape_and_type(flat.shape, flat.dtype)
        value.update_inplace(flat)
        return value

    def copy_buffer_to_parameters(self, buffer: ort.OrtValue | Array, trainable_only: bool = True) -> None:
        """Copies a flat buffer, as returned by :meth:`get_contiguous_parameters`, to the parameters.

        A nominal checkpoint is complete once all its parameters have been copied (`trainable_only=False`).

        Args:
            buffer: one-dimensional, with the parameters' dtype and total number of elements.
            trainable_only: True if the buffer contains only the trainable parameters.

        Raises:
            InputError: the buffer has the wrong dtype, rank or size. No parameter is modified.
        """
        flat = buffer.numpy() if isinstance(buffer, ort.OrtValue) else buffer
        selected = self._selected(trainable_only)
        dtype, size = self._common_dtype(selected), sum(b.size for b in selected)
        if not isinstance(flat, np.ndarray) or flat.dtype != dtype or flat.shape != (size,):
            received = (
                f"{flat.dtype}{list(flat.shape)}" if isinstance(flat, np.ndarray) else type(flat).__name__
            )
            raise InputError(
                f"Copying a buffer to the {'trainable ' if trainable_only else ''}parameters: expected "
                f"{dtype}[{size}] as an OrtValue or numpy array, received {received}. Is "
                f"trainable_only={trainable_only} meant?"
            )
        start = 0
        with self.lock:
            for target in selected:
                target.write(flat[start : start + target.size].reshape(target.shape))
                start += target.size

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: Sequence[str]
    ) -> None:
        """Writes an ordinary ONNX model with the current parameters.

        The model is the eval model without the nodes and inputs that the outputs do not need (loss, targets). The
        parameters of a model over 2 GB are in a second file, `<name>.<12 hexadecimal digits>.data`. Each export creates
        a new data file, and removes the data file of the model that it replaces. Parameters are written unchanged,
        including NaN and infinity.

        Args:
            inference_model_uri: path of the file to write.
            graph_output_names: values of the eval model that become the outputs, e.g. ["logits"].

        Raises:
            TrainingStateError: the module has no eval model.
            InputError: a name is not a value computed by the eval model; the message lists some that are.
            ModelError: the file cannot be written.
        """
        if self._eval_model is None:
            raise TrainingStateError(
                "Exporting for inference needs the eval model. Pass it: Module(train_model, state, "
                "eval_model_uri='eval_model.onnx')."
            )
        # Imported here, because a device exports once, if at all.
        from onnxtrain.runtime.export import export_inference_model

        with self.lock:
            self._store.require_defined("Exporting for inference")
            export_inference_model(
                self._eval_model, self._bound_inputs(), inference_model_uri, graph_output_names
            )
