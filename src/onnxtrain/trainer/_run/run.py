"""Opens a training run: checkpoint, training and evaluation sessions, optimizer and predictor.

All sessions share the parameters in memory, so that predictions use the latest parameters without copying.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from onnxtrain._words import argument
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.distributed._join import threads_of_worker
from onnxtrain.errors import CheckpointError, GraphBuildError, InputError, TrainingStateError
from onnxtrain.runtime.artifact_folder import own_file
from onnxtrain.runtime.atomic import FileSet, finish_interrupted
from onnxtrain.runtime.binding import Binding
from onnxtrain.runtime.checkpoint import encode_checkpoint
from onnxtrain.runtime.device import parse_device
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.export import export_inference_model
from onnxtrain.runtime.external_data import external_files
from onnxtrain.runtime.inputs import check_arguments
from onnxtrain.runtime.lock import StateLock
from onnxtrain.runtime.manifest import InputSpec, Manifest, parse_manifest
from onnxtrain.runtime.session import open_session, require_values
from onnxtrain.runtime.session_settings import SessionSettings
from onnxtrain.runtime.store import Buffer, Store, to_array
from onnxtrain.trainer._run.copies import Copies
from onnxtrain.trainer._run.files import CHECKPOINT, find_files, require_free
from onnxtrain.trainer._run.loss_model import LossModel
from onnxtrain.trainer._run.position import saved_threads
from onnxtrain.trainer.data import fill, static_batch


class Step(NamedTuple):
    """Result of one batch: its arrays, its loss and the model's outputs."""

    arrays: list[Array]
    loss: float
    outputs: list[Array]


def open_whole_optimizer(run: Run) -> Optimizer:
    """Opens an optimizer that updates all trained parameters in this process."""
    return Optimizer(run.directory / run.files.optimizer_model, run.module)


class Run:
    """Training run in a directory of artifacts, opened on an execution device.

    Attributes:
        directory: directory of the artifacts.
        files: names of the artifacts.
        training_model, eval_model: paths of the models.
        state: parameters, statistics and optimizer state.
        module: training and eval model, which compute training and evaluation steps.
        optimizer: optimizer that updates the parameters.
        rewrite: function that generates the artifacts again; None if the original model is not available.
        open_optimizer: function that opens :attr:`optimizer`; workers that shard the optimizer replace it.
        outputs: names of the model's own outputs, which the training and eval models return after the loss.
        predicted: names of the outputs that :meth:`predict` returns.
        exported: names of the outputs that :meth:`export` writes by default: `predicted`, and the key-value cache of a
            language model that generates text.

    Args:
        directory: directory of the artifacts.
        device: "cpu", "cuda" or "cuda:<index>".
        threads: number of threads per op. None uses the number saved in the checkpoint; if there is none, the cores are
            divided among the workers on a machine.
        write: function that generates the artifacts again: `write(directory, sample_weight=True)`. None if the original
            model is not available.

    Raises:
        CheckpointError: the checkpoint is missing, corrupt, or from a different model.
        ModelLoadError: a model is missing or corrupt.
    """

    def __init__(
        self,
        directory: Path,
        device: str,
        threads: int | None = None,
        write: Callable[..., None] | None = None,
    ) -> None:
        try:
            # A process killed during a save left a journal; its renames are finished first. A link could lead to
            # someone else's journal, so it is refused.
            own_file(directory, CHECKPOINT)
            finish_interrupted(directory / CHECKPOINT)
        except OSError as error:
            raise CheckpointError(f"Opening the training run in '{directory}': {error}.") from error
        self.directory = directory
        self.files = find_files(directory)
        self.state = CheckpointState.load_checkpoint(directory / self.files.checkpoint)
        self.eval_model = directory / self.files.eval_model
        self.training_model = directory / self.files.training_model
        threads = threads or saved_threads(self.state.properties) or threads_of_worker()
        self.options = None if threads is None else SessionSettings(threads=threads).options()
        self.device = parse_device(device)
        self.rewrite = write
        self.open_optimizer: Callable[[Run], Optimizer] = open_whole_optimizer
        self._copies = Copies()
        self._open()

    def _open(self) -> None:
        """Opens the sessions, which share the tensors of the state."""
        self.module = Module(
            self.training_model,
            self.state,
            self.eval_model,
            device=str(self.device),
            session_options=self.options,
            # The data was checked when it was opened, and `Stepper` restores the last good state.
            error_if_nonfinite=False,
        )
        self.optimizer = self.open_optimizer(self)
        # The first output of a training model is the loss.
        self.outputs = self.module.output_names()[1:]
        inference = self.directory / self.files.inference_model if self.files.inference_model else None
        self._inference = inference if inference is not None and inference.is_file() else None
        exported = list(self.manifest.inference_outputs) if self._inference else self.outputs
        # Users' samples contain no key-value cache, so the eval model, which has none, predicts.
        self._cached = not {spec.name for spec in self.manifest.inputs}.issuperset(
            self.manifest.inference_inputs
        )
        self.exported, self.predicted = exported, self.outputs if self._cached else exported

    @property
    def weighted(self) -> bool:
        """True if the models have an input for sample weights."""
        return self.manifest.sample_weight is not None

    def enable_sample_weights(self) -> None:
        """Rebuilds the models with an input for sample weights; parameters are not changed.

        Raises:
            InputError: the loss does not support sample weights, or the original model is no longer available.
        """
        if self.weighted:
            return
        if self.rewrite is None:
            raise InputError(
                "The models of this run take no sample weights. Start a new run with "
                f"{argument('sample_weight')} or {argument('class_weight')}."
            )
        # Written elsewhere first: if the loss does not support sample weights, the directory is not changed.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            source = Path(folder)
            try:
                self.rewrite(source, sample_weight=True)
            except GraphBuildError as error:
                raise InputError(f"Training with sample weights: {error}.") from error
            new_manifest = parse_manifest(
                (source / self.files.manifest).read_text(encoding="utf-8"), "the new models"
            )
            # The model object or file may have changed since the run began.
            if new_manifest.fingerprint != self.manifest.fingerprint:
                raise InputError(
                    "Training with sample weights: the model has been changed since the Trainer was "
                    "created. Create a new Trainer."
                )
            with FileSet(self.directory) as files:
                for path in source.iterdir():
                    # The new checkpoint contains the original parameters; keep the trained ones.
                    if path.name != self.files.checkpoint:
                        files.copy(path, path.name)
        # Reopened from the new files at their next use.
        for name in ("loss_model", "_predictor"):
            # cached_property keeps its value in the instance's dictionary.
            self.__dict__.pop(name, None)
        self._open()

    @property
    def manifest(self) -> Manifest:
        """Manifest of the models."""
        return self.module.manifest

    @property
    def store(self) -> Store:
        """Tensors of the state."""
        return self.state._store

    @property
    def _buffers(self) -> dict[str, Buffer]:
        """Parameters and statistics by name."""
        return {**self.store.parameters, **self.store.statistics}

    @property
    def lock(self) -> StateLock:
        """Lock that lets one thread at a time use the state, the module and the optimizer."""
        return self.state.lock

    def step(self, arrays: Sequence[Array], *, training: bool) -> tuple[float, list[Array]]:
        """Runs the training model or the eval model on a batch; returns the loss and the model's own outputs."""
        with self.lock, self._explained(self.manifest.arguments, arrays):
            self.module.train(training)
            results = self.module(*arrays)
        loss, *outputs = results if isinstance(results, tuple) else (results,)
        return float(np.asarray(loss)), [np.asarray(output) for output in outputs]

    @contextlib.contextmanager
    def _explained(self, specs: Sequence[InputSpec], arrays: Sequence[Array]) -> Iterator[None]:
        """Context manager: if ONNX Runtime fails on a batch of texts, the error says how long the texts are.

        Models fail on texts that are longer than their positions with an error about the shapes of some node.
        """
        try:
            yield
        except InputError as error:
            lengths = [
                array.shape[-1]
                for spec, array in zip(specs, arrays, strict=False)
                if spec.name == "input_ids"
            ]
            if error.__cause__ is None or self.manifest.groups is None or not lengths:
                raise
            raise InputError(
                f"{error}. The texts of the batch have up to {lengths[0]} tokens. If the model takes fewer, start a "
                f"new run with their number as {argument('max_length')}, which truncates longer texts."
            ) from error.__cause__

    @cached_property
    def batch_size(self) -> int | None:
        """Batch size that the models require; None for any size."""
        return static_batch(self.manifest.arguments)

    def _filled(self, arrays: Sequence[Array]) -> tuple[list[Array], int]:
        """Pads a batch with copies of its last sample to the fixed batch size, if there is one.

        Returns:
            The padded batch, and its number of real samples.
        """
        count = len(arrays[0])
        missing = 0 if self.batch_size is None else self.batch_size - count
        return (list(arrays) if missing <= 0 else [fill(array, missing) for array in arrays]), count

    def evaluate(self, batches: Iterable[Sequence[Array]]) -> Iterator[Step]:
        """Runs batches in inference mode, and yields the result of each.

        For a model with a fixed batch size, an incomplete batch is padded; the results for the padding are dropped.

        Raises:
            InputError: the loss of an incomplete batch cannot be computed.
        """
        for batch in batches:
            arrays, count = self._filled(batch)
            with self.lock:
                loss, outputs = self.step(arrays, training=False)
                if len(arrays[0]) > count:
                    loss = self.loss_model.loss_of_first(count, loss, outputs, arrays)
            if len(arrays[0]) > count:
                outputs = [output[:count] for output in outputs]
            yield Step(list(batch), loss, outputs)

    @cached_property
    def loss_model(self) -> LossModel:
        """Model that computes only the loss, for batches of any size.

        Raises:
            InputError: the loss cannot be separated from the eval model.
        """
        return LossModel(self.eval_model, self.manifest, self._buffers, self.device, self.options)

    def predict(self, batches: Iterable[Sequence[Array]]) -> dict[str, Array]:
        """Returns the model's outputs for all samples by name, computed in inference mode.

        The caller must hold :attr:`lock`, because the predictor reads the parameters that training steps write.

        Raises:
            InputError: an output has no sample axis.
        """
        specs, binding = self._predictor
        input_indices = [self.manifest.row_inputs.index(spec) for spec in specs]
        parts: dict[str, list[Array]] = {name: [] for name in self.require_outputs()}
        for batch in batches:
            arrays, count = self._filled(batch)
            given = [arrays[index] for index in input_indices]
            with self._explained(specs, given):
                values = binding.run(check_arguments(specs, given))
            for name, value in zip(parts, values, strict=True):
                part = to_array(value)
                if part.ndim == 0 or len(part) != len(arrays[0]):
                    raise InputError(
                        f"Predicting: the output '{name}' of shape {list(part.shape)} has no value per sample. Export "
                        "the model and run it instead."
                    )
                # Results are copied from ONNX Runtime's memory, so that they survive the next batch.
                parts[name].append(part[:count])
        return {name: np.concatenate(values) for name, values in parts.items()}

    @cached_property
    def _predictor(self) -> tuple[list[InputSpec], Binding]:
        """Inputs and binding of the inference model, which shares the parameters of the state."""
        # Without an inference model, the part that predicts is cut out of the eval model.
        outputs = self.require_outputs()
        inference = None if self._cached else self._inference
        if inference is not None:
            session = open_session(inference, "inference model", self.device, self.options)
        else:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                path = Path(folder) / "model.onnx"
                export_inference_model(self.eval_model, {}, path, outputs)
                session = open_session(path, "inference part of the eval model", self.device, self.options)
        # An inference model lacks inputs that its outputs do not depend on.
        names = {value.name for value in session.get_inputs()}
        specs = [spec for spec in self.manifest.row_inputs if spec.name in names]
        buffers = self._buffers
        if inference is not None:
            source = f"inference model '{inference}'"
            require_values(session, source, {*buffers, *(spec.name for spec in specs)}, set(outputs))
        return specs, Binding(
            session,
            self.device,
            arguments=[spec.name for spec in specs],
            results=outputs,
            inputs={name: buffer for name, buffer in buffers.items() if name in names},
            outputs={},
            doing="Predicting",
        )

    def require_outputs(self) -> list[str]:
        """Returns the names of the outputs that :meth:`predict` returns, after checking that there are any.

        Raises:
            TrainingStateError: the models return only the loss.
        """
        if not self.predicted:
            raise TrainingStateError(
                f"The models in '{self.directory}' return only the loss, so there is nothing to predict or "
                "export. Generate them with additional_output_names=[names of the model's outputs]."
            )
        return self.predicted

    def export(
        self,
        path: str | os.PathLike[str],
        outputs: Sequence[str] | None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Writes a model that contains the parameters and computes `outputs`, by default :attr:`exported`.

        Args:
            path: file to write.
            outputs: names of the outputs.
            metadata: entries to add to the model's metadata, by key.
        """
        names = (self.require_outputs() and self.exported) if outputs is None else outputs
        # Intermediate values are not outputs of the inference model, and are cut out of the eval model.
        whole = self._inference is not None and set(names) <= set(self.exported)
        if not whole and self.manifest.groups is not None:
            raise InputError(
                f"Exporting {', '.join(names)}: a model trained on pairs of texts can be exported only with "
                f"outputs of the file ({', '.join(self.exported)})."
            )
        source = self._inference if whole and self._inference is not None else self.eval_model
        self.store.require_defined("Exporting for inference")
        export_inference_model(source, self._buffers, path, names, metadata)

    def save(
        self,
        target: Path,
        companions: Sequence[str] = (),
        write_more: Callable[[FileSet], None] | None = None,
    ) -> None:
        """Writes all files of the run to a directory atomically: an error leaves the old files unchanged.

        If `target` is not :attr:`directory`, the models and `companions` are copied to it, except for files that it
        already contains with the same content.

        Args:
            target: directory to write to; created if it is missing.
            companions: names of further files in :attr:`directory`, e.g. "best". They are copied to `target`; if a file
                does not exist, it is removed from `target`.
            write_more: function that adds further files to the set of files that are replaced together.

        Raises:
            OSError: a file cannot be written.
            CheckpointError: some parameters have no data, or `target` contains the user's own files under names that a
                run uses.
        """
        # Without a manifest, a second save could not tell its own files from the user's.
        if target.resolve() != self.directory.resolve() and (self.directory / self.files.manifest).is_file():
            require_free(target, f"Saving the run to '{target}'", manifest=self.files.manifest)
        # Raises for parameters without data before the directory is created.
        encode = encode_checkpoint(self.store, f"Saving the run to '{target}'", include_optimizer_state=True)
        existed = target.exists()
        target.mkdir(parents=True, exist_ok=True)
        try:
            self._write_files(target, companions, write_more, encode)
        except BaseException:
            if not existed:
                # The directory is not empty, and kept, if another process has written to it.
                with contextlib.suppress(OSError):
                    target.rmdir()
            raise

    def _write_files(
        self,
        target: Path,
        companions: Sequence[str],
        write_more: Callable[[FileSet], None] | None,
        encode: Callable[[BinaryIO], None],
    ) -> None:
        """Writes the files that :meth:`save` replaces together.

        Args:
            target: directory to write to.
            companions: names of further files to copy from :attr:`directory`, or to remove from `target` if missing.
            write_more: function that adds further files to the set; None to add none.
            encode: function that writes the checkpoint to an open file.
        """
        with FileSet(target) as files:
            # The models in the run's own directory were written when it was built.
            if target.resolve() != self.directory.resolve():
                for group in self.model_files():
                    self._copies.add(files, target, group)
                for name in companions:
                    if (self.directory / name).is_file():
                        self._copies.add(files, target, [self.directory / name])
                    else:
                        files.remove(name)
            if write_more is not None:
                write_more(files)
            # The checkpoint is last: a host that ignores journals and reads the directory meanwhile finds the older
            # files complete.
            with files.open(self.files.checkpoint) as file:
                encode(file)

    def model_files(self) -> list[list[Path]]:
        """Returns groups of files that belong together: each model with its external data, and the manifest."""
        names = (self.files.training_model, self.files.eval_model, self.files.optimizer_model)
        models = [*(self.directory / name for name in names), *([self._inference] if self._inference else [])]
        groups = [[*external_files(path), path] for path in models]
        manifest = self.directory / self.files.manifest
        return [*groups, *([[manifest]] if manifest.is_file() else [])]

    def load_parameters(self, path: str | os.PathLike[str]) -> None:
        """Copies parameters and statistics from a checkpoint file to the state.

        Raises:
            CheckpointError: the file is corrupt, or belongs to a different model.
        """
        other = CheckpointState.load_checkpoint(path)
        groups = ((self.state.parameters, other.parameters), (self.state.statistics, other.statistics))
        for ours, theirs in groups:
            # All names are compared before the first value is copied, so that a file of another model changes nothing.
            different = {name for name, _ in ours} ^ {name for name, _ in theirs}
            if different:
                raise CheckpointError(
                    f"Loading parameters from '{os.fspath(path)}': it belongs to another model "
                    f"(not in both: {', '.join(sorted(different)[:5])})."
                )
        for ours, theirs in groups:
            for name, parameter in theirs:
                try:
                    ours[name] = parameter.data
                except InputError as error:
                    raise CheckpointError(f"Loading parameters from '{os.fspath(path)}': {error}") from error
